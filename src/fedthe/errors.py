"""What the package says when the input is wrong, or when an experiment cannot go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class InputError(ValueError):
    """Bad input from a person: one sentence that names the thing and the way out. The command line exits with 2."""


class Failed(Exception):
    """An experiment that cannot go on; the others can. The command line exits with 1."""


class Damaged(InputError):
    """A file that is not what the package wrote under that name."""


class Broken(Failed):
    """An exception in a method's code; the traceback is in `__cause__`."""

    def __init__(self, error: BaseException) -> None:
        words = " ".join(str(error).split())
        super().__init__(words if isinstance(error, InputError) and words else f"{type(error).__name__}: {words}")


@contextmanager
def code_of_a_method() -> Iterator[None]:
    """Whatever is raised within the block stops the method that it belongs to, and nothing else."""
    try:
        yield
    except Failed:
        raise
    except (Exception, SystemExit) as error:
        raise Broken(error) from error
