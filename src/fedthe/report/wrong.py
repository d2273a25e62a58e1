"""Why a path is not a run or a record, and what to name instead: one sentence for each kind of mistake."""

from __future__ import annotations

from pathlib import Path

RUN = "name the folder of a run, such as runs/quick"
RUN_OR_RECORD = f"{RUN}, or a record of `fedthe table --save`"


def explain(path: Path, wanted: str = RUN_OR_RECORD) -> str:
    """Why there is nothing to show at `path`, and what to do. Opens no file: a pipe would block."""
    if path.is_dir():
        return _explain_folder(path, wanted)
    if path.is_file():
        return _explain_file(path, wanted)
    if not path.exists():
        return f"{path} does not exist; {wanted}."
    return f"{path} is neither a file nor a folder; {wanted}."


def _explain_folder(path: Path, wanted: str) -> str:
    runs = sorted(each.parent for each in path.glob("*/config.json"))
    if runs:
        more = ", ..." if len(runs) > 3 else ""
        named = ", ".join(str(each) for each in runs[:3])
        return f"{path} is not a run but holds runs; name one of them: {named}{more}."
    if (path.parent / "config.json").is_file():
        return f"{path} is part of a run; name the folder of the run, {path.parent}."
    if not any(path.iterdir()):
        return f"{path} is an empty folder and holds no run; {wanted}."
    return f"{path} holds no run and no record of a table or a figure; {wanted}."


def _explain_file(path: Path, wanted: str) -> str:
    if path.suffix == ".toml":
        return f"{path} is a config, not a run; `fedthe run {path}` runs it and prints the folder."
    for folder in (path.parent, path.parent.parent):
        if (folder / "config.json").is_file():
            return f"{path} is part of a run; name the folder of the run, {folder}."
    return f"{path} holds no run and no record of a table or a figure; {wanted}."
