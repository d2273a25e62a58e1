"""The golden run gives the numbers of golden.json, and CHANGELOG.md says when they last changed."""

import json

import pytest

from golden import FILE, measure
from helpers import ROOT

CHANGELOG = ROOT / "CHANGELOG.md"
# Another processor adds in another order: a sample or so may then be answered otherwise.
NEAR = {"accuracy": {"abs": 3.2}, "loss": {"rel": 1e-4}, "e": {"abs": 1e-3}}


def test_the_golden_run_has_not_moved():
    kept, now = json.loads(FILE.read_text()), json.loads(json.dumps(measure()))
    assert " ".join(kept["changelog"].split()) in " ".join(CHANGELOG.read_text(encoding="utf-8").split())
    assert now["manifests"] == kept["manifests"]
    for what, tolerance in NEAR.items():
        assert now[what].keys() == kept[what].keys()
        for method, value in now[what].items():
            assert value == pytest.approx(kept[what][method], **tolerance), (what, method)
