"""Why a path is not a run or a record, and what to name instead: one sentence for each kind of mistake."""

from __future__ import annotations

from pathlib import Path

RUN = "name the folder of a run, such as runs/quick"
RUN_OR_RECORD = f"{RUN}, or a record of `fedthe table --save`"


def explain(path: Path, wanted: str = RUN_OR_RECORD) -> str:
    """Why there is nothing to show at `path`, and what to do. Opens no file: a pipe would block."""
    if not path.exists():
        return f"{path} does not exist; {wanted}."
    if not path.is_dir() and not path.is_file():
        return f"{path} is neither a file nor a folder; {wanted}."
    if path.suffix == ".toml" and path.is_file():
        return f"{path} is a config, not a run; `fedthe run {path}` runs it and prints the folder."
    if path.is_dir() and (runs := sorted(each.parent for each in path.glob("*/config.json"))):
        more = ", ..." if len(runs) > 3 else ""
        return f"{path} is not a run but holds runs; name one of them: {', '.join(map(str, runs[:3]))}{more}."
    for folder in (path.parent, path.parent.parent):
        if (folder / "config.json").is_file():
            return f"{path} is part of a run; name the folder of the run, {folder}."
    if path.is_dir() and not any(path.iterdir()):
        return f"{path} is an empty folder and holds no run; {wanted}."
    return f"{path} holds no run and no record of a table or a figure; {wanted}."
