"""Federation on loopback: what a round costs a client and the server, and what of it is Flower's.

usage: python benchmarks/flower.py [--quick] [--part clients|server] [--out FILE]     (needs the extra flower)

Clients: real SuperNodes, one per core, train the CNN in the paper's settings (1,500 rows of 32 x 32 pictures, 5 epochs
and 1 personal one). Ours is all that the ClientApp does, from settings to reply; beside it, the same rounds in the loop
engine, which trains as many clients at a time, before and after. Of both, the fastest round counts: the speed of a
shared machine varies by half. The rest of the train phase is Flower's: polls, the transfer, and a process per message,
which imports torch.

Server: a real SuperLink and ServerApp with 4 to 100 nodes. Only the nodes are made light: they are threads of one
process, speak Flower's own protocol, and answer with the model that they were sent, slightly changed. So the cost of
the server is measured, at a size at which real nodes would not fit on one machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "flower"))
import loopback

from fedthe import records, store
from fedthe.deploy.flower.status import Status, read_status
from fedthe.deploy.flower.terms import make_terms

RESULT = Path(__file__).with_suffix(".json")
ROWS = 2500  # of each client, of which 60 % are trained on
CLASSES = "c0,c1,c2,c3,c4,c5,c6,c7,c8,c9"
SIZES = 4, 10, 20, 50, 100  # nodes
METHODS = "fedavg", "fedthe"
IDLE = 15.0  # seconds without a run, in which nodes poll
PULSE = 3.0  # seconds between polls of an idle SuperNode
TICK = os.sysconf("SC_CLK_TCK")


def make_settings(method: str, nodes: int, rounds: int, folder: Path, more: str = "") -> dict[str, Any]:
    own = {"dataset": "own", "classes": CLASSES, "shape": "32x32x3"}
    return loopback.say_settings(method, nodes, rounds, folder, more) | own | {"kind": "pictures"}


# ---- clients


def write_data(folder: Path, nodes: int) -> list[Path]:
    paths = [folder / f"client-{number}.npz" for number in range(nodes)]
    for number, path in enumerate(paths):
        draw = np.random.default_rng(number)
        images = draw.integers(0, 256, (ROWS, 32, 32, 3), np.uint8)
        np.savez(path, images=images, labels=draw.integers(0, 10, ROWS), classes=np.array(CLASSES.split(",")))
    return paths


def time_imports(processes: int) -> float:
    """Seconds of a process that imports what a ClientApp does, with as many beside it as there are nodes."""
    began = time.perf_counter()
    command = [sys.executable, "-c", "import fedthe.deploy.flower.client_app"]
    running = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for _ in range(processes)
    ]
    for each in running:
        each.wait()
    return time.perf_counter() - began


def time_loop(terms: Any, data: Sequence[Path], rounds: int) -> float:
    """Seconds of the fastest round in the loop engine, which trains all clients side by side, with a thread each."""
    import torch

    from fedthe.deploy.flower.member import join
    from fedthe.engine.loop import Loop
    from fedthe.engine.train import start, train_together
    from fedthe.engine.visit import Run

    with tempfile.TemporaryDirectory() as folder:
        shards = [join(terms, number, Path(folder), path).shard for number, path in enumerate(data)]
    at = [time.perf_counter()]
    torch.set_num_threads(1)
    engine, method = Loop(threads=len(data)), terms.method.training
    begun = start(method, len(shards), terms.seed)
    train_together(
        [method],
        [Run(terms.seed, shards)],
        terms.settings,
        [[begun]],
        engine,
        after_round=lambda *_: at.append(time.perf_counter()),
    )
    assert len(at) == rounds + 1
    return min(after - before for before, after in pairwise(at))


def measure_clients(nodes: int, rounds: int) -> list[dict[str, Any]]:
    found = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data = write_data(folder, nodes)
        here = loopback.Federation(folder, 3600.0)
        try:
            here.start_link()
            for number, path in enumerate(data):
                here.start_node(number, f'data="{path}"')
            for method in METHODS:
                settings = make_settings(method, nodes, rounds, folder / method)
                before = time_loop(make_terms(settings), data, rounds)
                done = here.run(loopback.say_words(settings))
                status = read_status(folder / method)
                assert status.round == rounds, done.stdout + done.stderr
                found.append(_compare(status, make_terms(settings), data, before))
        finally:
            here.close()
    return found


def _compare(status: Status, terms: Any, data: Sequence[Path], before: float) -> dict[str, Any]:
    history = status.history[1:]
    phase = median(each.seconds["train"] for each in history)
    ours = min(each.seconds["mean"] for each in history)
    loop = min(before, time_loop(terms, data, len(status.history)))
    imports = median(time_imports(len(data)) for _ in range(3))
    return {
        "method": status.method,
        "nodes": len(data),
        "rounds": len(history),
        "train_phase_s": phase,
        "ours_s": ours,
        "loop_engine_s": loop,
        "ours_over_loop": ours / loop,
        "flower_s": median(each.seconds["train"] - each.seconds["slowest"] for each in history),
        "flower_of_which_imports_s": imports,
        "server_merge_s": median(each.seconds["merge"] for each in history),
        "server_save_s": median(each.seconds["save"] for each in history),
        "bytes": history[-1].bytes,
    }


# ---- the server


@contextmanager
def light_nodes(address: str, nodes: int, terms_id: str) -> Iterator[None]:
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--serve",
        address,
        "--nodes",
        str(nodes),
        "--terms",
        terms_id,
    ]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        yield
    finally:
        child.kill()
        child.wait()


def serve_nodes(address: str, nodes: int, terms_id: str) -> None:
    """The other process: nodes as threads, until it is killed."""
    ready = threading.Barrier(nodes + 1)
    for number in range(nodes):
        threading.Thread(target=_serve_node, args=(address, number, terms_id, ready), daemon=True).start()
    ready.wait(300)
    print("ready", flush=True)
    threading.Event().wait(3600)


def _serve_node(address: str, number: int, terms_id: str, ready: threading.Barrier) -> None:
    from flwr.app import Message
    from flwr.supercore.inflatable.inflatable_object import (
        get_all_nested_objects,
        get_object_tree,
        no_object_id_recompute,
    )
    from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree, push_objects
    from flwr.supercore.task_identity import TaskIdentity
    from flwr.supernode.fleet_http_connection import http_request_response

    TaskIdentity._task_id = TaskIdentity._run_id = TaskIdentity._node_id = 1  # of replies; one process has one
    time.sleep(PULSE * number / 100)  # nodes do not start at the same moment
    with http_request_response(address, insecure=True) as (_, receive, send, _, _, pull, push, confirm):
        ready.wait(300)
        while True:
            received = receive()
            if received is None:
                time.sleep(PULSE)
                continue
            about, tree = received
            run = about.metadata.run_id
            message = pull_and_inflate_object_from_tree(
                tree, lambda id, run=run: pull(run, id), lambda id, run=run: confirm(run, id), return_type=Message
            )
            message.metadata.__dict__["_message_id"] = tree.object_id
            reply = _answer(message, number, terms_id)
            reply.metadata.__dict__["_message_id"] = reply.object_id
            with no_object_id_recompute():
                wanted, session = send(reply, get_object_tree(reply), 0.0)
                push_objects(
                    get_all_nested_objects(reply),
                    lambda id, content, run=run, session=session: push(run, session, id, content),
                    object_ids_to_push=wanted,
                )


def _answer(message: Any, number: int, terms_id: str) -> Any:
    from fedthe.deploy.flower import messages

    kind = message.metadata.message_type
    if kind == messages.HELLO:
        return messages.reply(message, {"client": number, "rows": 1500, "terms": int(terms_id[:12], 16)})
    if kind == messages.TRAIN:
        leaves = {name: leaf + 1e-6 * number for name, leaf in messages.take_arrays(message.content).items()}
        return messages.reply(message, {"rows": 1500, "loss": 1.0, "seconds": 0.0}, leaves)
    return messages.reply(message, {"accuracy": 50.0, "samples": 500, "seconds": 0.0})


@dataclass
class Cost:
    cpu: float  # seconds so far
    peak: float  # MiB


def read_cost(pid: int) -> Cost:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return Cost((int(fields[11]) + int(fields[12])) / TICK, int(status["VmHWM"].split()[0]) / 1024)


def find_server_app(link: int) -> int | None:
    """The process of the ServerApp, which a child of the SuperLink starts."""
    parents = {}
    for each in Path("/proc").glob("[0-9]*"):
        try:
            words = (each / "cmdline").read_bytes().split(b"\0")
            parents[int(each.name)] = int((each / "stat").read_text().rpartition(")")[2].split()[1]), words
        except (OSError, IndexError):
            continue
    children = {pid for pid, (parent, _) in parents.items() if parent == link}
    apps = (pid for pid, (parent, words) in parents.items() if parent in children and b"serverapp" in b" ".join(words))
    return next(apps, None)


def measure_server(nodes: int, rounds: int, method: str = "fedthe") -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        settings = make_settings(method, nodes, rounds, folder / "server")
        settings |= {"wait": 300.0}
        terms = make_terms(settings)
        here = loopback.Federation(folder, 1800.0)
        try:
            here.start_link()
            link = here.processes["superlink"].pid
            with light_nodes(f"127.0.0.1:{here.port}", nodes, terms.id):
                before = read_cost(link).cpu
                time.sleep(IDLE)
                idle = (read_cost(link).cpu - before) / IDLE
                said: list[str] = []
                run = threading.Thread(target=lambda: said.append(here.run(loopback.say_words(settings)).stdout))
                run.start()
                costs = _watch(link, folder / "server", rounds, run)
                run.join()
            status = read_status(folder / "server")
            assert status.round == rounds, said
            checkpoint = records.load_progress(folder / "server" / f"{terms.id}.safetensors")
            assert checkpoint is not None
        finally:
            here.close()
    between = [after - before for before, after in pairwise(costs["link"])]
    app = [after - before for before, after in pairwise(costs["app"])]
    history = status.history[1:]
    return {
        "nodes": nodes,
        "rounds": len(history),
        "bytes_down": history[-1].bytes["down"],
        "bytes_up": history[-1].bytes["up"],
        "superlink_idle_cores": idle,
        "superlink_cpu_s": fmean(between),
        "superlink_peak_mib": costs["peaks"][0],
        "server_app_cpu_s": fmean(app),
        "server_app_peak_mib": costs["peaks"][1],
        "train_phase_s": median(each.seconds["train"] for each in history),
        "merge_s": median(each.seconds["merge"] for each in history),
        "save_s": median(each.seconds["save"] for each in history),
    }


def _watch(link: int, folder: Path, rounds: int, run: threading.Thread) -> dict[str, list[float]]:
    """CPU seconds when a round has ended, and the peaks of memory."""
    costs: dict[str, list[float]] = {"link": [], "app": [], "peaks": [0.0, 0.0]}
    app = None
    while run.is_alive() and len(costs["app"]) < rounds:
        time.sleep(0.02)
        app = app or find_server_app(link)
        if app is None or not (folder / "status.json").exists():
            continue
        if read_status(folder).round > len(costs["app"]):
            of_link, of_app = read_cost(link), read_cost(app)
            costs["link"].append(of_link.cpu)
            costs["app"].append(of_app.cpu)
            costs["peaks"] = [of_link.peak, of_app.peak]
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds and nodes")
    parser.add_argument("--part", choices=("clients", "server"), help="only this part; the other one stays as it is")
    parser.add_argument("--out", type=Path, default=RESULT)
    for name in ("--serve", "--terms"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--nodes", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve_nodes(given.serve, given.nodes, given.terms)
        return
    result = json.loads(given.out.read_text()) if given.part and given.out.exists() else {}
    result["cores"], rounds = os.cpu_count() or 1, 3 if given.quick else 6
    if given.part != "server":
        result["clients"] = measure_clients(result["cores"], rounds)
        print(json.dumps(result["clients"]), flush=True)
    if given.part != "clients":
        result["server"] = []
        for nodes in SIZES[:2] if given.quick else SIZES:
            result["server"].append(measure_server(nodes, rounds))
            print(json.dumps(result["server"][-1]), flush=True)
    store.write_json(given.out, result)


if __name__ == "__main__":
    main()
