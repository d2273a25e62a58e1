"""Entry points of other packages."""

from importlib.metadata import EntryPoint

import pytest

from fedthe import plugins


def test_plugins_are_listed_and_a_broken_one_costs_only_a_warning(monkeypatch):
    points = [
        EntryPoint("mine", "fedthe.methods.base:Method", "fedthe.methods"),
        EntryPoint("broken", "no_such_package:Thing", "fedthe.methods"),
        EntryPoint("fedavg", "fedthe.methods.base:Predictor", "fedthe.methods"),
    ]
    monkeypatch.setattr(plugins, "entry_points", lambda group: points)
    with pytest.warns(UserWarning, match=r"no_such_package|is taken") as warned:
        found = plugins.load_plugins("fedthe.methods", {"fedavg": object})
    assert list(found) == ["mine"]
    assert len(warned) == 2
