"""One thread answers all streams: what has come in while it worked is answered together, and filed in one transaction.

A stream's samples are answered in the order in which they came. Its state and its answers are in the database before
any answer is sent, so a process that is killed has lost nothing that it answered, and a retry with the same key gets
the answer that was filed.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

from ...errors import Failed, InputError
from ...text import flatten
from ..bundle import Bundle
from ..online import Online, Prediction, predict_together
from .store import SOME, Answered, Change, Conflict, Store, StoredStream

log = logging.getLogger("fedthe.service")
MOST = 64  # samples that are answered together
KEPT = 1000  # streams whose state stays in memory
TRIES = 3  # of a batch whose streams another process changes
SWEEP = 60.0  # seconds between looking for streams that expired


class Missing(InputError):
    """There is no such stream."""


class Reused(InputError):
    """A key came again with another sample, or for another stream."""


class Busy(Failed):
    """More came in than can be answered in time."""


@dataclass(frozen=True)
class Asked:
    """A sample to answer."""

    bundle: Bundle
    sample: Any
    stream: str | None = None  # None: the first sample of a stream that nobody keeps
    key: str | None = None  # of idempotency
    digest: str = ""  # of the sample
    done: Future[dict[str, Any]] = field(default_factory=Future, compare=False)


@dataclass(frozen=True)
class Call:
    """Something else to do between batches."""

    run: Callable[[], Any]
    done: Future[Any] = field(default_factory=Future, compare=False)


@dataclass
class Open:
    """A stream in memory, and the version of its row that it is based on."""

    online: Online
    version: int


class Batcher:
    """Answers what it is asked in a thread of its own."""

    def __init__(
        self,
        store: Store,
        bundles: Mapping[str, Bundle],
        most: int = MOST,
        waiting: int = 10_000,
        *,
        expire: timedelta | None = None,
        dropped: Callable[[str], object] = lambda _: None,
    ) -> None:
        """
        Args:
            bundles: by id.
            most: samples answered together; 1 answers one by one.
            waiting: the longest queue.
            expire: delete streams that were not used for so long.
            dropped: is told of each that was deleted for that.
        """
        self._store, self._most, self._expire, self._dropped = store, most, expire, dropped
        self._due = 0.0  # when to look for streams that expired, by the monotonic clock
        self._fresh = {id: Online(bundle) for id, bundle in bundles.items()}
        self._open: OrderedDict[str, Open] = OrderedDict()
        self._queue: queue.Queue[Asked | Call | None] = queue.Queue(waiting)
        self._thread: threading.Thread | None = None
        self._users = 0  # test clients begin and end an application more than once
        self.sizes: list[int] = []  # of the latest batches, for metrics

    def start(self) -> None:
        self._users += 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="fedthe-answers", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """After all that is waiting."""
        self._users -= 1
        if self._thread is not None and not self._users:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def ask(self, asked: Asked) -> Future[dict[str, Any]]:
        self._put(asked)
        return asked.done

    def call(self, run: Callable[[], Any]) -> Future[Any]:
        """Run something when all that came before is done."""
        call = Call(run)
        self._put(call)
        return call.done

    def forget(self, stream: str) -> None:
        """Read the stream again when it is asked next. To be called within `call`."""
        self._open.pop(stream, None)

    def begin(self, bundle: str, name: str) -> Online:
        """A new stream of a bundle."""
        return self._fresh[bundle].stream(name)

    def _put(self, item: Asked | Call) -> None:
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            raise Busy("too many samples are waiting; try again later") from None

    def _work(self) -> None:
        while True:
            self._sweep()
            try:
                item = self._queue.get(timeout=self._find_patience())
            except queue.Empty:
                continue
            batch: list[Asked] = []
            while isinstance(item, Asked):
                batch.append(item)
                if len(batch) >= self._most:
                    break
                try:
                    item = self._queue.get_nowait()
                except queue.Empty:
                    break
            if batch:
                self._answer(batch)
            if isinstance(item, Call):
                _settle(item.done, item.run)
            if item is None:
                return

    def _find_patience(self) -> float | None:
        """Seconds until the next sweep; None where nothing expires."""
        return None if self._expire is None else max(0.0, self._due - time.monotonic())

    def _sweep(self) -> None:
        """Delete streams that expired, if it is time to look for them."""
        if self._expire is None or time.monotonic() < self._due:
            return
        try:
            gone = self._store.expire(self._expire)
        except Exception as error:  # they are found again
            log.error("streams that expired stay for now: %s", flatten(error, 500))
            gone = []
        self._forget(gone)
        for stream in gone:
            self._dropped(stream)
        if len(gone) < SOME:  # else there may be more, after what is waiting
            self._due = time.monotonic() + SWEEP

    def _answer(self, batch: list[Asked]) -> None:
        """Answer all, file what changed, then tell."""
        self.sizes.append(len(batch))
        del self.sizes[:-1000]
        for left in reversed(range(TRIES)):
            try:
                answers, changes = self._compute(batch)
                self._store.save(changes)
            except Conflict as conflict:  # another process answered samples of these streams
                self._forget(conflict.streams)
                self._forget(each.stream for each in batch)
                if left:
                    continue
                return _fail(batch, Busy("another process answers the same streams; try again"))
            except BaseException as error:
                self._forget(each.stream for each in batch)  # what is in memory is ahead of what is filed
                return _fail(batch, error)
            for change in changes:
                self._open[change.stream].version += 1
            for asked, answer in zip(batch, answers, strict=True):
                _settle(asked.done, partial(_raise, answer))
            return None
        return None

    def _compute(self, batch: list[Asked]) -> tuple[list[dict[str, Any] | Exception], list[Change]]:
        """By sample, the answer or why there is none; and what is to be filed."""
        answers: list[dict[str, Any] | Exception | None] = [None] * len(batch)
        filed: dict[str, list[Answered]] = defaultdict(list)
        statuses: dict[str, str] = {}  # by stream, after its last sample
        known = self._store.find_answers({(each.stream, each.key) for each in batch if each.stream and each.key})
        seen: dict[tuple[str, str], int] = {}  # by stream and key: the first sample of this batch
        repeats: dict[int, int] = {}  # by sample of the batch: the one that it repeats
        rows: dict[int, Online] = {}
        for i, asked in enumerate(batch):
            place = (asked.stream or "", asked.key or "")
            if asked.stream and asked.key and place in seen:
                repeats[i] = seen[place]
                continue
            seen[place] = i
            try:
                if place in known:
                    answers[i] = _repeat(known[place], asked)
                else:
                    rows[i] = self._find(asked)
            except InputError as error:
                answers[i] = error
        for some in _plan_rounds({i: batch[i] for i in rows}):
            predicted = predict_together([rows[i] for i in some], [batch[i].sample for i in some])
            for i, answer in zip(some, predicted, strict=True):
                answers[i] = answer if isinstance(answer, Exception) else _describe(answer, rows[i])
                stream = batch[i].stream
                if stream and isinstance(answer, Prediction):
                    body = json.dumps(answers[i])
                    statuses[stream] = answer.status
                    filed[stream].append(Answered(batch[i].key, rows[i].position - 1, body, batch[i].digest))
        for i, first in repeats.items():
            answers[i] = answers[first] if batch[i].digest == batch[first].digest else Reused(REUSED)
        changes = [self._describe_change(id, new, statuses[id]) for id, new in filed.items()]
        return [each if each is not None else InputError("the sample was not answered.") for each in answers], changes

    def _describe_change(self, id: str, new: Iterable[Answered], status: str) -> Change:
        now = self._open[id]
        return Change(id, now.version, now.online.state(), now.online.position, tuple(new), status)

    def _find(self, asked: Asked) -> Online:
        """Where the stream is, in memory or in the database."""
        if asked.stream is None:
            return self._fresh[asked.bundle.id].stream()
        if asked.stream not in self._open:
            stored = self._store.read_stream(asked.stream)
            if stored is None:
                raise Missing("there is no such stream.")
            self._open[asked.stream] = self._load(stored)
            while len(self._open) > KEPT:
                self._open.popitem(last=False)
        self._open.move_to_end(asked.stream)
        return self._open[asked.stream].online

    def _load(self, stored: StoredStream) -> Open:
        if stored.bundle not in self._fresh:
            raise Missing("the bundle of this stream is not served any more.")
        online = self._fresh[stored.bundle].stream(stored.name)
        online.restore(stored.state)
        return Open(online, stored.version)

    def _forget(self, streams: Iterable[str | None]) -> None:
        for stream in streams:
            if stream is not None:
                self._open.pop(stream, None)


REUSED = "this Idempotency-Key was used for another sample; use a new one."


def _repeat(found: Answered, asked: Asked) -> dict[str, Any]:
    if found.digest != asked.digest:
        raise Reused(REUSED)
    return dict(json.loads(found.body))


def _plan_rounds(asked: Mapping[int, Asked]) -> Iterable[list[int]]:
    """Samples that can be answered together: of one bundle, and at most one of each stream, in its order."""
    rounds: dict[tuple[int, str], list[int]] = {}
    taken: dict[str, int] = defaultdict(int)
    for i, each in asked.items():
        turn = 0
        if each.stream is not None:
            turn = taken[each.stream]
            taken[each.stream] += 1
        rounds.setdefault((turn, each.bundle.id), []).append(i)
    return [rounds[place] for place in sorted(rounds)]


def _describe(answer: Prediction, online: Online) -> dict[str, Any]:
    heads = answer.heads and {"global": answer.heads[0], "personal": answer.heads[1]}
    return {
        "label": answer.label,
        "index": answer.index,
        "probability": answer.probability,
        "probabilities": dict(zip(online.classes, answer.probabilities.tolist(), strict=True)),
        "weight": answer.weight,
        "heads": heads,
        "why": answer.why,
        "status": answer.status,
        "position": online.position,
    }


def _raise(answer: dict[str, Any] | Exception) -> dict[str, Any]:
    if isinstance(answer, Exception):
        raise answer
    return answer


def _settle(future: Future[Any], make: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return  # whoever asked has gone
    try:
        future.set_result(make())
    except BaseException as error:
        future.set_exception(error)


def _fail(batch: Iterable[Asked], error: BaseException) -> None:
    for asked in batch:
        _settle(asked.done, partial(_raise, error if isinstance(error, Exception) else Failed("stopped")))
