"""The service's database: its tables, how it is opened and migrated, and what its errors mean."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from sqlalchemy import (
    URL,
    BigInteger,
    Boolean,
    Column,
    Connection,
    DateTime,
    Dialect,
    Engine,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    create_engine,
    event,
    make_url,
    text,
)
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.types import TypeDecorator

from ...errors import Failed, InputError
from ...store import expand, hold, home, make_folder
from ...text import clean, flatten, hide_secrets

MIGRATIONS = Path(__file__).parent / "migrations"
VERSION_TABLE = "fedthe_version"  # not Alembic's usual name: other programs may have their tables in the database
PATIENCE = 10.0  # seconds to wait for a lock, or for a connection
MIGRATING = 0xFED_7E  # PostgreSQL's advisory locks are numbers
WRITES = "fedthe_writes"  # the execution option of connections that write


class StoreFailed(Failed):
    """The database failed in operation. Whether the last `save` was kept is unknown: read its streams again."""


class Moment(TypeDecorator[datetime]):
    """A time in UTC. SQLite keeps no time zone, and PostgreSQL answers in that of the connection."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return value and value.astimezone(timezone.utc)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return value and (value.astimezone(timezone.utc) if value.tzinfo else value.replace(tzinfo=timezone.utc))


# What the migrations lead to; a test compares.
metadata = MetaData()
OWNERLESS = text("token_id IS NULL")
tokens = Table(
    "tokens",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", String, nullable=False, unique=True),
    Column("digest", String, unique=True),  # SHA-256 of the secret; NULL once it is revoked
    Column("created", Moment, nullable=False),
)
streams = Table(
    "streams",
    metadata,
    Column("id", String, primary_key=True),
    Column("bundle", String, nullable=False),
    Column("name", String, nullable=False),
    Column("state", LargeBinary, nullable=False),
    Column("position", BigInteger, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("created", Moment, nullable=False),
    Column("used", Moment, nullable=False, index=True),
    Column("token_id", Integer, ForeignKey("tokens.id"), index=True),
    Column("status", String),  # of the latest answer
    Column("key", String),  # that a client made it with, so that it may ask again
    Column("digest", String),  # SHA-256 of what the client asked for with the key
    Index("ix_streams_token_id_key", "token_id", "key", unique=True),
    # the one above takes every NULL for a different owner
    Index("ix_streams_key", "key", unique=True, sqlite_where=OWNERLESS, postgresql_where=OWNERLESS),
)
answers = Table(
    "answers",
    metadata,
    Column("stream", String, ForeignKey("streams.id", ondelete="CASCADE"), primary_key=True),
    Column("position", BigInteger, primary_key=True, autoincrement=False),
    Column("key", String),
    Column("digest", String, nullable=False),
    Column("body", Text, nullable=False),
    Column("logged", Boolean, nullable=False),  # part of the log: never trimmed
    Column("time", Moment),  # NULL for what older versions answered
    UniqueConstraint("stream", "key"),
)


def open_engine(url: str | None, path: Path | None) -> Engine:
    """Connections to the database; none is made yet."""
    if url is not None and path is not None:
        raise InputError("give the URL of a database or the path of a file, not both.")
    parsed = _parse(url) if url is not None else _name_file(path or home() / "service.db")
    try:
        # without parameters in its messages, which would be states of streams
        if parsed.get_backend_name() == "sqlite":
            return _prepare_sqlite(create_engine(parsed, hide_parameters=True))
        engine = create_engine(
            parsed,
            hide_parameters=True,
            isolation_level="READ COMMITTED",
            pool_pre_ping=True,  # the server may have been restarted
            connect_args={
                "connect_timeout": max(2, round(PATIENCE)),
                "tcp_user_timeout": round(1000 * PATIENCE),
                "client_encoding": "utf8",
            },
        )
    except ImportError:
        raise InputError("PostgreSQL needs psycopg; run `pip install 'fedthe[postgresql]'`.") from None
    event.listen(engine, "connect", _bound_waiting)
    return engine


def _parse(url: str) -> URL:
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # the latter for a port that is no number
        parsed = None
    if parsed is None or "@" in (parsed.host or ""):  # the rest of a password, which must not be shown
        raise InputError(
            "this is not the URL of a database; write postgresql://user:password@host:5432/name, with %40 for an @ "
            "in the password, or sqlite:///path."
        )
    kind = parsed.drivername.partition("+")[0]
    if kind == "sqlite":
        if not parsed.database or parsed.database == ":memory:" or parsed.query or parsed.host:
            raise InputError("streams are kept in a file; write sqlite:///path, without options.")
        return _name_file(Path(parsed.database))
    if kind in ("postgresql", "postgres"):
        return parsed.set(drivername="postgresql+psycopg")
    raise InputError(f"streams are kept in SQLite or PostgreSQL, not in {clean(kind)}.")


def _name_file(path: Path) -> URL:
    return URL.create("sqlite", database=str(expand(path).absolute()))


def _prepare_sqlite(engine: Engine) -> Engine:
    @event.listens_for(engine, "connect")
    def connect(connection: Any, record: object) -> None:
        connection.isolation_level = None  # we begin transactions; the driver would do so late, and not for a DDL
        connection.execute(f"PRAGMA busy_timeout = {round(1000 * PATIENCE)}")
        connection.execute("PRAGMA foreign_keys = ON")
        # With a write-ahead log, a process that is killed loses nothing that was committed. A power cut may lose the
        # last transactions, of which some were answered, but neither half of one nor the file. FULL would wait for the
        # disk at every commit.
        connection.execute("PRAGMA synchronous = NORMAL")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A transaction that starts with reading cannot wait for its turn to write: it fails. Single reads need none.
        if connection.get_execution_options().get(WRITES):
            connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def _bound_waiting(connection: Any, record: object) -> None:
    connection.autocommit = True  # or it would be undone with the first transaction
    connection.execute(f"SET lock_timeout = {round(1000 * PATIENCE)}")
    connection.autocommit = False


def for_writing(engine: Engine) -> Engine:
    return engine.execution_options(**{WRITES: True})


def for_reading(engine: Engine) -> Engine:
    """For single statements, which need no transaction."""
    return engine if engine.dialect.name == "sqlite" else engine.execution_options(isolation_level="AUTOCOMMIT")


_migrating = threading.Lock()  # Alembic's context is global


def migrate(engine: Engine) -> None:
    """Bring the database to the newest schema, all or nothing; those who come at the same time wait."""
    from alembic import command
    from alembic.config import Config
    from alembic.migration import MigrationContext
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    known = [script.revision for script in ScriptDirectory.from_config(config).walk_revisions()]
    with _migrating, _alone(engine), for_writing(engine).begin() as connection:
        if engine.dialect.name == "postgresql":
            _check_encoding(connection)
            connection.execute(text("SET LOCAL lock_timeout = 0"))  # a migration of another process may take long
            connection.execute(text("SELECT pg_advisory_xact_lock(:number)"), {"number": MIGRATING})
        context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
        for revision in context.get_current_heads():
            if revision not in known:
                raise InputError(
                    f"{say_where(engine.url)} was written by a newer version of fedthe (its schema is "
                    f"{clean(revision)}, the newest known here {known[0]}); upgrade fedthe, or use another database."
                )
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


@contextmanager
def _alone(engine: Engine) -> Iterator[None]:
    """For SQLite: switch the file to a write-ahead log, which processes cannot do at once, and hold the lock for it."""
    path = Path(engine.url.database or "")
    if engine.dialect.name != "sqlite":
        yield
        return
    make_folder(path.parent)
    with nullcontext() if path.is_dir() else hold(path.with_name(f"{path.name}.lock")):
        with engine.connect() as connection:
            mode = connection.exec_driver_sql("PRAGMA journal_mode = WAL").scalar_one()
        if mode != "wal":
            raise InputError(f"{say_where(engine.url)} cannot have a write-ahead log ({mode}); use a local disk.")
        yield


def _check_encoding(connection: Connection) -> None:
    encoding = connection.execute(text("SHOW server_encoding")).scalar_one()
    if encoding not in ("UTF8", "SQL_ASCII"):  # the latter keeps any bytes
        raise InputError(
            f"{say_where(connection.engine.url)} has the encoding {clean(str(encoding))}; create it with UTF8."
        )


def say_where(url: URL) -> str:
    """The database, without its login and options."""
    if url.get_backend_name() == "sqlite":
        return f"the database {clean(url.database or '', 200)}"
    bare = URL.create("postgresql", host=url.host, port=url.port, database=url.database)
    return f"the database {clean(hide_secrets(bare.render_as_string()), 200)}"


@contextmanager
def explaining(url: URL, kind: type[InputError] | type[StoreFailed]) -> Iterator[None]:
    """Turn errors of the driver into one sentence; those of constraints are the caller's."""
    try:
        yield
    except IntegrityError:
        raise
    except (SQLAlchemyError, OSError, UnicodeError) as error:
        raise kind(f"{say_where(url)} {_say_error(error, url)}.") from None


# Of SQLite by its messages: Python 3.10 does not give the codes.
SQLITE = {
    "database is locked": "is locked by another process; stop it, or try again later",
    "file is not a database": "is a file of another kind; use another path",
    "unable to open database file": "cannot be opened or created; check the path and its permissions",
    "database or disk is full": "does not fit on the disk; free some space",
    "readonly database": "cannot be written; check the permissions of the file and its folder",
    "disk i/o error": "cannot be read or written (an error of the disk); check the disk",
    "malformed": "is damaged; restore a backup, or use another path",
    "no such table": "has not the schema of this version; migrate it first",
    "no such column": "has not the schema of this version; migrate it first",
    "already exists": "holds tables of another program; use another path",
}
# Of PostgreSQL by SQLSTATE, the longest prefix first.
POSTGRES = {
    "28": "refuses the login; check the user and the password",
    "3D000": "does not exist; create it, or use another name",
    "25006": "cannot be written (it is read-only); use the primary server",
    "42501": "does not permit this user to create or write its tables; grant it",
    "42P01": "has not the schema of this version; migrate it first",
    "42703": "has not the schema of this version; migrate it first",
    "42P07": "holds tables of another program; use another database",
    "53100": "does not fit on the server's disk; free some space there",
    "53300": "has too many connections; raise its limit, or stop other clients",
    "55P03": "is locked by another process; stop it, or try again later",
    "40P01": "is locked by another process; stop it, or try again later",
    "57P": "is shutting down, or has ended the connection; try again later",
    "08": "cannot be reached; check the host and the port, and that the server is running",
}


def _say_error(error: Exception, url: URL) -> str:
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    words = str(cause)
    if isinstance(cause, sqlite3.Error):
        found = next((sentence for part, sentence in SQLITE.items() if part in words.lower()), None)
    else:
        state = getattr(cause, "sqlstate", None) or _guess_state(words)
        found = next((sentence for prefix, sentence in POSTGRES.items() if state.startswith(prefix)), None)
    return found or f"failed ({flatten(hide_secrets(words, [url.password or '']), 200).rstrip('.')})"


def _guess_state(words: str) -> str:
    """The SQLSTATE of an error without one: of a login that failed, libpq hands on the words alone."""
    signs = {
        "authentication failed": "28",
        "no password supplied": "28",
        "no pg_hba.conf entry": "28",
        "is not permitted to log in": "28",
        "does not exist": "3D000",
        "too many": "53300",
        "remaining connection slots": "53300",
        "shutting down": "57P",
        "starting up": "57P",
        "Is the server running": "08",
        "failed to resolve host": "08",
        "timeout": "08",
        "timed out": "08",
        "connection is lost": "08",
        "server closed the connection": "08",
        "could not receive data": "08",
        "could not send data": "08",
    }
    return next((state for sign, state in signs.items() if sign in words), "")
