"""Every id of the package has one display name, and nobody keeps names of their own."""

import pytest

from fedthe.methods import METHODS, STUDIES
from fedthe.names import METHOD_NAMES, NET_NAMES, OURS, PROBE_NAMES, STUDY_NAMES, TEST_NAMES, name_method, name_test
from fedthe.nets import NETS
from fedthe.study import draw
from fedthe.study.figures.probing import MODES
from helpers import ROOT

SCRIPTS = sorted((ROOT / "src" / "fedthe" / "report" / "page" / "js").glob("*.js"))


def test_every_method_and_network_has_a_name():
    assert METHOD_NAMES.keys() == METHODS.keys()
    assert NET_NAMES.keys() == NETS.keys()
    assert PROBE_NAMES.keys() == set(MODES)
    assert STUDY_NAMES.keys() == {id for id in STUDIES if id.startswith(("authors_", "regime_"))}
    assert set(OURS) < METHOD_NAMES.keys()


def test_colours_are_keyed_by_the_same_ids():
    assert draw.METHOD_COLOURS.keys() | draw.LINES.keys() <= METHOD_NAMES.keys()
    assert draw.TEST_COLOURS.keys() == TEST_NAMES.keys() | {"natural"}
    assert draw.PROBE_COLOURS.keys() == PROBE_NAMES.keys()


def test_other_ids_are_shown_as_they_are():
    assert name_method("my_method") == "my_method"
    assert name_test("imagenet_a") == "imagenet_a"
    assert name_method("a\x1bb") == "a\N{REPLACEMENT CHARACTER}b"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_have_no_names_of_their_own(path):
    text = path.read_text(encoding="utf-8")
    names = {name for name in (*METHOD_NAMES.values(), *TEST_NAMES.values()) if not name.islower()} | {"out-of-client"}
    assert [name for name in names if name in text] == []
