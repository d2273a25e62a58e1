"""The files of onnxruntime-web: from a folder, from the cache, or from npm; always the same bytes."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from ... import store
from ...errors import InputError
from ...foreign import read_file, say_error, show_path

VERSION = "1.30.0"
NAMED = f"onnxruntime-web@{VERSION}"
FILES = {  # by name in the package: SHA-256
    "dist/ort.wasm.bundle.min.mjs": "11e64bd8ffe11bd1a2a2f0d6275fdfbbba7262f0b76b99b53d228a8a22ef3d90",
    "dist/ort-wasm-simd-threaded.wasm": "3398c10d07d229bd91b364548e130e0e51a8e5704b88c7c083ebbeb78842dee2",
}
LARGEST = 2**26  # bytes of a file
SECONDS = 600  # for npm


def read_onnxruntime(folder: Path | None = None) -> tuple[bytes, bytes]:
    """The script and the WebAssembly. folder: the package, unpacked; without one, npm brings it, once."""
    cache = store.home() / "onnxruntime-web" / VERSION
    if folder is None and not all((cache / name).exists() for name in FILES):
        fetch(cache)
    place = cache if folder is None else folder
    script, wasm = (_check(name, partial(read_file, place / name, LARGEST), place) for name in FILES)
    return script, wasm


def _check(name: str, read: Callable[[], bytes], place: Path) -> bytes:
    try:
        content = read()
    except FileNotFoundError:
        raise InputError(f"{show_path(place)} has no {name}; give the folder of {NAMED}.") from None
    if hashlib.sha256(content).hexdigest() != FILES[name]:
        raise InputError(f"{name} in {show_path(place)} is not that of {NAMED}; install it again.")
    return content


def fetch(cache: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise InputError(f"npm is missing; install it, or give the folder of {NAMED} by --onnxruntime.")
    with tempfile.TemporaryDirectory() as temporary:
        command = [npm, "pack", NAMED, "--silent", "--pack-destination", temporary]
        try:
            done = subprocess.run(
                command, cwd=temporary, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise InputError(f"npm cannot bring {NAMED} ({say_error(error)}).") from None
        packed = sorted(Path(temporary).glob("*.tgz"))
        if done.returncode or not packed:
            said = (done.stderr or done.stdout).strip().splitlines()
            raise InputError(f"npm cannot bring {NAMED} ({said[-1] if said else 'it says nothing'}).")
        files = _unpack(packed[0])
    with store.whole_folder(cache) as folder:
        for name, content in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)


def _unpack(packed: Path) -> Mapping[str, bytes]:
    """The files that are needed; nothing else of the archive is written anywhere."""

    def read(name: str) -> bytes:
        member = archive.extractfile(f"package/{name}")
        if member is None:
            raise KeyError(name)
        return member.read(LARGEST)

    try:
        with tarfile.open(packed) as archive:
            return {name: _check(name, partial(read, name), packed) for name in FILES}
    except (KeyError, tarfile.TarError, OSError, EOFError) as error:
        raise InputError(f"what npm brought as {NAMED} cannot be read ({say_error(error)}).") from None
