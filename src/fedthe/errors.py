"""What the package says when the input is wrong, or when an experiment cannot go on."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager


class InputError(ValueError):
    """Bad input from a person: one sentence that names the thing and the way out. The command line exits with 2."""


class Failed(Exception):
    """An experiment that cannot go on; the others can. The command line exits with 1."""


class Damaged(InputError):
    """A file that is not what the package wrote under that name."""


class MethodFailed(UserWarning):
    """A method has no results, or not all of them."""


class Broken(Failed):
    """An exception in a method's code; the traceback is in `__cause__`."""

    def __init__(self, error: BaseException) -> None:
        try:
            words = " ".join(str(error).split())
        except Exception:  # even that is the user's code
            words = "it cannot be shown"
        super().__init__(words if isinstance(error, InputError) and words else f"{type(error).__name__}: {words}")


def list_causes(error: BaseException) -> Iterator[BaseException]:
    """An error, and what it came from: libraries wrap the error of a full disk in their own."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def is_disk_full(error: BaseException) -> bool:
    """Whether a disk, a quota or a limit on the size of files is the reason."""
    codes = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    # of safetensors, which is written in Rust, and of NumPy, which writes a part and says so
    words = "|".join([*map(os.strerror, codes), "[0-9]+ requested and [0-9]+ written"])
    return any(getattr(each, "errno", None) in codes or re.search(words, str(each)) for each in list_causes(error))


def is_out_of_memory(error: BaseException) -> bool:
    """On the CPU torch says it with a plain RuntimeError."""
    words = ("allocate memory", "not enough memory", "out of memory")
    return any(
        isinstance(each, MemoryError)
        or type(each).__name__ == "OutOfMemoryError"  # torch's, which is not imported for this
        or (isinstance(each, RuntimeError) and any(word in str(each) for word in words))
        for each in list_causes(error)
    )


@contextmanager
def code_of_a_method() -> Iterator[None]:
    """Whatever is raised within the block stops the method that it belongs to, and nothing else."""
    try:
        yield
    except Failed:
        raise
    except (Exception, SystemExit) as error:
        raise Broken(error) from error
