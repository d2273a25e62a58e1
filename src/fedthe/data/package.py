"""Packages from npm and apt, and archives: downloaded and unpacked within limits."""

from __future__ import annotations

import gzip
import re
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import IO, cast

from ..errors import InputError
from ..foreign import explain
from ..text import flatten

PATIENCE = 1800.0  # seconds for a package manager
LIMIT = 8 << 30  # bytes that an archive may unpack to
MEMBERS = 1_000_000  # files in it; ImageNet-R has 30,000
AT_ONCE = 1 << 24  # bytes of one read from a tar file: only a forged header claims more


def run_program(command: list[str], folder: Path, advice: str) -> None:
    shown = f"`{' '.join(command[:3])}`"
    if shutil.which(command[0]) is None:
        raise InputError(f"{command[0]} is not installed; {advice}")
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=PATIENCE, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise InputError(f"{shown} took more than {PATIENCE:.0f} seconds") from None
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"]
        reason = flatten(re.sub(r"https?://\S+", "its registry", lines[-1]), 200)
        raise InputError(f"{shown} failed with {reason!r}; {advice}") from None


def unpack(file: Path, target: Path) -> None:
    """Unpack a tar archive or Debian package into `target`; copy any other file there."""
    target.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".deb":  # apt has checked its signature
        run_program(["dpkg-deb", "-x", str(file), str(target)], target, "install dpkg")
    elif file.name.endswith((".tar", ".tar.gz", ".tgz")):
        _unpack_tar(file, target)
    else:
        shutil.copyfile(file, target / file.name)


def _unpack_tar(file: Path, target: Path) -> None:
    """Unpack plain files. Links and devices, which no dataset needs, are skipped; paths out of `target` are refused."""
    left = LIMIT
    with explain(f"{file.name} is not a whole tar archive"), file.open("rb") as raw, _open_tar(raw) as archive:
        for count, member in enumerate(archive):
            place = target / member.name
            if not place.resolve().is_relative_to(target.resolve()):
                raise InputError(f"{file.name} holds {member.name[:200]!r}, which leads out of its folder")
            left -= member.size
            if left < 0 or member.size < 0:
                raise InputError(f"{file.name} unpacks to more than {LIMIT} bytes")
            if count >= MEMBERS:
                raise InputError(f"{file.name} holds more than {MEMBERS} files")
            content = archive.extractfile(member) if member.isreg() else None
            if content is None:
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            with content, place.open("xb") as out:
                shutil.copyfileobj(content, out)


def _open_tar(raw: IO[bytes]) -> tarfile.TarFile:
    zipped = raw.read(2) == b"\x1f\x8b"
    raw.seek(0)
    stream = cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if zipped else raw
    return tarfile.open(fileobj=_SmallReads(stream), mode="r:")  # type: ignore[call-overload,no-any-return]


class _SmallReads:
    """A stream that refuses large reads: tarfile reads a header of any claimed size at once."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream = stream
        self.seek, self.tell = stream.seek, stream.tell

    def read(self, size: int) -> bytes:
        if not 0 <= size <= AT_ONCE:
            raise tarfile.ReadError(f"a header claims {size} bytes")
        return self.stream.read(size)
