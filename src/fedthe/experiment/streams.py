"""Which streams a run asks: of every client that has the test, the first samples."""

from __future__ import annotations

from collections.abc import Iterable

from ..config import Config
from ..data.plan import Federation
from ..data.shifts import Stream
from ..data.tests import say_lack
from ..errors import InputError


def pick_stream(federation: Federation, test: str, client: int, samples: int | None) -> Stream | None:
    """The first samples of a client's stream; None without any of a class that clients hold, as there is no score."""
    stream = federation.tests[test][client]
    first = stream and stream.first(samples)
    return first if first is not None and (federation.labels(first) >= 0).any() else None


def check_asked(config: Config, federation: Federation) -> None:
    """Refuse a test that is asked for and that no client has which takes part in training."""
    for test in config.streams if config.tests is None else config.tests:
        drawn = [k for k, stream in enumerate(federation.tests[test]) if stream is not None]
        picked = [k for k in drawn if pick_stream(federation, test, k, config.samples) is not None]
        if not drawn:
            raise InputError(f"no client has the test {test}, for {say_lack(test, 'every client')}; leave it out.")
        if not picked:
            way = "add a piece of own samples" if config.samples is None else "set samples higher"
            raise InputError(f"the test {test} has only samples of the unknown class{_say_first(config)}; {way}.")
        if set(picked) <= set(federation.unseen):
            raise InputError(
                f"of seed {federation.settings.seed}, only clients that join after training have the test {test}; "
                "leave it out, or set unseen lower."
            )


def note_lacking(config: Config, federation: Federation, tests: Iterable[str]) -> list[str]:
    """Which clients are not asked, where the notes of the federation do not say so."""
    notes = []
    for test in tests:
        streams = federation.tests[test]
        lost = [
            str(k)
            for k, stream in enumerate(streams)
            if stream is not None and pick_stream(federation, test, k, config.samples) is None
        ]
        if lost:
            why = f"which has only samples of the unknown class{_say_first(config)}"
            notes.append(f"{test}: no such test for client {', '.join(lost)}, {why}")
        few = [str(k) for k, stream in enumerate(streams) if stream is None]
        if few and test not in federation.streams and test not in federation.dataset.natural:
            notes.append(f"{test}: no such test for client {', '.join(few)}, for {say_lack(test, 'it')}")
    return notes


def _say_first(config: Config) -> str:
    return "" if config.samples is None else f" among the first {config.samples}"
