"""Files that are whole or not there: atomic writes, and a cache on disk keyed by content."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from .errors import InputError


def home() -> Path:
    """Where datasets and cached results live: $FEDTHE_HOME, or ~/.cache/fedthe."""
    return expand(Path(os.environ.get("FEDTHE_HOME") or "~/.cache/fedthe"))


def expand(path: Path) -> Path:
    """`path` with a leading ~ made the user's folder."""
    try:
        return path.expanduser()
    except RuntimeError:
        raise InputError(f"there is no home folder for {path}; name the place in full, or set FEDTHE_HOME.") from None


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place only when the block ends well."""
    make_folder(path.parent)
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.", suffix=".part")
    except OSError as error:
        raise InputError(f"cannot write below {path.parent} ({error.strerror}); name another place.") from None
    os.close(handle)
    part = Path(name)
    try:
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.chmod(0o666 & ~_umask())
        try:
            os.replace(part, path)
        except OSError as error:
            raise InputError(f"cannot write {path} ({error.strerror}); name another place.") from None
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path` that takes its place, old content and all, only when the block ends well."""
    make_folder(path.parent)
    part = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part"))
    old = part.with_suffix(".old")
    try:
        yield part
        part.chmod(0o777 & ~_umask())
        if path.exists():
            os.replace(path, old)
        try:
            os.replace(part, path)
        except BaseException:
            if old.exists():
                os.replace(old, path)
            raise
    finally:
        for leftover in (part, old):
            shutil.rmtree(leftover, ignore_errors=True)


def write_json(path: Path, value: object, indent: int | None = 1) -> None:
    with whole_file(path) as part:
        part.write_text(json.dumps(value, indent=indent) + "\n", encoding="utf-8")


def content_hash(*parts: object) -> str:
    """SHA-256 over arrays (dtype, shape and bytes) and anything that JSON can say."""
    sha = hashlib.sha256()
    for part in parts:
        if isinstance(part, np.ndarray):
            little = np.ascontiguousarray(part, dtype=part.dtype.newbyteorder("<"))
            sha.update(f"{little.dtype.str}{little.shape}".encode())
            sha.update(little.data)
        else:
            sha.update(json.dumps(part, sort_keys=True).encode())
        sha.update(b"\0")
    return sha.hexdigest()


def cached(kind: str, key: str, make: Callable[[], Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The arrays stored under `key`, or those that `make` gives, stored. A damaged file counts as absent."""
    path = home() / "cache" / f"{kind}-{key[:32]}.npz"
    try:
        return read_npz(path)  # the archive's checksums are verified as it is read
    except InputError:
        pass
    arrays = dict(make())
    try:
        with whole_file(path) as part, part.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
    except (InputError, OSError) as error:  # a cache is a convenience: without it, the work is done again next time
        warnings.warn(f"nothing is cached: {error}", stacklevel=2)
    return arrays


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """Every array of an npz file, with no pickle trusted."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        raise InputError(f"{path} does not exist.") from None
    except Exception as error:  # what damage can raise in the zip, zlib and npy readers is no closed list
        raise InputError(f"{path} is not a readable npz file ({error}); make or fetch it again.") from None


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write below {folder} ({error.strerror}); name another place.") from None


def check_folder(folder: Path) -> None:
    """Refuse what `make_folder` would refuse, and create nothing."""
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = "Permission denied" if there.is_dir() else "Not a directory"
        raise InputError(f"cannot write below {folder} ({why}); name another place.")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
