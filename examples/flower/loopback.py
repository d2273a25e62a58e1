"""Federate on this machine with real processes, and compare the shared model with that of a simulation.

python examples/flower/loopback.py [METHOD ...] [--nodes 4] [--rounds 3] [--tls] [--folder FOLDER]

Prints one JSON object last, and exits with 0 only if the largest difference is at most 1e-5 for every method.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

APP = Path(__file__).parents[2] / "flower"
NEAR = 1e-5
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "OMP_NUM_THREADS": "1",  # several nodes share the cores
    "NO_COLOR": "1",
}


def find_program(name: str) -> str:
    """Beside this Python, or on the path."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        sys.exit(f"{name} is missing; install it with: pip install 'fedthe[flower]'.")
    return found


def find_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Federation:
    """A SuperLink and its SuperNodes on loopback, each a process of its own, with logs in a folder.

    keys: a folder of certificates.py. Then connections are encrypted, and nodes must be registered.
    """

    def __init__(self, folder: Path, limit: float = 600.0, keys: Path | None = None) -> None:
        self.folder, self.port, self.keys = folder, find_port(), keys
        self.end = time.monotonic() + limit
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        home = folder / "home"
        home.mkdir(parents=True, exist_ok=True)
        trust = f'root-certificates = "{keys / "ca.crt"}"' if keys else "insecure = true"
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\n{trust}\n'
        )
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        self.environment = {**os.environ, **QUIET, "FLWR_HOME": str(home), "PATH": path}

    def start(self, name: str, *command: str, **environment: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [find_program(command[0]), *command[1:]],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**self.environment, **environment},
                cwd=self.folder,
                start_new_session=True,  # so that a process and those that it starts can be ended together
            )

    def start_link(self, *more: str) -> None:
        how = ["--insecure"]
        if self.keys:
            how = ["--ssl-ca-certfile", str(self.keys / "ca.crt"), "--ssl-certfile", str(self.keys / "server.pem")]
            how += ["--ssl-keyfile", str(self.keys / "server.key"), "--enable-supernode-auth"]
        self.start("superlink", "flower-superlink", *how, "--host", "127.0.0.1", "--port", str(self.port), *more)
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            self.check("superlink")
            time.sleep(0.1)

    def register(self, number: int) -> None:
        """Let a node take part by its key."""
        assert self.keys is not None
        public = self.keys / f"node-{number}.pub"
        done = self.flwr("supernode", "register", str(public), "here")
        if done.returncode:
            raise RuntimeError(f"node {number} is not registered:\n{done.stdout}{done.stderr}")

    def start_node(self, number: int, config: str = "", **environment: str) -> None:
        state = self.folder / f"client-{number}"
        home = self.folder / f"home-{number}"
        node = f'partition-id={number} state="{state}" {config}'
        how = ["--insecure"]
        if self.keys:
            private = self.keys / f"node-{number}"
            how = ["--root-certificates", str(self.keys / "ca.crt"), "--auth-supernode-private-key", str(private)]
        self.start(
            f"supernode-{number}",
            *("flower-supernode", *how, "--superlink", f"127.0.0.1:{self.port}"),
            *("--port", str(find_port()), "--node-config", node),
            FLWR_HOME=str(home),
            **environment,
        )

    def run(self, settings: str) -> subprocess.CompletedProcess[str]:
        """`flwr run`, with what the server prints."""
        return self.flwr("run", str(APP), "here", "--stream", "--run-config", settings)

    def flwr(self, *words: str) -> subprocess.CompletedProcess[str]:
        command, left = [find_program("flwr"), *words], max(1.0, self.end - time.monotonic())
        return subprocess.run(
            command, env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=left
        )

    def check(self, name: str) -> None:
        """Stop where a process ended, or time is up."""
        if self.processes[name].poll() is not None or time.monotonic() > self.end:
            log = (self.folder / f"{name}.log").read_text(errors="replace")
            raise RuntimeError(f"{name} did not start:\n{log[-2000:]}")

    def kill(self, name: str, how: int = signal.SIGKILL) -> None:
        """End a process and those that it started in its group. A server's app ends by itself when it notices."""
        process = self.processes.pop(name)
        try:
            os.killpg(process.pid, how)
            process.wait(15)
        except ProcessLookupError:
            pass
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(15)

    def close(self) -> None:
        for name in reversed(list(self.processes)):  # nodes first
            self.kill(name, signal.SIGTERM)


@contextmanager
def federation(folder: Path, nodes: int, limit: float = 600.0, tls: bool = False) -> Iterator[Federation]:
    keys = make_keys(folder / "keys", nodes) if tls else None
    made = Federation(folder, limit, keys)
    try:
        made.start_link()
        for number in range(nodes):
            if tls:
                made.register(number)
            made.start_node(number)
        yield made
    finally:
        made.close()


def make_keys(folder: Path, nodes: int) -> Path:
    names = [f"node-{number}" for number in range(nodes)]
    script = Path(__file__).with_name("certificates.py")
    subprocess.run([sys.executable, str(script), str(folder), "--nodes", *names], check=True, stdout=sys.stderr)
    return folder


def say_settings(method: str, nodes: int, rounds: int, folder: Path, more: str) -> dict[str, str | int | float]:
    return {
        "method": method,
        "dataset": "glyphs",
        "clients": nodes,
        "rounds": rounds,
        "seed": 0,
        "settings": more,
        "folder": str(folder),
    }


def say_words(settings: dict[str, str | int | float]) -> str:
    return " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())


def compare(settings: dict[str, str | int | float], folder: Path) -> float:
    """The largest difference between the server's checkpoint and the same training in one process."""
    from fedthe import records, tree
    from fedthe.deploy.flower.terms import make_terms
    from fedthe.engine.loop import Loop
    from fedthe.engine.train import train
    from fedthe.experiment.work import prepare

    terms = make_terms(settings)
    found = records.load_progress(folder / f"{terms.id}.safetensors")
    if found is None or found.round != terms.settings.rounds:
        return float("inf")
    methods, (work,) = prepare(terms.config)
    (method,) = methods.values()
    expected = train(method.training, work.run.shards, terms.settings, terms.seed, engine=Loop(threads=1))
    one = tree.flatten({"shared": found.server.shared, "averages": found.averages})
    other = tree.flatten({"shared": expected.server.shared, "averages": expected.averages})
    return max(float((one[name] - other[name]).abs().max()) for name in other)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=["fedthe"])
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tls", action="store_true", help="with TLS and nodes that are registered by their keys")
    parser.add_argument("--settings", default="train_fraction=0.2 test_fraction=0.2 local_epochs=1")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds after which everything is ended")
    parser.add_argument(
        "--folder", type=Path, help="of logs, states and the checkpoint; by default one that is deleted"
    )
    given = parser.parse_args()
    differences: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = (given.folder or Path(temporary)).absolute()
        if (folder / "server").exists():
            parser.error(f"{folder} has a federation already; name another folder.")
        with federation(folder, given.nodes, given.limit, given.tls) as here:
            for method in given.methods:
                settings = say_settings(method, given.nodes, given.rounds, folder / "server", given.settings)
                began = time.monotonic()
                done = here.run(say_words(settings))
                print(done.stdout, done.stderr, sep="", file=sys.stderr)
                differences[method] = compare(settings, folder / "server") if done.returncode == 0 else float("inf")
                print(f"{method}: {time.monotonic() - began:.0f} s, difference {differences[method]:.2g}")
    largest = max(differences.values())
    print(json.dumps({"largest_difference": largest, "differences": differences, "holds": largest <= NEAR}))
    return 0 if largest <= NEAR else 1


if __name__ == "__main__":
    sys.exit(main())
