"""A file of slots of one size, each with the record of a client.

No slot is handed out twice between two calls of `keep`. So a process may be killed at any moment, and the file still
holds all records that the last checkpoint refers to.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import weakref
from pathlib import Path
from typing import IO

import numpy as np

from .. import store
from ..errors import Damaged, InputError

HEADER = 16  # bytes before a slot's data: the round and the client, as int64


class Slots:
    # A read maps one slot and unmaps it at once, because mapped pages count as the process's memory. Writes do not use
    # a map: on a full disk that would be a SIGBUS, which kills the process, where a plain write raises OSError. Slots
    # are written whole, so the file grows with them and ends with the last one.

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.size = 0
        self.end = 0  # slots from here on were never handed out
        self.free: list[int] = []  # the lowest last
        self.hashes: dict[int, bytes] = {}  # SHA-256 of what was written last; a checkpoint holds those it refers to
        self.opened: IO[bytes] | None = None

    def open(self, size: int) -> None:
        """A new file for slots of `size` bytes, unless it is open already."""
        if self.opened is None:
            self._hold(self._make(), size)
        elif size != self.size:
            raise InputError("all clients must keep the same leaves, but others were put into their file before.")

    def reopen(self, size: int, used: np.ndarray, hashes: np.ndarray) -> None:
        """The file as an earlier process left it, of which the slots `used` count, with their hashes [used, 32]."""
        self.hashes = {slot: data.tobytes() for slot, data in zip(used.tolist(), hashes, strict=True)}
        if self.path is None:
            raise InputError("the clients' states were in a file that is not named; name it to go on.")
        try:
            file = self.path.open("r+b", buffering=0)
        except FileNotFoundError:
            raise InputError(f"{self.path} is missing; delete the checkpoint to train again.") from None
        except OSError as error:
            raise InputError(f"cannot open {self.path} ({error.strerror}); make it readable and writable.") from None
        self._hold(file, size)
        self.end = file.seek(0, os.SEEK_END) // size
        if self.end <= used.max():
            raise InputError(f"{self.path} is shorter than it was; delete the checkpoint to train again.")
        self.keep(used)

    def keep(self, used: np.ndarray) -> None:
        self.free = np.setdiff1d(np.arange(self.end), used)[::-1].tolist()

    def allocate(self, count: int) -> list[int]:
        slots = [self.free.pop() for _ in range(min(count, len(self.free)))]
        new = range(self.end, self.end + count - len(slots))
        self.end = new.stop
        return [*slots, *new]

    def write(self, slot: int, round: int, client: int, data: np.ndarray) -> None:
        assert self.opened is not None
        self.opened.seek(slot * self.size)
        self.hashes[slot] = hashlib.sha256(data.data).digest()
        for part in (np.array([round, client], np.int64).view(np.uint8), data):
            left = part.data
            try:
                while left:  # a disk that fills up may first take a part
                    left = left[self.opened.write(left) :]
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self.path or "a temporary file")) from None

    def read(self, slot: int, round: int, client: int) -> np.ndarray:
        """The data of a slot, mapped: copy it and let go."""
        if self.opened is None or (slot + 1) * self.size > self.opened.seek(0, os.SEEK_END):
            raise InputError(f"{self.path} is shorter than it was; delete the checkpoint to train again.")
        record = np.memmap(self.opened, np.uint8, "r", slot * self.size, (self.size,))
        whose = record[:HEADER].view(np.int64).tolist()
        if whose != [round, client]:
            raise InputError(
                f"{self.path or 'the temporary file'} no longer holds client {client} of round {round}, but something "
                f"newer; delete the checkpoint to train again."
            )
        data: np.ndarray = record[HEADER:]
        if hashlib.sha256(data.data).digest() != self.hashes.get(slot):
            raise Damaged(f"{self.path or 'the temporary file'} is damaged; delete the checkpoint to train again.")
        return data

    def sync(self) -> None:
        if self.opened is not None and self.path is not None:
            os.fsync(self.opened.fileno())

    def _make(self) -> IO[bytes]:
        if self.path is None:
            return tempfile.TemporaryFile(buffering=0)
        store.make_folder(self.path.parent)
        try:
            return self.path.open("w+b", buffering=0)
        except OSError as error:
            raise InputError(f"cannot write {self.path} ({error.strerror}); name another place.") from None

    def _hold(self, file: IO[bytes], size: int) -> None:
        self.opened, self.size = file, size
        weakref.finalize(self, file.close)
