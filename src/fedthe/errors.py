"""Exceptions of the package, and how to tell that the disk or the memory is full."""

from __future__ import annotations

import errno
import os
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager


class InputError(ValueError):
    """Bad input: one sentence that names what is wrong and how to fix it. The command exits with 2."""


class Failed(Exception):
    """One experiment failed; others can continue. The command exits with 1."""


class Stopped(Failed):
    """The user's `on_round` raised, which stops the run. The original error is in `__cause__`."""


class Damaged(InputError):
    """A file that is not what the package wrote under this name."""


class MethodFailed(UserWarning):
    """A method lacks some or all of its results."""


class Broken(Failed):
    """An exception in a method's code; the traceback is in `__cause__`."""

    def __init__(self, error: BaseException, sentence: str | None = None) -> None:
        super().__init__(sentence or describe_error(error))


class RemoteFailure(Failed):
    """A failure in another process; `traceback` is the traceback of a method's code, if that raised something."""

    def __init__(self, sentence: str, traceback: str | None) -> None:
        super().__init__(sentence)
        self.traceback = traceback


def format_traceback(error: Failed) -> str | None:
    """The traceback of the exception that made a method fail; None if its code raised nothing."""
    if isinstance(error, RemoteFailure):
        return error.traceback
    return None if error.__cause__ is None else "".join(traceback.format_exception(error.__cause__))


def describe_error(error: BaseException) -> str:
    """Its words on one line, after its class unless it is an InputError."""
    try:
        words = " ".join(str(error).split())
    except Exception:  # this, too, runs the user's code
        words = "it cannot be shown"
    return words if isinstance(error, InputError) and words else f"{type(error).__name__}: {words}"


def list_causes(error: BaseException) -> Iterator[BaseException]:
    """An error and its causes: libraries wrap the error of a full disk in their own."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def is_disk_full(error: BaseException) -> bool:
    """Whether the cause is a full disk, a quota, or a limit on file sizes."""
    codes = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    # safetensors (Rust) gives the message alone; NumPy says how much it wrote
    words = "|".join([*map(os.strerror, codes), "[0-9]+ requested and [0-9]+ written"])
    return any(getattr(each, "errno", None) in codes or re.search(words, str(each)) for each in list_causes(error))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out. On the CPU, torch raises a plain RuntimeError."""
    words = ("allocate memory", "not enough memory", "out of memory")
    return any(
        isinstance(each, MemoryError)
        or type(each).__name__ == "OutOfMemoryError"  # torch's, without importing torch
        or (isinstance(each, RuntimeError) and any(word in str(each) for word in words))
        for each in list_causes(error)
    )


@contextmanager
def code_of_a_method() -> Iterator[None]:
    """Turn any exception of the block into `Broken`, which stops one method and nothing else."""
    try:
        yield
    except Failed:
        raise
    except (Exception, SystemExit) as error:
        raise Broken(error) from error
