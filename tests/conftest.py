"""Shared fixtures: every test has its own home for data and cache; torch keeps to one thread."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

from fedthe.data.pool import Dataset
from helpers import make_pool

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined: before anything imports one

torch.set_num_threads(1)  # tiny cases run many times faster, and two workers share two cores

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")

REAL_HOME = Path(os.environ.get("FEDTHE_HOME") or Path.home() / ".cache" / "fedthe")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or writes the user's own data and cache."""
    monkeypatch.setenv("FEDTHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="session")
def cifar10_home() -> Path:
    """A home that holds real CIFAR-10: the user's, or, on CI, one fetched into the user's."""
    from fedthe.data.fetch import fetch, is_whole

    if os.environ.get("CI"):
        fetch("cifar10", home=REAL_HOME)  # does nothing where it is whole; two workers wait for each other
    elif not is_whole("cifar10", home=REAL_HOME):
        pytest.skip("CIFAR-10 is not there; run `fedthe data fetch cifar10`")
    return REAL_HOME


@pytest.fixture(scope="session")
def browser():
    """A Chromium for all tests of a worker."""
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        if os.environ.get("CI"):
            pytest.fail("there is no Chromium; run `make browser`")
        pytest.skip("there is no Chromium; install it with `make browser` as root, or by hand")
    with sync_playwright() as playwright:
        quiet = ["--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update"]
        browser = playwright.chromium.launch(executable_path=path, args=quiet)
        yield browser
        browser.close()


@pytest.fixture
def dataset() -> Dataset:
    """1,000 rows of ten classes, and a shifted pool that holds seven of them."""
    labels = np.arange(1000) % 10
    shifted = np.repeat([1, 2, 3, 5, 6, 8, 9], 30)
    return Dataset(make_pool(labels), {"natural": make_pool(shifted, "shifted", classes=10)})


@pytest.fixture
def data(tmp_path: Path) -> str:
    """A tiny dataset of three classes that differ in brightness."""
    labels = np.arange(150) % 3
    noise = np.random.default_rng(0).integers(0, 90, (150, 16, 16, 3))
    np.savez(tmp_path / "tiny.npz", images=(noise + 70 * labels[:, None, None, None]).astype(np.uint8), labels=labels)
    return f"npz:{tmp_path / 'tiny.npz'}"


@pytest.fixture
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where stacked layers run, as `stacked_layers` says."""
    monkeypatch.setattr("fedthe.kernels.interpreting", request.param == "interpreter")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # what we compare with is exact
    return torch.device("cuda" if request.param == "cuda" else "cpu")


@pytest.fixture
def columns() -> int:
    """How wide the terminal is."""
    return 120


@pytest.fixture
def fedthe(capfd, monkeypatch, columns):
    """Run the command inside this process: its standard output and error, after its exit code was checked."""
    from fedthe import cli

    monkeypatch.setenv("COLUMNS", str(columns))

    def run(*arguments, exits=0):
        monkeypatch.setattr(sys, "argv", ["fedthe", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        said = capfd.readouterr()
        assert stopped.value.code == exits, said.err
        return said

    return run
