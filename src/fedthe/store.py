"""Files: atomic writes, seals that reveal changes, locks, and a cache on disk keyed by content."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from . import foreign
from .errors import Damaged, InputError, is_disk_full
from .text import clean

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def home() -> Path:
    """Where datasets and cached results live: $FEDTHE_HOME, or ~/.cache/fedthe."""
    return expand(Path(os.environ.get("FEDTHE_HOME") or "~/.cache/fedthe"))


def expand(path: Path) -> Path:
    """`path` with a leading ~ replaced by the home folder."""
    try:
        return path.expanduser()
    except RuntimeError:
        raise InputError(f"there is no home folder for {path}; give the full path, or set FEDTHE_HOME.") from None


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that replaces it if the block succeeds."""
    make_folder(path.parent)
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.", suffix=".part")
    except OSError as error:
        raise _cannot_write(path.parent, error.strerror) from None
    os.close(handle)
    part = Path(name)
    try:
        yield part
        sync_file(part)
        part.chmod(0o666 & ~_umask())
        try:
            os.replace(part, path)
        except OSError as error:
            raise InputError(f"cannot write {path} ({error.strerror}); use another path.") from None
    except Exception as error:
        if is_disk_full(error):
            raise InputError(f"{path} does not fit on the disk; free some space and try again.") from None
        raise
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path` that replaces it, with all its content, if the block succeeds."""
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


def sweep(folder: Path, start: str) -> None:
    """Remove what processes that were killed while they wrote files whose names start so have left in a folder.

    Only for files that one process at a time writes.
    """
    for each in folder.glob(f".{glob.escape(start[:100])}*"):
        if each.suffix in (".part", ".old"):
            if each.is_dir():
                shutil.rmtree(each, ignore_errors=True)
            else:
                each.unlink(missing_ok=True)


def sync_file(path: Path) -> None:
    """Wait until its content is on the disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names of its files are on the disk, too. Some systems cannot, and need not."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_bytes(path: Path, content: bytes) -> None:
    with whole_file(path) as part:
        part.write_bytes(content)


def write_json(path: Path, value: object, indent: int | None = 1) -> None:
    with whole_file(path) as part:
        part.write_text(json.dumps(value, indent=indent) + "\n", encoding="utf-8")


SEALED = 1  # in the names of cached files, so that unsealed ones of older versions are ignored
# A sealed file holds its id, which is its name, and a hash of id and content. So a file that was damaged, edited, or
# copied over another is noticed when it is read.


def write_sealed(path: Path, value: Mapping[str, Any], indent: int | None = 1) -> None:
    """Write a JSON object with a seal. An object with an "id" keeps a valid seal when its file is renamed."""
    id = str(value.get("id", path.stem))
    write_json(path, {**value, "seal": [id, _seal(id, value)]}, indent)


def read_sealed(path: Path) -> dict[str, Any] | None:
    """What `write_sealed` wrote, or None if the file does not exist."""
    try:
        with foreign.open_file(path) as file:
            return unseal(path, json.load(file))
    except FileNotFoundError:
        return None
    except Damaged:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(f"{path} is damaged ({foreign.say_error(error)}).") from None


def unseal(path: Path, value: Any) -> dict[str, Any]:
    """The content without its seal, which must be valid for the file at `path`."""
    if not isinstance(value, dict) or not isinstance(value.get("seal"), list):
        raise Damaged(f"{path} is not sealed: it was damaged, or written by hand or by an earlier version.")
    content = {key: part for key, part in value.items() if key != "seal"}
    _check_seal(path, str(content.get("id", path.stem)), tuple(value["seal"]), content)
    return content


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray], compress: bool = False) -> None:
    """Write an npz file with a seal in the comment of the archive."""
    save = np.savez_compressed if compress else np.savez
    with whole_file(path) as part:
        with part.open("wb") as file:
            save(file, **arrays)  # type: ignore[arg-type]
        with zipfile.ZipFile(part, "a") as archive:
            archive.comment = json.dumps([path.stem, _seal(path.stem, *_list_arrays(arrays))]).encode()


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """What `write_arrays` wrote."""
    try:
        with foreign.open_file(path) as file, zipfile.ZipFile(file) as archive:
            given = tuple(json.loads(archive.comment))
        arrays = foreign.read_npz(path)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist.") from None
    except Exception as error:  # a damaged file can raise anything in the zip and zlib readers
        raise Damaged(f"{path} is damaged ({foreign.say_error(error)}).") from None
    _check_seal(path, path.stem, given, *_list_arrays(arrays))
    return arrays


def _list_arrays(arrays: Mapping[str, np.ndarray]) -> list[Any]:
    return [part for name in sorted(arrays) for part in (name, np.asarray(arrays[name]))]


def _seal(id: str, *content: Any) -> str:
    return content_hash("fedthe", id, *content)


def _check_seal(path: Path, id: str, given: tuple[Any, ...], *content: Any) -> None:
    if len(given) != 2 or given[0] != id:
        raise Damaged(f"{path} is {clean(str(given[0] if given else 'a file'))} under another name.")
    if given[1] != _seal(id, *content):
        raise Damaged(f"{path} was changed after it was written.")


def file_hash(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with foreign.open_file(path) as file:
        return hashlib.sha256(file.read()).hexdigest()


@contextmanager
def hold(path: Path, wait: bool = True) -> Iterator[bool]:
    """Hold the lock `path`, which one process or thread can have at a time; yields False if taken and not `wait`.

    The system releases the lock of a process that ends, however it ends, so no lock is ever stale. On a file system
    without locks, everyone gets the lock.
    """
    make_folder(path.parent)
    while True:
        try:
            file = path.open("a")
        except OSError as error:
            raise _cannot_write(path.parent, error.strerror) from None
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            file.close()
            yield False
            return
        except OSError:
            break  # no locks on this file system
        if _is_file(file, path):
            break
        file.close()  # its last holder has removed it: try the next file of this name
    try:
        yield True
    finally:
        path.unlink(missing_ok=True)  # while we hold it, so that nobody else can hold this file
        file.close()


def _is_file(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def content_hash(*parts: object) -> str:
    """SHA-256 over arrays (dtype, shape and bytes) and JSON values."""
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
    """The arrays cached under `key`; `make` computes them if the file is missing or damaged."""
    path = home() / "cache" / f"{kind}-{key[:32]}-{SEALED}.npz"
    try:
        return read_arrays(path)
    except Damaged as error:
        warnings.warn(f"{error} It is computed again.", stacklevel=2)
    except InputError:
        pass  # it does not exist
    arrays = dict(make())
    try:
        write_arrays(path, arrays)
    except (InputError, OSError) as error:  # without a cache, the work is done again next time
        warnings.warn(f"nothing is cached: {error}", stacklevel=2)
    return arrays


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_write(folder, error.strerror) from None


def check_folder(folder: Path) -> None:
    """Refuse what `make_folder` would refuse, and create nothing."""
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = "Permission denied" if there.is_dir() else "Not a directory"
        raise _cannot_write(folder, why)


def _cannot_write(folder: Path, why: str | None) -> InputError:
    return InputError(f"cannot write in {folder} ({why}); use another folder.")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
