"""Changes to the processes in which Flower 1.41 runs our apps: how they end, what they log, how long they fetch."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from typing import Any

from ...errors import Failed, InputError
from ...text import flatten
from .messages import Mail

TRANSFER = 10.0  # seconds that a reply of which a part is there has at least
LOOK = 1.0  # seconds between looks for the parent


def end_with_parent() -> None:
    """End as Flower does when the SuperLink is gone, so that the folder is free for the next server.

    Flower 1.41 raises the signal in a thread of its own. That does not wake the main thread, which may wait for
    messages that are sent again and again, for ever.
    """
    parent, handler = os.getppid(), signal.getsignal(signal.SIGINT)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK)
        if signal.getsignal(signal.SIGINT) is handler:  # else the main thread is on its way out
            os.kill(os.getpid(), signal.SIGINT)  # to the process: the main thread handles it

    threading.Thread(target=watch, daemon=True).start()


def shorten_errors() -> None:
    """What an app refuses is one sentence in Flower's log, too, and no traceback."""
    logging.getLogger("flwr").addFilter(_shorten)


def _shorten(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, InputError | Failed):
        record.msg, record.args = f"fedthe: {flatten(error, 500)}", ()
        record.exc_info = record.exc_text = None
    return True


def bound_transfers(mail: Mail) -> None:
    """Fetch no reply for longer than there is time to answer. A node can announce one, and send it in drops.

    Flower 1.41 waits two hours for each. A reply that the SuperLink has whole is fetched however late it is.
    """
    from flwr.supercore.inflatable.inflatable_utils import pull_objects
    from flwr.superlink.grid import http_grid

    if not hasattr(http_grid, "pull_objects"):
        raise RuntimeError(f"{http_grid.__name__} fetches replies in another way than in Flower 1.41")

    def pull(*given: Any, **named: Any) -> dict[str, bytes]:
        return pull_objects(*given, **named, max_time=max(TRANSFER, mail.end - time.monotonic()))

    http_grid.pull_objects = pull
