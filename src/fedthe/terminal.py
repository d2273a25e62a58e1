"""How the command ends: any error becomes one readable sentence and an exit code.

2 is bad input, 1 is failed work, 70 is a bug, 130 and 143 are Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import codecs
import io
import os
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import IO, TYPE_CHECKING, Any, NoReturn

import typer
from typer.core import TyperGroup

from .errors import Failed, InputError, is_disk_full, is_out_of_memory
from .text import find_nearest, flatten, hide_secrets, quote

if TYPE_CHECKING:
    import click  # newer versions of typer have one of their own instead

LONGEST = 2000  # characters of a sentence
PLAIN = {"±": "+-", "…": "...", "–": "-", "—": "-", "×": "x", "→": "->", "━": "-", "•": "*"}
INTERRUPTED, TERMINATED, BUG = 130, 143, 70
# What typer raises for a command line that is wrong: click's exception, or its own.
WrongUsage: type[click.ClickException] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


class Commands(TyperGroup):
    """A group that refuses an unknown command in one sentence and suggests the nearest."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-") and not ctx.resilient_parsing:
            raise InputError(f"there is no command {quote(name)}; {find_nearest(name, self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # newer versions of typer would exit without a word
            raise typer.Abort from None


def guard(app: Callable[..., Any]) -> NoReturn:
    """Run the command, and exit with its code."""
    for stream in (sys.stdout, sys.stderr):
        write_anything(stream)
    warnings.showwarning = show_warning
    try:
        try:
            code = app(prog_name="fedthe", standalone_mode=False)
        finally:
            if sys.stdout is not None:  # None if the caller closed it
                sys.stdout.flush()  # now, because a failure at exit could not be reported
    except WrongUsage as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # older versions of click lack the class
            error.show()
            sys.exit(error.exit_code)
        refuse(say_usage(error))
    except typer.Abort:
        refuse("stopped.", INTERRUPTED)
    except BrokenPipeError:  # the reader is gone, such as `head`
        forget_output()
        sys.exit(1)
    except Exception as error:
        if isinstance(error, OSError):
            forget_output()  # it may be what could not be written
        sentence, code = explain(error)
        if os.environ.get("FEDTHE_DEBUG") == "1" and not isinstance(error, InputError | Failed):
            raise
        refuse(sentence, code)
    sys.exit(code if isinstance(code, int) else 0)


def refuse(sentence: str, code: int = 2) -> NoReturn:
    say(sentence)
    sys.exit(code)


def say(sentence: str) -> None:
    """Print one line on standard error, without control characters and secrets."""
    with suppress(OSError, ValueError):  # standard error is closed
        print(f"fedthe: {flatten(hide_secrets(sentence), LONGEST)}", file=sys.stderr, flush=True)


def show_warning(message: Warning | str, category: type[Warning], *where: object, **more: object) -> None:
    """Print warnings of the package as they are, others with their category."""
    say(str(message) if issubclass(category, UserWarning) else f"{category.__name__}: {message}")


def say_usage(error: click.ClickException) -> str:
    message, context = error.format_message().rstrip("."), getattr(error, "ctx", None)
    asks = message.endswith("?")  # did you mean ...?
    command = context.command_path if context else "fedthe"
    return f"{message[:1].lower()}{message[1:]}{' ' if asks else '; '}`{command} --help` says more."


def explain(error: Exception) -> tuple[str, int]:
    """A sentence for the user, and an exit code."""
    if isinstance(error, InputError):
        return str(error), 2
    if is_disk_full(error):
        return f"the disk is full ({shorten(error)}); free some space, then run the same command to continue.", 1
    if is_out_of_memory(error):
        advice = "use fewer clients, smaller images, batches or networks, or engine=loop on a GPU"
        return f"there is not enough memory; {advice}.", 1
    if isinstance(error, Failed):
        return f"{error}.", 1
    if isinstance(error, RecursionError):
        return "the input is nested too deep; flatten it.", 2
    if isinstance(error, OSError):  # an unreadable folder, a name that is too long
        return f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}.", 2
    return f"{shorten(error)}: this is a bug. {keep_traceback(error)}", BUG


def shorten(error: BaseException) -> str:
    """The type and the message of an error, in one short line."""
    return flatten(f"{type(error).__name__}: {error}" if str(error).strip() else type(error).__name__, 300)


def keep_traceback(error: Exception) -> str:
    """Write the traceback to a file; return a sentence that says where."""
    try:
        handle, path = tempfile.mkstemp(prefix="fedthe-bug-", suffix=".txt")
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(hide_secrets("".join(traceback.format_exception(error))))
    except OSError:
        return "The traceback could not be written to a file; FEDTHE_DEBUG=1 prints it."
    return f"The traceback is in {path}; please report it."


def write_anything(stream: IO[str] | None) -> None:
    """Replace characters that the encoding of a stream lacks, so that printing never fails."""
    codecs.register_error("fedthe", _replace)
    if isinstance(stream, io.TextIOWrapper):
        with suppress(OSError, ValueError):  # closed, or replaced by another file
            stream.reconfigure(errors="fedthe")


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start : error.end]
    return "".join(PLAIN.get(each, "?") for each in missing), error.end


def forget_output() -> None:
    """Discard what standard output buffers, which would fail again at exit."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
        return
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


@contextmanager
def resumable() -> Iterator[None]:
    """On Ctrl-C or SIGTERM, let the block save its work, then say how to continue and exit."""
    terminated = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal terminated
        terminated = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second signal must not interrupt saving
        raise KeyboardInterrupt

    in_main = threading.current_thread() is threading.main_thread()  # only this thread may handle signals
    before = signal.signal(signal.SIGTERM, stop) if in_main else None
    try:
        yield
    except KeyboardInterrupt:
        say("stopped; run the same command to continue.")
        raise typer.Exit(TERMINATED if terminated else INTERRUPTED) from None
    finally:
        if in_main:
            signal.signal(signal.SIGTERM, before)
