"""Ray: a cluster that runs, or one of our own on this machine."""

from __future__ import annotations

import atexit
import os
import re
import signal
import socket
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from .. import foreign
from ..config import Config
from ..errors import InputError
from ..text import quote

LOCAL = "local"  # an address: a Ray of our own, on this machine
ADDRESS = re.compile(r"auto|local|[\w.\[\]:-]+:\d{1,5}")
PATIENCE = 5.0  # seconds to reach a machine
SHUTDOWN = 20.0  # seconds to disconnect


class Share(NamedTuple):
    """What each worker gets of a machine."""

    cpus: int = 1
    gpus: int = 0


def list_machines(ray: Any) -> list[dict[str, float]]:
    """What each machine of the cluster has, by kind: CPU, GPU and others."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def size_workers(machines: Sequence[Mapping[str, float]], config: Config, asked: int | None = None) -> Share:
    """A GPU and its share of the cores, or cores alone. asked: for how many cores."""
    gpus = [each for each in machines if each.get("GPU", 0) >= 1] if config.device != "cpu" else []
    if config.device == "cuda" and not gpus:
        raise InputError("no machine in this Ray cluster has a GPU; use device=cpu, or auto.")
    if gpus and max(each.get("CPU", 0) for each in gpus) < (asked or 0):
        raise InputError(f"no machine with a GPU in this Ray cluster has {asked} cores; ask for fewer.")
    if gpus:
        return Share(asked or int(min(each.get("CPU", 0) // each["GPU"] for each in gpus)), 1)
    cores = [int(each.get("CPU", 0)) for each in machines]
    if max(cores, default=0) < (asked or 1):
        raise InputError(f"no machine in this Ray cluster has {asked or 1} cores; ask for fewer.")
    answers = len(config.methods) * len(config.seeds)  # more tasks than these are rarely left at a time
    smallest = min(each for each in cores if each)
    return Share(asked or max(1, min(smallest, sum(cores) // answers)))


def count_places(machines: Sequence[Mapping[str, float]], share: Share) -> int:
    """How many workers there is room for."""
    needs = {kind: each for kind, each in (("CPU", share.cpus), ("GPU", share.gpus)) if each}
    return max(1, sum(int(min(each.get(kind, 0) // need for kind, need in needs.items())) for each in machines))


@contextmanager
def connected(address: str = LOCAL, **options: Any) -> Iterator[Any]:
    """Connect to Ray for the block. A connection that the caller made is used as it is, and stays.

    options: of a Ray of our own.
    """
    if not isinstance(address, str) or not ADDRESS.fullmatch(address):
        raise InputError(f"{quote(str(address))} is no address of Ray; write local, auto, or HOST:PORT.")
    if address == LOCAL:  # before Ray is imported: it listens on loopback alone, as it does on macOS
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    ray = _load_ray()
    ours = not ray.is_initialized()
    if ours:
        _connect(ray, address, **options)
        _let_print(ray, False)
    try:
        yield ray
    finally:
        if ours:
            if not finish_within(SHUTDOWN, ray.shutdown):
                atexit.unregister(ray.shutdown)  # its processes end with this one
            _let_print(ray, True)


def _let_print(ray: Any, may: bool) -> None:
    """Ray prints to standard output when a worker is lost, whatever its settings say: we say so ourselves."""
    if hasattr(ray._private.worker, "_worker_logs_enabled"):
        ray._private.worker._worker_logs_enabled = may


def finish_within(seconds: float, action: Callable[[], object]) -> bool:
    """Whether the action ended in time. Ray can wait for ever for what is gone."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def _load_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise InputError("workers on Ray need ray; install it with: pip install 'fedthe[ray]'.") from None
    return ray


def _connect(ray: Any, address: str, **options: Any) -> None:
    quiet = {"log_to_driver": False, "logging_level": "error"}
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", address)
    try:
        with warnings.catch_warnings(), _keep_handler():
            warnings.simplefilter("ignore", FutureWarning)  # of Ray's own settings
            if address == LOCAL:
                os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
                ray.init(LOCAL, include_dashboard=False, _node_ip_address="127.0.0.1", **quiet, **options)
            else:
                if address != "auto":
                    _try_port(ray, address)
                ray.init(address, **quiet)
    except (RuntimeError, ValueError, OSError, OverflowError) as error:  # the last: no such port
        if address == "auto":
            raise InputError(
                "there is no Ray running here; start one with `ray start --head`, or give the HOST:PORT of another."
            ) from None
        place = "started here" if address == LOCAL else f"at {address}"
        why = foreign.say_error(error)
        raise InputError(
            f"there is no Ray {place} ({why}); `ray status` on a machine of the cluster says more."
        ) from None


@contextmanager
def _keep_handler() -> Iterator[None]:
    """Ray handles SIGTERM itself from `init` on, and would end a run that could be continued."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():  # no other thread may set it, nor does Ray
            signal.signal(signal.SIGTERM, before)


def _try_port(ray: Any, address: str) -> None:
    """Ray itself tries for minutes."""
    host, _, port = address.rpartition(":")
    if host in ("localhost", "127.0.0.1", "::1"):
        host = ray.util.get_node_ip_address()  # as Ray understands it
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE).close()
    except OSError as error:
        raise RuntimeError(f"{host} port {port}: {foreign.say_error(error)}") from None
