"""What is built and handed on: a wheel that runs on its own, and a source archive in which `make demo` works."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser

import pytest

import fedthe
from helpers import ROOT

CARRIED = ("src", "tests", "benchmarks", "configs", "docs", "examples", "results", "tools")  # folders of the archive


def build(kind, folder):
    """A wheel or sdist by hatchling, which needs no network once it is installed."""
    if subprocess.run([sys.executable, "-c", "import hatchling"], capture_output=True).returncode:
        if os.environ.get("CI"):
            pytest.fail("there is no hatchling; run `make setup`")
        pytest.skip("there is no hatchling; run `make setup`")
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    with zipfile.ZipFile(build("wheel", tmp_path_factory.mktemp("wheel"))) as archive:
        folder = tmp_path_factory.mktemp("installed")
        archive.extractall(folder)
        return folder


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    with tarfile.open(build("sdist", tmp_path_factory.mktemp("sdist"))) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def list_files(folder):
    kept = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(folder)) for path in kept}


def run_installed(wheel, folder, *arguments):
    """The command from the wheel alone, with the dependencies of this environment, in an empty folder."""
    environment = os.environ | {"PYTHONPATH": str(wheel), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-P", "-m", "fedthe", *map(str, arguments)]
        if sys.version_info >= (3, 11)
        else [sys.executable, "-m", "fedthe", *map(str, arguments)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = list_files(wheel)
    about = f"fedthe-{fedthe.__version__}.dist-info/"
    assert {name.removeprefix("fedthe/") for name in names if not name.startswith(about)} == list_files(
        ROOT / "src" / "fedthe"
    )
    metadata = Parser().parsestr((wheel / about / "METADATA").read_text(encoding="utf-8"))
    assert metadata["Version"] == fedthe.__version__
    assert metadata["Requires-Python"] == "<3.14,>=3.10"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "fedthe = fedthe.cli:main" in (wheel / about / "entry_points.txt").read_text()


def test_an_installed_command_has_all_it_speaks_of(wheel, tmp_path):
    """The example is there, and what a refusal advises can be done."""
    where = run_installed(wheel, tmp_path, "--version")
    assert where.stdout == f"fedthe {fedthe.__version__}\n"
    refused = run_installed(wheel, tmp_path, "run", "none.toml")
    assert refused.returncode == 2
    advice = re.search("`fedthe (.*) > (.*)`", refused.stderr)
    written = run_installed(wheel, tmp_path, *advice[1].split())
    assert written.returncode == 0
    (tmp_path / advice[2]).write_text(written.stdout, encoding="utf-8")
    said = run_installed(wheel, tmp_path, "run", advice[2], "methods=nosuch")
    assert said.stderr.startswith("fedthe: there is no method 'nosuch'")  # so the file itself was taken
    assert run_installed(wheel, tmp_path, "table").stdout.count("main-dir") == 3


def test_no_message_sends_a_user_to_a_file_of_the_repository():
    for path in (ROOT / "src" / "fedthe").rglob("*.py"):
        for line in path.read_text(encoding="utf-8").splitlines():
            code = line.partition("#")[0]
            assert not re.search(r"\b(configs|docs|benchmarks|tools)/\w", code), (path.name, line)


def test_the_archive_has_what_make_and_the_pages_need(sdist):
    for folder in CARRIED:
        assert {f"{folder}/{name}" for name in list_files(ROOT / folder)} <= sdist, folder
    assert {"Makefile", "constraints.txt", "pyproject.toml", "LICENSE", "mkdocs.yml"} <= sdist
    named = re.findall(r"\b(?:tools|benchmarks)/[\w.]+|[\w-]+\.(?:toml|txt)\b", (ROOT / "Makefile").read_text())
    assert {"tools/setup.sh", "constraints.txt"} <= set(named) <= sdist
    for page in ("README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))):
        for link in re.findall(r"\]\((?!https?:)([^)#=]+)\)", (ROOT / page).read_text(encoding="utf-8")):
            target = os.path.normpath(os.path.join(os.path.dirname(page), link))
            assert any(name == target or name.startswith(f"{target}/") for name in sdist), (page, link)


def test_pages_promise_no_install_that_does_not_work():
    for page in (ROOT / "README.md", ROOT / "docs" / "index.md"):
        text = page.read_text(encoding="utf-8")
        assert "pip install ." in text
        assert not re.search(r"pip install '?fedthe(?!\[)", text)
