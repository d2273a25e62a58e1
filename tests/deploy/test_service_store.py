"""Streams in SQLite and in PostgreSQL: answered once, however the process ends; what fails is told in a sentence."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy")
pytest.importorskip("alembic")

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import event, func, select, text

from fedthe.deploy.service import schema
from fedthe.deploy.service import store as storing
from fedthe.deploy.service.store import (
    Answered,
    Change,
    Conflict,
    KeyTaken,
    Logged,
    NewStream,
    Store,
    StoreFailed,
    StreamExists,
    Token,
)
from fedthe.errors import Failed, InputError
from postgres import PASSWORD, postgres  # noqa: F401

HOSTILE = ["", "a\0b", "\ud800", "a\nb", "\x1b[31m", "x" * 201]
ODD = [
    "'; DROP TABLE streams; --",
    "%s %(x)s :y ?",
    "../../etc",
    "漢字 é",
    "\N{GRINNING FACE}",
    "A",
    "a",
    "a ",
    "x" * 200,
]
SENTENCE = re.compile(r"[a-zPS][^\n]*[.]")


class Sqlite:
    kind = "sqlite"

    def __init__(self, folder):
        self.path = folder / "streams.db"
        self.url = f"sqlite:///{self.path}"


class Postgres:
    kind = "postgresql"

    def __init__(self, server):
        self.server, self.name = server, server.new_database()
        self.url = server.url(self.name)


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request, tmp_path):
    """An empty database."""
    return Sqlite(tmp_path) if request.param == "sqlite" else Postgres(request.getfixturevalue("postgres"))


@pytest.fixture
def open_store(database):
    """Open the database once more; all are closed at the end."""
    opened = []

    def open_store(**options):
        store = Store(database.url, **options)
        opened.append(store)
        return store

    yield open_store
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store):
    store = open_store()
    store.migrate()
    return store


def new(id="s", token_id=None, state=b"0"):
    return NewStream(id, token_id, "bundle", f"name of {id}", state)


def change(stream="s", version=0, count=1, first=None, key="k"):
    """The change of a stream whose saves have had one sample each, by the next `count` samples."""
    first = version if first is None else first
    return Change(
        stream,
        version,
        str(first + count).encode(),
        first + count,
        tuple(answer(position, key and f"{key}{position}") for position in range(first, first + count)),
    )


def answer(position, key=None):
    return Answered(key, position, json.dumps({"label": position}), f"digest {position}")


def find_answer(store, stream, key):
    return store.find_answers([(stream, key)]).get((stream, key))


def make_clock():
    """A clock, and a way to move it on."""
    now = [datetime(2026, 1, 2, 3, 4, 5, 6, timezone.utc)]

    def move(**by):
        now[0] += timedelta(**by)
        return now[0]

    return (lambda: now[0]), move


def count_answers(store):
    with store._engine.connect() as connection:
        return connection.execute(select(func.count()).select_from(schema.answers)).scalar_one()


def read_version(store):
    with store._engine.connect() as connection:
        return connection.execute(text("SELECT version_num FROM fedthe_version")).scalars().all()


def upgrade_to(store, revision):
    """What an older version of the package would have left."""
    config = Config()
    config.set_main_option("script_location", str(schema.MIGRATIONS))
    with schema.for_writing(store._engine).begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, revision)


# Streams


def test_a_stream_is_read_as_it_was_created(store):
    before = datetime.now(timezone.utc)
    state = bytes(range(256)) * 1000
    store.create_stream(new(state=state))
    found = store.read_stream("s")
    assert (found.id, found.token_id, found.bundle, found.name) == ("s", None, "bundle", "name of s")
    assert (found.state, found.position, found.version) == (state, 0, 0)
    assert type(found.state) is bytes
    assert found.created == found.used
    assert found.created.utcoffset() == timedelta(0)
    assert before <= found.created <= datetime.now(timezone.utc)
    assert store.read_stream("t") is None


def test_an_id_is_taken_once(store):
    store.create_stream(new())
    with pytest.raises(StreamExists, match="there is a stream 's' already"):
        store.create_stream(new(state=b"other"))
    assert store.read_stream("s").state == b"0"


def test_a_stream_belongs_to_a_token_that_exists(store):
    with pytest.raises(InputError, match="no token with the number 7") as refused:
        store.create_stream(new(token_id=7))
    assert not isinstance(refused.value, StreamExists)


def test_streams_are_listed_by_token_without_their_states(store):
    store.create_token("a")
    store.create_token("b")
    a, b = store.list_tokens()
    for id, token in (("1", None), ("2", a.id), ("3", b.id), ("4", a.id)):
        store.create_stream(new(id, token))
    assert [[each.id for each in store.list_streams(token)] for token in (None, a.id, b.id, 99)] == [
        ["1"],
        ["2", "4"],
        ["3"],
        [],
    ]
    (entry,) = store.list_streams(None)
    assert not hasattr(entry, "state")
    assert entry.name == "name of 1"


def test_a_deleted_stream_is_gone_with_its_answers(store):
    for id in ("s", "t"):
        store.create_stream(new(id))
        store.save([change(id)])
    assert store.delete_stream("s")
    assert not store.delete_stream("s")
    assert store.read_stream("s") is None
    assert [*store.find_answers([("s", "k0"), ("t", "k0")])] == [("t", "k0")]
    store.create_stream(new("s"))
    assert find_answer(store, "s", "k0") is None


def test_a_reset_stream_begins_again_and_refuses_what_is_based_on_the_time_before(store):
    store.create_stream(new())
    store.save([change(count=3)])
    assert store.reset_stream("s", b"fresh")
    found = store.read_stream("s")
    assert (found.state, found.position, found.version) == (b"fresh", 0, 2)
    with pytest.raises(Conflict):
        store.save([change(version=1, first=3)])
    store.save([change(version=2, first=0)])
    assert [each.position for each in store.read_log("s")] == [0]
    assert not store.reset_stream("t", b"fresh")


def test_a_key_makes_one_stream_of_each_owner(store):
    store.create_token("a")
    (token,) = store.list_tokens()
    for owner in (None, token.id):  # a NULL is an owner, too
        made = store.create_stream(replace(new(f"1 {owner}", owner), key="k", digest="d"))
        assert made == store.find_stream(owner, "k")
        assert (made.id, made.digest) == (f"1 {owner}", "d")
        with pytest.raises(KeyTaken, match="there is a stream with the key 'k' already"):
            store.create_stream(replace(new("2", owner), key="k"))
        store.create_stream(new(f"3 {owner}", owner))
        store.create_stream(new(f"4 {owner}", owner))  # without a key, as many as they like
    store.delete_stream("1 None")
    assert store.find_stream(None, "k") is None
    assert store.find_stream(token.id, "k") is not None


def test_streams_that_nobody_uses_expire(open_store, store, monkeypatch):
    clock, move = make_clock()
    logging, other = open_store(log=True, clock=clock), open_store(clock=clock)
    for id in "abc":
        logging.create_stream(new(id))
        logging.save([change(id)])
    move(days=2)
    logging.save([change("b", version=1)])
    assert logging.expire(timedelta(days=2)) == []  # not longer
    move(seconds=1)
    monkeypatch.setattr(storing, "SOME", 1)
    assert sorted([*logging.expire(timedelta(days=2)), *other.expire(timedelta(days=2))]) == ["a", "c"]
    assert other.expire(timedelta(days=2)) == []
    assert [each.id for each in store.list_streams(None)] == ["b"]
    assert count_answers(store) == 2
    assert logging.reset_stream("b", b"0")
    move(days=1)
    assert logging.expire(timedelta(days=2)) == []  # a reset is a use


def test_unused_streams_are_found_by_an_index(store):
    with store._engine.connect() as connection:
        if store._engine.dialect.name == "postgresql":
            connection.execute(text("SET enable_seqscan = off"))
        explain = "EXPLAIN" if store._engine.dialect.name == "postgresql" else "EXPLAIN QUERY PLAN"
        query = "SELECT id FROM streams WHERE used < '2026-01-01' ORDER BY used LIMIT 100"
        plan = connection.execute(text(f"{explain} {query}")).all()
    assert "ix_streams_used" in str(plan)


ON_A_SERVER = pytest.mark.parametrize("database", ["postgresql"], indirect=True)


@ON_A_SERVER
def test_a_sweep_leaves_alone_what_another_uses(database, open_store, store):
    """It does not wait either: the thread that sweeps is the one that answers."""
    clock, move = make_clock()
    late = open_store(clock=clock)
    for id in "ab":
        late.create_stream(new(id))
    move(days=9)
    with schema.for_writing(store._engine).begin() as connection:
        connection.execute(text("UPDATE streams SET version = version WHERE id = 'a'"))
        assert late.expire(timedelta(days=1)) == ["b"]
    assert late.expire(timedelta(days=1)) == ["a"]


# Saves


def test_a_status_is_kept_with_its_state(open_store, store):
    store.create_stream(new())
    assert store.read_stream("s").status is None
    store.save([replace(change(), status="drifting")])
    assert open_store().read_stream("s").status == "drifting"
    assert store.list_streams(None)[0].status == "drifting"
    with pytest.raises(Conflict):
        store.save([replace(change(), status="calm")])
    assert store.read_stream("s").status == "drifting"
    store.reset_stream("s", b"0")
    assert store.read_stream("s").status is None


def test_answers_have_the_time_of_their_save(open_store, store):
    clock, move = make_clock()
    timed = open_store(clock=clock)
    timed.create_stream(new())
    first, _, later = clock(), timed.save([change(count=2)]), move(hours=1)
    timed.save([change(version=1, first=2)])
    assert store.read_log("s", 1) == [
        Logged("k1", 1, answer(1).body, "digest 1", first),
        Logged("k2", 2, answer(2).body, "digest 2", later),
    ]
    assert (store.read_stream("s").created, store.read_stream("s").used) == (first, later)


def test_a_save_keeps_states_and_answers_of_many_streams(store):
    for id in "abc":
        store.create_stream(new(id))
    store.save([change("c", count=2), change("a")])
    store.save([change("a", version=1), change("b")])
    states = {id: store.read_stream(id) for id in "abc"}
    assert {id: (each.state, each.position, each.version) for id, each in states.items()} == {
        "a": (b"2", 2, 2),
        "b": (b"1", 1, 1),
        "c": (b"2", 2, 1),
    }
    assert states["a"].used > states["a"].created
    found = store.find_answers((id, key) for id in "abcd" for key in ("k1", "k2"))
    assert found == {("a", "k1"): answer(1, "k1"), ("c", "k1"): answer(1, "k1")}
    store.save([])


def test_two_changes_of_a_stream_in_one_save_follow_each_other(store):
    store.create_stream(new())
    store.save([change(version=1), change(version=0)])
    assert (store.read_stream("s").position, store.read_stream("s").version) == (2, 2)


def test_two_stores_notice_each_other(open_store, store):
    other = open_store()
    for id in ("a", "b"):
        store.create_stream(new(id))
    other.save([change("a")])
    with pytest.raises(Conflict, match="changed or deleted by another: 'a'") as refused:
        store.save([change("a", key="other"), change("b")])
    assert refused.value.streams == ("a",)
    assert isinstance(refused.value, Failed)
    assert store.read_stream("b").version == 0
    assert count_answers(store) == 1
    other.save([change("b", key=None)])
    with pytest.raises(Conflict) as refused:  # of samples without a key, the version alone tells
        store.save([change("b", key=None)])
    assert refused.value.streams == ("b",)
    assert store.read_stream("b").version == 1
    other.delete_stream("b")
    with pytest.raises(Conflict) as refused:
        store.save([change("a", version=1), change("b"), change("none")])
    assert refused.value.streams == ("b", "none")
    assert store.read_stream("a").version == 1


def test_of_two_that_save_at_once_one_wins(open_store, store):
    """Two threads, with a store each, count up in the same two streams, in different order, until each has done 25."""
    for id in ("a", "b"):
        store.create_stream(new(id))
    stores = open_store(), open_store()

    def work(turn):
        done = 0
        while done < 25:
            found = [stores[turn].read_stream(id) for id in ("ab" if turn else "ba")]
            try:
                stores[turn].save([change(each.id, each.version, key=f"{turn}-") for each in found])
                done += 1
            except Conflict:
                pass

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, (0, 1)))
    found = [store.read_stream(id) for id in ("a", "b")]
    assert [(each.position, each.version, each.state) for each in found] == [(50, 50, b"50")] * 2
    assert count_answers(store) == 100


@pytest.mark.parametrize("given", [(answer(0, "k0"), answer(1, "k0")), (answer(0, "k0"), answer(0, "k1"))])
def test_answers_twice_in_a_save_are_a_conflict_of_their_stream_alone(store, given):
    for id in ("a", "b"):
        store.create_stream(new(id))
    with pytest.raises(Conflict) as refused:
        store.save([change("a"), replace(change("b"), answers=given)])
    assert refused.value.streams == ("b",)
    assert count_answers(store) == 0


@pytest.mark.parametrize("given", [answer(1, "k0"), answer(0, "other")])
def test_an_answer_that_is_there_is_a_conflict(store, given):
    store.create_stream(new())
    store.save([change()])
    with pytest.raises(Conflict) as refused:
        store.save([replace(change(version=1), answers=(given,))])
    assert refused.value.streams == ("s",)
    assert store.read_stream("s").version == 1


def test_without_a_log_answers_with_a_key_are_kept(store):
    store.create_stream(new())
    store.save([replace(change(count=3), answers=(answer(0), answer(1, "k"), answer(2)))])
    assert [(each.position, each.key) for each in store.read_log("s")] == [(1, "k")]


@pytest.mark.parametrize("count", [1, 3, 7, 50])
def test_old_answers_are_trimmed(open_store, store, count):
    trimming = open_store(keep=20)
    store.create_stream(new())
    most = 0
    for version in range(200 // count):
        trimming.save([change(version=version, first=version * count, count=count)])
        kept = [each.position for each in store.read_log("s")]
        end = (version + 1) * count
        assert kept == list(range(kept[0], end))
        assert kept[0] <= max(0, end - 20)
        most = max(most, len(kept))
    assert most <= 20 + 5 + count


def test_a_log_keeps_all_and_stays_when_it_is_switched_off(open_store, store):
    logging, trimming = open_store(log=True, keep=1), open_store(keep=8)
    store.create_stream(new())
    for version in range(50):
        logging.save([change(version=version, key=None)])
    for version in range(50, 100):
        trimming.save([change(version=version)])
    positions = [each.position for each in store.read_log("s")]
    assert positions[:50] == list(range(50))
    assert positions[-8:] == list(range(92, 100))
    assert len(positions) <= 60
    assert [each.position for each in store.read_log("s", 10, 3)] == [10, 11, 12]
    assert store.read_log("s", 10**30) == store.read_log("s", limit=0) == store.read_log("t") == []
    assert len(store.read_log("s", -(10**30), 10**30)) == len(positions)


# Tokens


def test_a_token_is_found_by_its_secret_which_is_not_kept(store, database):
    secret = store.create_token("lab.camera-2_b")
    assert re.fullmatch(r"fedthe_[\w-]{43}", secret)
    (token,) = store.list_tokens()
    assert store.find_token(secret) == token == Token(token.id, "lab.camera-2_b", token.created)
    assert token.created.utcoffset() == timedelta(0)
    for wrong in (secret[:-1], secret.removeprefix("fedthe_"), "", *HOSTILE):
        assert store.find_token(wrong) is None
    with store._engine.connect() as connection:
        assert secret not in repr(connection.execute(select(schema.tokens)).all())


def test_names_of_tokens_are_plain_and_used_once(store):
    store.create_token("a")
    with pytest.raises(InputError, match="there is a token a already"):
        store.create_token("a")
    for name in ("", "a b", "é", "a/b", "x" * 65, "a\n", *HOSTILE):
        with pytest.raises(InputError, match="the name of a token is"):
            store.create_token(name)
    assert [token.name for token in store.list_tokens()] == ["a"]


def test_a_revoked_token_is_refused_and_its_name_owns_its_streams(store):
    first = store.create_token("a")
    token = store.find_token(first)
    store.create_stream(new(token_id=token.id))
    store.revoke_token("a")
    assert store.find_token(first) is None
    assert store.list_tokens() == []
    second = store.create_token("a")
    assert store.find_token(first) is None
    assert store.find_token(second).id == token.id
    for name in ("b", *HOSTILE):
        with pytest.raises(InputError, match="there is no token"):
            store.revoke_token(name)
    store.revoke_token("a")
    with pytest.raises(InputError, match="there is no token 'a'"):
        store.revoke_token("a")
    other = store.create_token("b")
    assert store.list_streams(store.find_token(other).id) == []


# Hostile text


def test_odd_ids_names_and_keys_are_kept_apart(store):
    for odd in ODD:
        store.create_stream(NewStream(odd, None, "bundle", odd, b""))
        store.save([replace(change(odd), answers=tuple(answer(i, key) for i, key in enumerate(ODD)))])
    assert sorted(each.name for each in store.list_streams(None)) == sorted(ODD)
    found = store.find_answers((id, key) for id in ODD for key in ODD)
    assert found == {(id, key): answer(i, key) for id in ODD for i, key in enumerate(ODD)}
    assert all(store.delete_stream(odd) for odd in ODD)


@pytest.mark.parametrize("bad", HOSTILE)
def test_hostile_text_is_refused_or_not_found(store, bad):
    store.create_stream(new())
    for stream in (
        replace(new("t"), id=bad),
        replace(new("t"), name=bad),
        replace(new("t"), bundle=bad),
        replace(new("t"), key=bad),
    ):
        with pytest.raises(InputError, match="of a stream is"):
            store.create_stream(stream)
    assert store.read_stream(bad) is None
    assert store.find_answers([(bad, "k"), ("s", bad)]) == {}
    assert store.find_stream(None, bad) is None
    assert store.read_log(bad) == []
    assert not store.delete_stream(bad)
    assert not store.reset_stream(bad, b"")
    for wrong in (change(bad), replace(change(), answers=(answer(0, bad),))):
        with pytest.raises(InputError, match="without control characters"):
            store.save([wrong])
    assert store.read_stream("s").version == 0


@pytest.mark.parametrize("body", ["\0", "\ud800"])
def test_a_body_that_cannot_be_kept_is_refused(store, body):
    store.create_stream(new())
    with pytest.raises(InputError, match="write JSON in ASCII"):
        store.save([replace(change(), answers=(replace(answer(0, "k"), body=body),))])


# Migrations


def test_migrations_lead_to_the_schema(store):
    with store._engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"version_table": schema.VERSION_TABLE})
        assert compare_metadata(context, schema.metadata) == []
    assert read_version(store) == ["0003"]
    store.create_stream(new())
    store.migrate()
    assert store.read_stream("s") is not None


def test_streams_of_an_older_version_go_on(open_store):
    store = open_store()
    if store._engine.dialect.name == "sqlite":
        with schema._alone(store._engine):
            pass
    upgrade_to(store, "0001")
    now = "2026-01-02 03:04:05.000006"
    row = {"s": b"4", "now": datetime.fromisoformat(now + "+00:00")}
    with schema.for_writing(store._engine).begin() as connection:
        old = "INSERT INTO streams (id, bundle, name, state, position, version, created, used)"
        value = now if store._engine.dialect.name == "sqlite" else row["now"]
        connection.execute(text(f"{old} VALUES ('s', 'bundle', 'n', :s, 4, 3, :now, :now)"), {**row, "now": value})
    assert read_version(store) == ["0001"]
    with pytest.raises(StoreFailed, match="has not the schema of this version; migrate it first"):
        store.read_stream("s")
    store.migrate()
    assert read_version(store) == ["0003"]
    found = store.read_stream("s")
    assert (found.state, found.position, found.version, found.token_id) == (b"4", 4, 3, None)
    assert found.created == row["now"]
    store.save([change(version=3, first=4)])


def test_a_log_of_an_older_version_stays(open_store):
    store = open_store()
    if store._engine.dialect.name == "sqlite":
        with schema._alone(store._engine):
            pass
    upgrade_to(store, "0002")
    with schema.for_writing(store._engine).begin() as connection:
        for number, owner in enumerate(("NULL", "NULL", "1", "1")):
            if number == 2:
                connection.execute(text("INSERT INTO tokens VALUES (1, 'a', 'x', '2026-01-02 03:04:05')"))
            connection.execute(
                text(
                    "INSERT INTO streams (id, bundle, name, state, position, version, created, used, token_id) VALUES "
                    f"('s{number}', 'b', 'n', :state, 1, 1, '2026-01-02 03:04:05', '2026-01-02 03:04:05', {owner})"
                ),
                {"state": b"1"},
            )
        old = "INSERT INTO answers (stream, position, key, digest, body, logged)"
        connection.execute(text(f"{old} VALUES ('s0', 0, 'k0', 'digest 0', '{{}}', true)"))
    store.migrate()
    assert [each.id for each in store.list_streams(1)] == ["s2", "s3"]
    found = store.read_stream("s0")
    assert (found.state, found.position, found.status, found.digest) == (b"1", 1, None, None)
    store.save([replace(change("s0", version=1), status="calm")])
    assert [(each.key, each.time is None) for each in store.read_log("s0")] == [("k0", True), ("k1", False)]
    assert find_answer(store, "s0", "k0") == Answered("k0", 0, "{}", "digest 0")
    assert store.read_stream("s0").status == "calm"
    store.create_stream(replace(new("s4", 1), key="k"))


def test_a_database_of_a_newer_version_is_refused(open_store, store):
    with schema.for_writing(store._engine).begin() as connection:
        connection.execute(text("UPDATE fedthe_version SET version_num = '9999'"))
    with pytest.raises(InputError, match=r"by a newer version of fedthe .its schema is 9999, .* here 0003.; upgrade"):
        open_store().migrate()
    assert read_version(store) == ["9999"]


def test_a_migration_that_fails_leaves_nothing(open_store, tmp_path, monkeypatch):
    """And one that is at a path with odd characters works."""
    odd = tmp_path / "100% odd %(here)s, folder"
    shutil.copytree(schema.MIGRATIONS, odd)
    second = odd / "versions" / "r0002_tokens.py"
    whole = second.read_text()
    second.write_text(whole + "    op.execute('SELECT * FROM nowhere')\n")
    monkeypatch.setattr(schema, "MIGRATIONS", odd)
    store = open_store()
    with pytest.raises(InputError):
        store.migrate()
    with store._engine.connect() as connection:
        assert not store._engine.dialect.has_table(connection, "streams")
    second.write_text(whole + "\n\n\n")  # of another size, so that no stale bytecode is read
    store.migrate()
    assert store.list_streams(None) == []


def test_tables_of_another_program_are_refused(open_store):
    store = open_store()
    with schema.for_writing(store._engine).begin() as connection:
        connection.execute(text("CREATE TABLE streams (x INTEGER)"))
    with pytest.raises(InputError, match="holds tables of another program"):
        store.migrate()


MIGRATE = """
import os, sys
from fedthe.deploy.service.store import Store
wait, go = os.pipe()
children = []
for _ in range(4):
    child = os.fork()
    if child == 0:
        os.close(go)
        os.read(wait, 1)  # until the parent closes it
        for url in sys.argv[1:]:
            store = Store(url)
            store.migrate()
            store.create_token(f"of.{os.getpid()}")
        os._exit(0)
    children.append(child)
os.close(wait), os.close(go)
sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
"""


def test_processes_can_migrate_at_once(database, tmp_path):
    if database.kind == "sqlite":
        urls = [f"sqlite:///{tmp_path}/{i}.db" for i in range(5)]
    else:
        urls = [database.server.url(database.server.new_database()) for _ in range(5)]
    done = subprocess.run([sys.executable, "-c", MIGRATE, *urls], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for url in urls:
        store = Store(url)
        assert len(store.list_tokens()) == 4
        assert read_version(store) == ["0003"]
        store.close()


def test_threads_can_migrate_at_once(open_store, tmp_path):
    """The same database, and others."""
    stores = [*(open_store() for _ in range(3)), *(Store(path=tmp_path / f"{i}.db") for i in range(3))]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(Store.migrate, stores))
    assert [read_version(store) for store in stores] == [["0003"]] * 6
    for store in stores:
        store.close()


# A process that is killed

COUNT = """
import os, sys
from fedthe.deploy.service.store import Answered, Change, Conflict, NewStream, Store, StreamExists

def count(url, number):
    store = Store(url, keep=10**6)
    store.migrate()
    for id in ("a", "b"):
        try:
            store.create_stream(NewStream(id, None, "bundle", id, b"0"))
        except StreamExists:
            pass
    while True:
        key = f"k{number}"
        if not store.find_answers([("a", key)]):
            found = [store.read_stream(id) for id in ("a", "b")]
            changes = [
                Change(each.id, each.version, b"%d" % (int(each.state) + 1), each.position + 1,
                       (Answered(key, each.position, "{}", "digest"),))
                for each in found
            ]
            try:
                store.save(changes)
            except Conflict:  # a server may still be committing for the process that was killed
                continue
        os.write(1, f"{key}\\n".encode())
        number += 1

for line in sys.stdin:  # a child is a process of its own, without the time to import
    child = os.fork()
    if child == 0:
        count(sys.argv[1], int(line))
    os.write(1, f"{child}\\n".encode())
    os.waitpid(child, 0)
    os.write(1, b"ended\\n")
"""


def test_a_killed_process_loses_no_answer_and_counts_no_sample_twice(database, open_store):
    """A client asks for k0, k1, ... and, after a crash, again for the first that it has no answer to."""
    printed, moments = [], random.Random(0)
    with subprocess.Popen(
        [sys.executable, "-c", COUNT, database.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as counting:
        for turn in range(20):
            counting.stdin.write(f"{len(printed)}\n")
            counting.stdin.flush()
            awaited = moments.randint(1, 20) if turn % 4 else 0  # at every fourth, it may still be opening the database
            lines = []
            while not (pids := [line for line in lines if line.isdigit()]) or len(lines) <= awaited:
                lines.append(counting.stdout.readline().strip())
                assert lines[-1] not in ("", "ended"), "it ended by itself"
            time.sleep(moments.uniform(0, 0.2 if awaited == 0 else 0.01))
            os.kill(int(pids[0]), signal.SIGKILL)
            while (line := counting.stdout.readline().strip()) != "ended":
                lines.append(line)
            printed += [line for line in lines if line != pids[0]]
        counting.stdin.close()
    assert len(printed) >= 15
    assert printed == [f"k{i}" for i in range(len(printed))]
    store = open_store()
    for id in ("a", "b"):
        found, kept = store.read_stream(id), store.read_log(id, limit=10**6)
        assert found.position == found.version == int(found.state) == len(kept)
        assert [each.key for each in kept] == [f"k{i}" for i in range(found.position)]
        assert 0 <= found.position - len(printed) <= 1  # one may have been kept and not told


# What goes wrong


def refuse(kind, run, *words):
    """That `run` is refused by one sentence with all the words, without the password."""
    with pytest.raises(kind) as refused:
        run()
    said = str(refused.value)
    assert SENTENCE.fullmatch(said), said
    assert PASSWORD not in said
    assert "s3cret" not in said
    assert all(word in said for word in words), said


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "not the URL of a database"),
        ("streams.db", "not the URL of a database"),
        ("postgresql://user:s3cret@host:port/name", "not the URL of a database"),
        ("postgresql://user:pass@s3cret@host/name", "%40 for an @"),
        ("mysql://user:s3cret@host/name", "in SQLite or PostgreSQL, not in mysql"),
        ("oracle+s3://x", "not in oracle"),
        ("sqlite://", "sqlite:///path"),
        ("sqlite:///:memory:", "sqlite:///path"),
        ("sqlite:///x.db?mode=ro", "without options"),
        ("sqlite://host/x.db", "sqlite:///path"),
    ],
)
def test_a_wrong_url_is_refused(url, words):
    refuse(InputError, lambda: Store(url), words)


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg", "postgresql+psycopg2"])
def test_postgresql_is_reached_through_psycopg(scheme):
    engine = Store(f"{scheme}://user:s3cret@host/name")._engine
    assert engine.url.drivername == "postgresql+psycopg"
    assert engine.url.password == "s3cret"


def test_the_file_is_in_the_home_of_the_package_unless_told(home, tmp_path):
    for store, path in (
        (Store(), home / "service.db"),
        (Store(path=tmp_path / "a b" / "100%?#.db"), tmp_path / "a b" / "100%?#.db"),
        (Store(f"sqlite:///{tmp_path}/c.db"), tmp_path / "c.db"),
    ):
        store.migrate()
        store.close()
        assert path.read_bytes().startswith(b"SQLite format 3")
    with pytest.raises(InputError, match="not both"):
        Store("sqlite:///x.db", path=Path("x.db"))
    with pytest.raises(InputError, match="at least one"):
        Store(keep=0)


def test_a_missing_driver_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    refuse(InputError, lambda: Store("postgresql://user:s3cret@host/name"), "pip install 'fedthe[postgresql]'")


def test_a_file_that_is_no_database_is_refused(tmp_path):
    written, folder, file = tmp_path / "text", tmp_path / "folder", tmp_path / "file"
    written.write_text("no database" * 100)
    folder.mkdir()
    file.write_bytes(b"")
    for path, words in (
        (written, "is a file of another kind"),
        (folder, "cannot be opened or created"),
        (file / "x.db", "cannot write in"),
    ):
        store = Store(path=path)
        refuse(InputError, store.migrate, str(path.parent), words)
        store.close()
    assert written.read_text() == "no database" * 100


def test_a_server_that_does_not_answer_is_refused(postgres, monkeypatch):  # noqa: F811
    monkeypatch.setattr(schema, "PATIENCE", 2)
    there = postgres.url("postgres")
    for url, words in (
        (postgres.url("nowhere"), f"postgresql://127.0.0.1:{postgres.port}/nowhere does not exist"),
        (postgres.url("postgres", "s3cret"), "refuses the login"),
        (there.replace("fedthe:", "nobody:"), "refuses the login"),
        (there.replace(f":{postgres.port}", ":1"), "cannot be reached"),
        (there.replace("127.0.0.1", "nowhere.invalid"), "cannot be reached"),
        (f"{there}?passwort=s3cret", "passwort"),
        (f"{there}?sslmode=wrong", "sslmode"),
        (f"{there}?sslmode=require", "does not support SSL"),
    ):
        store = Store(url)
        refuse(InputError, store.migrate, words)
        store.close()


def test_a_database_that_cannot_keep_all_letters_is_refused(postgres):  # noqa: F811
    name = postgres.new_database("ENCODING 'LATIN1' TEMPLATE template0")
    store = Store(postgres.url(name))
    refuse(InputError, store.migrate, "has the encoding LATIN1; create it with UTF8")
    store.close()
    name = postgres.new_database("ENCODING 'SQL_ASCII' TEMPLATE template0")
    store = Store(postgres.url(name))
    store.migrate()
    store.create_stream(new("漢字"))
    assert store.read_stream("漢字").name == "name of 漢字"
    store.close()


def test_a_read_only_database_is_told(database, open_store, store):
    store.create_stream(new())
    if database.kind == "postgresql":
        database.server.execute(f"ALTER DATABASE {database.name} SET default_transaction_read_only = on")
    reading = open_store()
    if database.kind == "sqlite":  # whoever runs the tests may write files of any mode
        event.listen(reading._engine, "connect", lambda connection, _: connection.execute("PRAGMA query_only = ON"))
    refuse(StoreFailed, lambda: reading.save([change()]), "cannot be written")
    assert reading.read_stream("s").version == 0


def test_a_full_disk_is_told_and_nothing_is_kept(tmp_path):
    store = Store(path=tmp_path / "streams.db")
    store.migrate()
    store.create_stream(new())
    store.close()
    event.listen(store._engine, "connect", lambda connection, _: connection.execute("PRAGMA max_page_count = 20"))
    refuse(StoreFailed, lambda: store.save([replace(change(), state=bytes(1_000_000))]), "does not fit on the disk")
    store.save([change()])
    assert store.read_stream("s").state == b"1"
    store.close()


def test_a_lock_is_waited_for_then_told(database, monkeypatch, store, open_store):
    store.create_stream(new())
    monkeypatch.setattr(schema, "PATIENCE", 0.2)
    hasty = open_store()
    with schema.for_writing(store._engine).begin() as connection:
        connection.execute(text("UPDATE streams SET version = version"))
        refuse(StoreFailed, lambda: hasty.save([change()]), "is locked by another process")
        assert hasty.read_stream("s").version == 0  # who reads does not wait
    hasty.save([change()])


@ON_A_SERVER
def test_a_lost_connection_is_made_again(database, store):
    store.create_stream(new())
    database.server.end_connections(database.name)
    store.save([change()])
    database.server.execute(f"ALTER DATABASE {database.name} ALLOW_CONNECTIONS false")
    database.server.end_connections(database.name)
    refuse(StoreFailed, lambda: store.save([change(version=1)]), database.name)
    refuse(StoreFailed, lambda: store.read_stream("s"), database.name)
    database.server.execute(f"ALTER DATABASE {database.name} ALLOW_CONNECTIONS true")
    assert store.read_stream("s").version == 1


@ON_A_SERVER
def test_a_connection_lost_within_a_save_is_told(database, store, caplog):
    """The database is as before, and the next save works."""
    store.create_stream(new())
    cuts = iter([True])

    def cut(_):
        if next(cuts, False):
            database.server.end_connections(database.name)
            time.sleep(0.1)

    event.listen(store._engine, "commit", cut)
    refuse(StoreFailed, lambda: store.save([change()]), "has ended the connection; try again later")
    assert caplog.text == ""
    assert store.read_stream("s").version == 0
    store.save([change()])


def test_a_store_that_was_not_migrated_says_so(open_store):
    store = open_store()
    refuse(StoreFailed, lambda: store.create_stream(new()), "migrate it first")
    refuse(StoreFailed, lambda: store.find_token("x"), "migrate it first")
