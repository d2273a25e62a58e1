"""What a reader of a federation must know, such as a test distribution that could not be built."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from ..text import clean
from .feature_shift import list_feature_shifts
from .pool import Pool
from .tests import say_lack

if TYPE_CHECKING:
    from .plan import Federation


def write_notes(federation: Federation, call: Callable[[Pool], str]) -> list[str]:
    """`call` names a pool: by its name for people, by its identity in a manifest."""
    dataset, settings, tests = federation.dataset, federation.settings, federation.tests
    notes = []
    if not dataset.pool.is_pictures:
        notes.append(f"{call(dataset.pool)}: not pictures, so nothing is corrupted or augmented")
    elif not dataset.natural:
        notes.append("natural: not available, mixture made of three parts")
    notes += list_feature_shifts(settings)
    for name, shift in dataset.natural.items():
        which = name if call(shift) == name else f"{name} ({call(shift)})"
        missing = sorted(set(range(len(shift.classes))) - set(shift.labels.tolist()))
        if missing:
            notes.append(f"{which}: has no {', '.join(clean(shift.classes[c]) for c in missing)}")
        if dataset.repeats[name].any() and shift.is_pictures:
            notes.append(f"{which}: {dataset.repeats[name].sum()} images are in {call(dataset.pool)} too and left out")
        elif dataset.repeats[name].any():
            notes.append(f"{which}: {dataset.repeats[name].sum()} rows are equal to rows of {call(dataset.pool)}")
        without = [str(k) for k, stream in enumerate(tests[name]) if stream is None]
        if without:
            notes.append(f"{which}: no such test for client {', '.join(without)}, mixture made of the rest")
    lengths = zip(tests["original"], tests["ooc"], strict=True)
    short = [str(k) for k, (own, other) in enumerate(lengths) if own and other and len(other) < len(own)]
    if short:
        notes.append(f"ooc: shorter than original for client {', '.join(short)}, for the others have no more test rows")
    for name in federation.streams:
        without = [str(k) for k, stream in enumerate(tests[name]) if stream is None]
        if without:
            notes.append(f"{name}: no such test for client {', '.join(without)}, for {say_lack(name, 'it')}")
    if federation.unseen:
        who = ", ".join(map(str, federation.unseen))
        notes.append(f"unseen: clients that join after training, seed {settings.seed}: {who}")
    if dataset.unknown is not None:
        notes.append(f"no client holds {call(dataset.unknown)}, the unknown class")
    for part in ("train", "test"):
        if getattr(settings, f"{part}_fraction") < 1:
            notes.append(f"{part}: {getattr(settings, f'{part}_fraction'):g} of each client's rows")
    if settings.partition == "given":
        unheld = np.flatnonzero(federation.class_counts.sum(0) == 0)
        if len(unheld):
            notes.append(f"no client holds {', '.join(clean(dataset.pool.classes[c]) for c in unheld)}")
    unused = len(dataset.pool) - sum(len(split.rows) for split in federation.clients)
    if unused and settings.partition != "given" and settings.train_fraction == settings.test_fraction == 1:
        notes.append(f"{unused} rows left over, so that all clients hold the same number")
    return notes


def note_cuts(federation: Federation, tests: Iterable[str], samples: int | None) -> list[str]:
    """On streams in time whose last segment begins after so many samples, which are all that is answered."""
    notes = []
    for name in tests:
        there = [stream for stream in federation.tests[name] if stream is not None]
        cut = sum(bool(stream.first(samples).segment[-1] < stream.segment[-1]) for stream in there)
        if cut:
            who = f"{cut} of {len(there)} clients"
            notes.append(
                f"{name}: samples={samples} ends it before its last segment for {who}; raise it to see the rest"
            )
    return notes
