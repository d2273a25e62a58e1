"""The command's last line of defence: whatever goes wrong, a terminal gets one readable sentence and an exit code.

2 is bad input, 1 is work that cannot go on, 70 is a bug, 130 and 143 are Ctrl-C and SIGTERM.
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
from typing import IO, Any, NoReturn

import click
import typer
from typer.core import TyperGroup

from .errors import Failed, InputError, is_disk_full, is_out_of_memory
from .text import clean, find_nearest, hide_secrets, quote

LONGEST = 2000  # characters of a sentence
PLAIN = {"±": "+-", "…": "...", "–": "-", "—": "-", "×": "x", "→": "->", "━": "-", "•": "*"}
INTERRUPTED, TERMINATED, BUG = 130, 143, 70


class Commands(TyperGroup):
    """Commands of which a wrong one is refused like any other word."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-") and not ctx.resilient_parsing:
            raise InputError(f"there is no command {quote(name)}; {find_nearest(name, self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)


def guard(app: Callable[..., Any]) -> NoReturn:
    """Run the command, and end the process with what came of it."""
    for stream in (sys.stdout, sys.stderr):
        write_anything(stream)
    warnings.showwarning = show_warning
    try:
        try:
            code = app(prog_name="fedthe", standalone_mode=False)
        finally:
            if sys.stdout is not None:  # it is None where the caller closed it
                sys.stdout.flush()  # not at exit, where nothing can be said about it any more
    except click.ClickException as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # which older versions of click do not have
            error.show()
            sys.exit(error.exit_code)
        refuse(say_usage(error))
    except click.Abort:
        refuse("stopped.", INTERRUPTED)
    except BrokenPipeError:  # whoever read has left, as `head` does
        forget_output()
        sys.exit(1)
    except Exception as error:
        if isinstance(error, OSError):
            forget_output()  # the output itself may be what could not be written
        sentence, code = explain(error)
        if os.environ.get("FEDTHE_DEBUG") == "1" and not isinstance(error, InputError | Failed):
            raise
        refuse(sentence, code)
    sys.exit(code if isinstance(code, int) else 0)


def refuse(sentence: str, code: int = 2) -> NoReturn:
    say(sentence)
    sys.exit(code)


def say(sentence: str) -> None:
    """One line on standard error, whatever is in it."""
    with suppress(OSError, ValueError):  # nobody is there to read it
        print(f"fedthe: {clean(hide_secrets(' '.join(sentence.split())), LONGEST)}", file=sys.stderr, flush=True)


def show_warning(message: Warning | str, category: type[Warning], *where: object, **more: object) -> None:
    """A warning of the package is a sentence; others are said with their kind."""
    say(str(message) if issubclass(category, UserWarning) else f"{category.__name__}: {message}")


def say_usage(error: click.ClickException) -> str:
    message, context = error.format_message().rstrip("."), getattr(error, "ctx", None)
    asks = message.endswith("?")  # did you mean ...?
    command = context.command_path if context else "fedthe"
    return f"{message[:1].lower()}{message[1:]}{' ' if asks else '; '}`{command} --help` says more."


def explain(error: Exception) -> tuple[str, int]:
    """A sentence for a person, and an exit code."""
    if isinstance(error, InputError):
        return str(error), 2
    if is_disk_full(error):
        return f"the disk is full ({shorten(error)}); make room, then the same command goes on where it was.", 1
    if is_out_of_memory(error):
        way_out = "use fewer clients, smaller images, batches or networks, or on a GPU engine=loop"
        return f"there is not enough memory for this; {way_out}.", 1
    if isinstance(error, Failed):
        return f"{error}.", 1
    if isinstance(error, RecursionError):
        return "something in the input is nested too deep to be read; make it flat.", 2
    if isinstance(error, OSError):  # a folder that may not be read, a name that is too long
        return f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}.", 2
    return f"{shorten(error)}: this is a bug. {keep_traceback(error)}", BUG


def shorten(error: BaseException) -> str:
    """The kind of an error and its first words, in one line."""
    said = " ".join(str(error).split())
    return clean(f"{type(error).__name__}: {said}" if said else type(error).__name__, 300)


def keep_traceback(error: Exception) -> str:
    """Where the traceback was written, as a sentence."""
    try:
        handle, path = tempfile.mkstemp(prefix="fedthe-bug-", suffix=".txt")
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(hide_secrets("".join(traceback.format_exception(error))))
    except OSError:
        return "FEDTHE_DEBUG=1 shows its traceback, which could not be written to a file."
    return f"Its traceback is in {path}; please report it."


def write_anything(stream: IO[str] | None) -> None:
    """Let a stream write what its encoding cannot in other characters: no text is a reason to fail."""
    codecs.register_error("fedthe", _replace)
    if isinstance(stream, io.TextIOWrapper):
        with suppress(OSError, ValueError):  # what it leads to has been exchanged for a pipe, or is closed
            stream.reconfigure(errors="fedthe")


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start : error.end]
    return "".join(PLAIN.get(each, "?") for each in missing), error.end


def forget_output() -> None:
    """Let what is left in the buffer of standard output go nowhere: at exit it would fail again."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
        return
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


@contextmanager
def resumable() -> Iterator[None]:
    """Ctrl-C or SIGTERM saves what was done, and ends the command with the word that nothing is lost."""
    terminated = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal terminated
        terminated = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # whoever asks twice must not disturb the saving
        raise KeyboardInterrupt

    in_main = threading.current_thread() is threading.main_thread()  # others may not handle signals
    before = signal.signal(signal.SIGTERM, stop) if in_main else None
    try:
        yield
    except KeyboardInterrupt:
        say("stopped; run the same command to continue.")
        raise typer.Exit(TERMINATED if terminated else INTERRUPTED) from None
    finally:
        if in_main:
            signal.signal(signal.SIGTERM, before)
