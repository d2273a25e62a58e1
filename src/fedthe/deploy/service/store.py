"""Streams, their answers and tokens in a database: what was answered is there, once, however the process ends."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, Connection, bindparam, delete, insert, or_, select, tuple_, update
from sqlalchemy.exc import IntegrityError

from ...errors import Failed, InputError
from ...text import is_plain, quote
from . import schema
from .schema import StoreFailed as StoreFailed  # for those who call the store
from .schema import answers, explaining, for_reading, for_writing, open_engine, streams, tokens

PREFIX = "fedthe_"  # of secrets, so that tools which look for leaked ones know them
LONGEST = 200  # characters of an id, a name or a key: PostgreSQL indexes no more than 2,700 bytes
LARGEST = 2**63 - 1  # whole number of a database
SOME = 100  # streams that are deleted at a time, so that others wait for no more


class StreamExists(InputError):
    """There is a stream with this id."""


class KeyTaken(InputError):
    """The owner has a stream that was made with this key."""


class Conflict(Failed):
    """Nothing of a `save` was kept: these streams were changed by another, are gone, or have the answers already."""

    def __init__(self, streams: tuple[str, ...]) -> None:
        named = ", ".join(map(quote, streams[:3])) + (", ..." if len(streams) > 3 else "")
        super().__init__(f"these streams were changed or deleted by another: {named}.")
        self.streams = streams


@dataclass(frozen=True)
class Token:
    id: int
    name: str
    created: datetime  # UTC, like all times


@dataclass(frozen=True)
class NewStream:
    id: str
    token_id: int | None  # whose it is; None where the service asks for no tokens
    bundle: str  # its id
    name: str
    state: bytes
    key: str | None = None  # of the client, so that it may ask again
    digest: str | None = None  # SHA-256 of what it asked for: a key that is used again for another can be refused


@dataclass(frozen=True)
class StreamEntry:
    """A stream without its state."""

    id: str
    token_id: int | None
    bundle: str
    name: str
    position: int  # samples answered so far
    version: int  # saves so far
    created: datetime
    used: datetime  # when the last sample was answered, or the stream begun
    status: str | None  # of the last answer; None before the first
    digest: str | None


@dataclass(frozen=True)
class StoredStream(StreamEntry):
    state: bytes


@dataclass(frozen=True)
class Answered:
    key: str | None  # of the client, so that it may ask again
    position: int  # of the sample in its stream, from 0
    body: str  # JSON
    digest: str  # SHA-256 of the sample: a key that is used again for another one can be refused


@dataclass(frozen=True)
class Logged(Answered):
    time: datetime | None  # None if an older version answered


@dataclass(frozen=True)
class Change:
    """A stream after more samples."""

    stream: str
    version: int  # on which it is based; one more afterwards
    state: bytes
    position: int  # samples answered, with these
    answers: tuple[Answered, ...]  # all of them; the store chooses which to keep
    status: str | None = None  # of the last of them


ENTRY = [streams.c[name] for name in StreamEntry.__dataclass_fields__]
ANSWER = [answers.c[name] for name in Answered.__dataclass_fields__]
LOGGED = [answers.c[name] for name in Logged.__dataclass_fields__]
ADVANCE = (
    update(streams)
    .where(streams.c.id == bindparam("of_stream"), streams.c.version == bindparam("based_on"))
    .values(
        state=bindparam("new_state"),
        position=bindparam("new_position"),
        status=bindparam("new_status"),
        version=streams.c.version + 1,
        used=bindparam("now"),
    )
)
TRIM = delete(answers).where(
    answers.c.stream == bindparam("of_stream"),
    answers.c.position >= bindparam("first"),
    answers.c.position < bindparam("last"),
    answers.c.logged.is_(False),
)


class Store:
    """A SQLite file or a PostgreSQL database. Several threads and processes may use it at once."""

    def __init__(
        self,
        url: str | None = None,
        *,
        path: Path | None = None,
        log: bool = False,
        keep: int = 1000,
        clock: Callable[[], datetime] | None = None,
    ) -> None:
        """A file in the home of the package, unless `url` or `path` is given.

        Args:
            url: `postgresql://user:password@host/name` or `sqlite:///path`.
            path: of a SQLite file.
            log: keep every answer for good. What was logged stays when this is switched off.
            keep: without a log, answers are found by their key among this many samples of a stream, at least.
            clock: says the time, in UTC; the system's, unless it is given.
        """
        if keep < 1:
            raise InputError(f"keep is {quote(keep)}; keep at least one answer of a stream.")
        self._engine = open_engine(url, path)
        self._reader, self._writer = for_reading(self._engine), for_writing(self._engine)
        self._log, self._keep, self._clock = log, keep, clock or _now

    def migrate(self) -> None:
        """Create the tables, or bring those of an older version to the newest schema."""
        with explaining(self._engine.url, InputError):
            schema.migrate(self._engine)

    def close(self) -> None:
        self._engine.dispose()

    # Tokens. A revoked one keeps its row: created again under its name, with another secret, it owns its streams again.

    def create_token(self, name: str) -> str:
        """A new secret, which cannot be read from the database afterwards: only its hash is kept."""
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name):
            raise InputError(
                f"the name of a token is {quote(name)}; use 1 to 64 letters, digits, dots, dashes and underscores."
            )
        secret = PREFIX + secrets.token_urlsafe(32)
        given = {"digest": _hash(secret), "created": self._clock()}
        try:
            with self._write() as connection:
                revoked = update(tokens).where(tokens.c.name == name, tokens.c.digest.is_(None))
                if not connection.execute(revoked.values(given)).rowcount:
                    connection.execute(insert(tokens).values(name=name, **given))
        except IntegrityError:
            raise InputError(f"there is a token {name} already; use another name, or revoke it.") from None
        return secret

    def find_token(self, secret: str) -> Token | None:
        with self._read() as connection:
            row = connection.execute(_select_tokens().where(tokens.c.digest == _hash(secret))).one_or_none()
        return Token(**row._mapping) if row else None

    def list_tokens(self) -> list[Token]:
        """Those that are valid, by name."""
        with self._read() as connection:
            rows = connection.execute(_select_tokens().where(tokens.c.digest.is_not(None)).order_by(tokens.c.name))
            return [Token(**row._mapping) for row in rows]

    def has_tokens(self) -> bool:
        """Whether there ever was one: a service whose last token was revoked must not become open to all."""
        with self._read() as connection:
            return connection.execute(select(tokens.c.id).limit(1)).first() is not None

    def revoke_token(self, name: str) -> None:
        valid = update(tokens).where(tokens.c.name == name, tokens.c.digest.is_not(None))
        found = 0
        if _is_text(name):
            with self._write() as connection:
                found = connection.execute(valid.values(digest=None)).rowcount
        if not found:
            raise InputError(f"there is no token {quote(name)}.")

    # Streams

    def create_stream(self, stream: NewStream) -> StreamEntry:
        """At position 0, version 0."""
        for what in ("id", "name", "bundle", "key"):
            value = getattr(stream, what)
            if value is not None:
                _check_text(f"the {what} of a stream", value)
        now = self._clock()
        row = vars(stream) | {"position": 0, "version": 0, "created": now, "used": now, "status": None}
        try:
            with self._write() as connection:
                connection.execute(insert(streams).values(row))
        except IntegrityError:
            if self._find_versions([stream.id]):
                raise StreamExists(f"there is a stream {quote(stream.id)} already; use another id.") from None
            if stream.key is not None and self.find_stream(stream.token_id, stream.key):
                raise KeyTaken(f"there is a stream with the key {quote(stream.key)} already; use another.") from None
            raise InputError(f"there is no token with the number {stream.token_id}.") from None
        return StreamEntry(**{column.name: row[column.name] for column in ENTRY})

    def find_stream(self, token_id: int | None, key: str) -> StreamEntry | None:
        """That which its owner made with this key."""
        if not _is_text(key):
            return None
        with self._read() as connection:
            row = connection.execute(select(*ENTRY).where(_is_owned(token_id), streams.c.key == key)).one_or_none()
        return StreamEntry(**row._mapping) if row else None

    def read_stream(self, id: str) -> StoredStream | None:
        if not _is_text(id):
            return None
        with self._read() as connection:
            row = connection.execute(select(*ENTRY, streams.c.state).where(streams.c.id == id)).one_or_none()
        return StoredStream(**row._mapping) if row else None

    def list_streams(self, token_id: int | None) -> list[StreamEntry]:
        """Those of a token, or those of none, the oldest first."""
        owned = select(*ENTRY).where(_is_owned(token_id))
        with self._read() as connection:
            rows = connection.execute(owned.order_by(streams.c.created, streams.c.id))
            return [StreamEntry(**row._mapping) for row in rows]

    def delete_stream(self, id: str) -> bool:
        """Delete it with its answers, logged ones too; False if there is none."""
        if not _is_text(id):
            return False
        with self._write() as connection:
            return connection.execute(delete(streams).where(streams.c.id == id)).rowcount > 0

    def expire(self, unused: timedelta) -> list[str]:
        """Delete streams that were not used for so long, with their answers, logged ones too; at most SOME of them.

        Several processes may do so at once: each leaves alone what another is just deleting, or using.
        """
        old = select(streams.c.id).where(streams.c.used < self._clock() - unused).order_by(streams.c.used).limit(SOME)
        with self._write() as connection:
            found = list(connection.execute(old.with_for_update(skip_locked=True)).scalars())
            if found:
                connection.execute(delete(streams).where(streams.c.id.in_(found)))
        return found

    def reset_stream(self, id: str, state: bytes) -> bool:
        """Begin it again, without its answers, logged ones too; False if there is none. Its version goes on, so that
        what is based on the time before is refused."""
        if not _is_text(id):
            return False
        begun = {"state": state, "position": 0, "version": streams.c.version + 1, "used": self._clock(), "status": None}
        with self._write() as connection:
            found = connection.execute(update(streams).where(streams.c.id == id).values(begun)).rowcount
            connection.execute(delete(answers).where(answers.c.stream == id))
        return found > 0

    def save(self, changes: Sequence[Change]) -> None:
        """Keep changes of many streams and their answers, all or, with Conflict or StoreFailed, none.

        After Conflict, read its `streams` again. After StoreFailed, read all of them: if the connection was lost while
        it committed, all may have been kept.
        """
        for each in changes:
            _check_text("the id of a stream", each.stream)
            _check_answers(each.answers)
        ordered = sorted(changes, key=lambda each: (each.stream, each.version))  # those in step never wait in a circle
        if not ordered:
            return
        now = self._clock()
        rows = [
            {"stream": each.stream, "logged": self._log, "time": now, **vars(answer)}
            for each in ordered
            for answer in each.answers
            if self._keeps(answer)
        ]
        trims = [] if self._log else [trim for each in ordered if (trim := self._plan_trim(each))]
        try:
            with self._write() as connection:
                moved = connection.execute(ADVANCE, [_describe(each, now) for each in ordered]).rowcount
                if moved != len(ordered):
                    raise _Stale
                if rows:
                    connection.execute(insert(answers), rows)
                if trims:
                    connection.execute(TRIM, trims)
        except (_Stale, IntegrityError):
            raise Conflict(self._find_conflicts(ordered)) from None

    def find_answers(self, pairs: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Answered]:
        """Those that are kept of these, by stream and key."""
        wanted = [pair for pair in pairs if all(map(_is_text, pair))]
        if not wanted:
            return {}
        chosen = select(answers.c.stream, *ANSWER).where(tuple_(answers.c.stream, answers.c.key).in_(wanted))
        with self._read() as connection:
            rows = [dict(row._mapping) for row in connection.execute(chosen)]
        return {(row.pop("stream"), row["key"]): Answered(**row) for row in rows}

    def read_log(self, stream: str, first: int = 0, limit: int = 1000) -> list[Logged]:
        """At most `limit` answers that were kept, from the position `first` on."""
        if not _is_text(stream) or limit < 1 or first > LARGEST:
            return []
        chosen = select(*LOGGED).where(answers.c.stream == stream, answers.c.position >= max(first, 0))
        with self._read() as connection:
            rows = connection.execute(chosen.order_by(answers.c.position).limit(min(limit, LARGEST)))
            return [Logged(**row._mapping) for row in rows]

    @contextmanager
    def _read(self) -> Iterator[Connection]:
        with explaining(self._engine.url, StoreFailed), self._reader.connect() as connection:
            yield connection

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        with explaining(self._engine.url, StoreFailed), self._writer.begin() as connection:
            yield connection

    def _keeps(self, answer: Answered) -> bool:
        return self._log or answer.key is not None

    def _plan_trim(self, change: Change) -> dict[str, Any] | None:
        """Which answers of a stream to forget, at every few hundredth sample.

        It begins where the last one must have ended, so that it never walks through a log that was kept before.
        """
        step = max(1, self._keep // 4)
        first = min((answer.position for answer in change.answers), default=change.position)
        if change.position // step == first // step:
            return None
        of = {"of_stream": change.stream}
        return of | {"first": first - self._keep - step, "last": change.position - self._keep}

    def _find_versions(self, ids: Sequence[str]) -> dict[str, int]:
        with self._read() as connection:
            rows = connection.execute(select(streams.c.id, streams.c.version).where(streams.c.id.in_(ids)))
            return {row.id: row.version for row in rows}

    def _find_conflicts(self, changes: Sequence[Change]) -> tuple[str, ...]:
        """The streams for which changes cannot be kept; all of them, if by now nothing is in the way of any."""
        of_stream: dict[str, list[Change]] = {}
        for each in changes:
            of_stream.setdefault(each.stream, []).append(each)
        versions = self._find_versions(list(of_stream))
        found = [
            id
            for id, own in of_stream.items()
            if [each.version for each in own] != [versions.get(id, -1) + i for i in range(len(own))]
            or self._are_answered(id, [answer for each in own for answer in each.answers])
        ]
        return tuple(found or of_stream)

    def _are_answered(self, stream: str, given: Sequence[Answered]) -> bool:
        """Whether a position or a key is there already, or twice among those given."""
        positions = [answer.position for answer in given]
        keys = [answer.key for answer in given if answer.key is not None]
        there = or_(answers.c.position.in_(positions), answers.c.key.in_(keys))
        with self._read() as connection:
            taken = connection.execute(
                select(answers.c.position).where(answers.c.stream == stream, there).limit(1)
            ).first()
        return taken is not None or len(set(keys)) < len(keys) or len(set(positions)) < len(positions)


class _Stale(Exception):
    """A change is based on another version than that in the database."""


def _describe(change: Change, now: datetime) -> dict[str, Any]:
    return {
        "of_stream": change.stream,
        "based_on": change.version,
        "new_state": change.state,
        "new_position": change.position,
        "new_status": change.status,
        "now": now,
    }


def _is_owned(token_id: int | None) -> ColumnElement[bool]:
    return streams.c.token_id.is_(None) if token_id is None else streams.c.token_id == token_id


def _select_tokens() -> Any:
    return select(tokens.c.id, tokens.c.name, tokens.c.created)


def _check_answers(given: Sequence[Answered]) -> None:
    for answer in given:
        if answer.key is not None:
            _check_text("the key of an answer", answer.key)
        if not _is_storable(answer.body) or not _is_storable(answer.digest):
            raise InputError("an answer holds characters that no database keeps; write JSON in ASCII.")


def _check_text(what: str, value: str) -> None:
    if not _is_text(value):
        raise InputError(f"{what} is {quote(value)}; use 1 to {LONGEST} characters, without control characters.")


def _is_text(value: str) -> bool:
    """Whether both databases can keep and index it; PostgreSQL has no NUL, and neither has lone surrogates."""
    return 0 < len(value) <= LONGEST and is_plain(value)


def _is_storable(text: str) -> bool:
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def _hash(secret: str) -> str:
    # Fast on purpose: the secret is 32 random bytes, which nobody can guess.
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def _now() -> datetime:
    return datetime.now(timezone.utc)
