"""A PostgreSQL server for the tests of a worker, on which a test can make databases.

Use it by `from postgres import postgres  # noqa: F401`.
"""

import contextlib
import itertools
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
import pytest

USER, PASSWORD = "fedthe", "only-for-tests"
INSTALL = "there is no PostgreSQL; install the package `postgresql` of the system"


@dataclass
class Server:
    """A running cluster with a superuser. It asks for the password."""

    port: int
    numbers: itertools.count = field(default_factory=itertools.count)

    def url(self, database, password=PASSWORD):
        return f"postgresql://{USER}:{password}@127.0.0.1:{self.port}/{database}"

    def execute(self, statement, database="postgres"):
        """Run a statement outside a transaction; its rows, if it has any."""
        with psycopg.connect(self.url(database), autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else None

    def new_database(self, options=""):
        name = f"test_{next(self.numbers)}"
        self.execute(f"CREATE DATABASE {name} {options}")
        return name

    def end_connections(self, database):
        self.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{database}'")


def find_programs():
    """The folder of initdb and pg_ctl: Debian does not put it in PATH."""
    found = shutil.which("initdb")
    if found:
        return Path(found).resolve().parent
    folders = Path("/usr/lib/postgresql").glob("*/bin")
    return max(
        (each for each in folders if (each / "initdb").exists()), key=lambda each: float(each.parent.name), default=None
    )


def run(*command):
    """Run a program of PostgreSQL, which refuses to be root."""
    as_user = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
    # no pipes: the server, which goes on, would keep them open
    with tempfile.TemporaryFile() as said:
        done = subprocess.run(
            [*as_user, *map(str, command)], cwd="/", stdin=subprocess.DEVNULL, stdout=said, stderr=said
        )
        said.seek(0)
        return done.returncode, said.read().decode(errors="replace")


def start(programs, data, folder):
    """Start the cluster on a free port of the loopback device: the port."""
    for _ in range(5):  # another program may take the port before the server does
        with contextlib.closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        # nothing here outlives the server, so it need not wait for the disk
        settings = f"-c port={port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={folder} -c fsync=off"
        code, said = run(programs / "pg_ctl", "-D", data, "-l", folder / "log", "-w", "-t", 60, "-o", settings, "start")
        if code == 0:
            return port
    return pytest.fail(f"PostgreSQL does not start: {said}")


@pytest.fixture(scope="session")
def postgres():
    """A cluster in a temporary folder, stopped at the end."""
    programs = find_programs()
    if programs is None:
        if os.environ.get("CI"):
            pytest.fail(INSTALL)
        pytest.skip(INSTALL)
    # not in pytest's folder, which only the user may enter, and whose path may be too long for a socket
    folder = Path(tempfile.mkdtemp(prefix="fedthe-postgres-"))
    data, secret = folder / "data", folder / "password"
    try:
        secret.write_text(PASSWORD)
        if os.geteuid() == 0:
            owner = pwd.getpwnam("postgres")
            for path in (folder, secret):
                os.chown(path, owner.pw_uid, owner.pw_gid)
        options = (
            "-U",
            USER,
            f"--pwfile={secret}",
            "--auth=scram-sha-256",
            "--encoding=UTF8",
            "--locale=C",
            "--no-sync",
        )
        code, said = run(programs / "initdb", "-D", data, *options)
        assert code == 0, said
        port = start(programs, data, folder)
        try:
            yield Server(port)
        finally:
            run(programs / "pg_ctl", "-D", data, "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
