"""What a run leaves on disk. Every file is written whole or not at all, and none is a pickle.

runs/NAME/config.json        what ran
runs/NAME/environment.json   with which versions, on which machine
runs/NAME/manifest-S.json    the federation of seed S: which client holds which rows
runs/NAME/trainings/ID.*     a federated training: its checkpoint (safetensors), what is known of it (JSON), and the
                             state of its clients where that is too much for memory (records of one size)
runs/NAME/answers/ID.json    one method on one seed: its scores on every client and test
runs/NAME/samples/ID.npz     the same by sample: label, answer, probabilities; with two heads also both answers and e
runs/NAME/examples/ID.npz    the first images of some streams, to look at
runs/NAME/results.jsonl      all scores of the run, one line per method, seed, test and client; and as Parquet
"""

from __future__ import annotations

import json
import platform
import shlex
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import foreign, store, tree
from .engine.clients import Clients
from .engine.remote import RemoteEngine
from .engine.server import Server
from .engine.visit import Engine, Progress
from .errors import Damaged, InputError
from .text import flatten, hide_secrets

PARTS = (".clients", ".json", ".safetensors")  # the files of a training; the last says that it is there


def save_progress(path: Path, progress: Progress) -> None:
    """A checkpoint: shared state, the state of every client, and the losses so far.

    Client states that do not fit in memory stay in a file beside the checkpoint, which refers to it.
    """
    from safetensors.torch import save_file

    progress.clients.sync()
    named, clients = progress.clients.state()
    parts = {
        "clients": named,
        "shared": tree.flatten(progress.server.shared),
        "averages": tree.flatten(progress.averages),
    }
    # copies: a view of a larger tensor would be refused
    tensors = {
        f"{part}.{name}": leaf.detach().cpu().contiguous().clone()
        for part, leaves in parts.items()
        for name, leaf in leaves.items()
    }
    facts = {
        "round": progress.round,
        "losses": list(progress.server.losses),
        "skipped": list(progress.server.skipped),
        "clients": clients,
        "leaves": {part: list(leaves) for part, leaves in parts.items()},  # in their order
        "tensors": tree.hash_leaves(tensors),
    }
    with store.whole_file(path) as part:
        save_file(tensors, part, metadata={"fedthe": json.dumps(facts), "sha256": _seal(path, facts)})
    progress.clients.forget_others()


def load_progress(path: Path, device: torch.device | str = "cpu") -> Progress | None:
    """The checkpoint at `path`, or None if there is none."""
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        return None
    try:
        foreign.open_file(path).close()  # refuses FIFOs and devices
        with safe_open(path, framework="pt") as file:
            facts = _check_facts(path, file.metadata() or {})
            # copies, since alignment in the file would change the last bits of products
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  no dict
        if tree.hash_leaves(tensors) != facts["tensors"]:
            raise Damaged(f"{path} was changed after it was written")
        parts = {
            part: {name: tensors[f"{part}.{name}"].to(device) for name in names}
            for part, names in facts["leaves"].items()
        }
        shared, averages = tree.unflatten(parts["shared"]), tree.unflatten(parts["averages"])
        server = Server(facts["round"], shared, tuple(facts["losses"]), tuple(facts["skipped"]))
        return Progress(server, averages, Clients.restore(parts["clients"], facts["clients"], clients_file(path)))
    except Damaged as error:
        raise Damaged(f"{error}; delete it to train again.") from None
    except InputError:
        raise  # says it already
    except (SafetensorError, OSError, LookupError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise Damaged(f"{path} is not a whole checkpoint ({flatten(error, 200)}); delete it to train again.") from None


def compact_progress(path: Path) -> None:
    """Write a checkpoint again if its file of clients' states has slots that are not in use, without those.

    Not safe against a crash.
    """
    states = clients_file(path)
    found = load_progress(path) if states.exists() else None
    if found is not None and found.clients.has_gaps:
        states.unlink()  # it stays open until it is copied
        save_progress(path, replace(found, clients=found.clients.copy_to(states)))


def _seal(path: Path, facts: Mapping[str, Any]) -> str:
    """A hash of the facts and the training, without its number of rounds: a longer training may begin as a copy."""
    return store.content_hash("fedthe", path.stem.rpartition("-")[0], facts)


def _check_facts(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    facts = json.loads(metadata["fedthe"])
    if metadata["sha256"] != _seal(path, facts):
        raise Damaged(f"{path} is another checkpoint under this name, or was changed after it was written")
    return dict(facts)


def read_round(path: Path) -> int:
    """How many rounds a checkpoint has; -1 where it is missing or damaged."""
    reached = _read_facts(path).get("round")
    return reached if isinstance(reached, int) else -1


def read_losses(path: Path) -> list[float]:
    """The mean local loss of every round of a checkpoint; none where it is missing or damaged."""
    return list(_read_facts(path).get("losses", []))


def read_skipped(path: Path) -> list[str]:
    """Which clients rounds of a checkpoint left out, and why; none where it is missing or damaged."""
    return list(_read_facts(path).get("skipped", []))


def _read_facts(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open

    try:
        foreign.open_file(path).close()
        with safe_open(path, framework="pt") as file:
            return _check_facts(path, file.metadata())
    except (SafetensorError, OSError, LookupError, ValueError, TypeError):  # a Damaged is a ValueError
        return {}


def copy_progress(path: Path, to: Path) -> None:
    """Begin a longer training with a copy of a shorter one. The checkpoint comes last, so that it is never alone."""
    for suffix in PARTS:
        if suffix == ".json":
            with suppress(Damaged):  # the time it took is dispensable
                if facts := store.read_sealed(path.with_suffix(suffix)):
                    store.write_sealed(to.with_suffix(suffix), facts)
        elif path.with_suffix(suffix).exists():
            with store.whole_file(to.with_suffix(suffix)) as part:
                shutil.copyfile(path.with_suffix(suffix), part)


def delete_progress(path: Path) -> None:
    for suffix in reversed(PARTS):
        path.with_suffix(suffix).unlink(missing_ok=True)


def clients_file(path: Path) -> Path:
    """The file with client states that belongs to a checkpoint."""
    return path.with_suffix(".clients")


def read_json(path: Path) -> Any:
    """What `store.write_json` wrote, or None if there is no such file."""
    try:
        with foreign.open_file(path) as file:
            return json.load(file)
    except FileNotFoundError:
        return None
    except (ValueError, OSError, RecursionError) as error:
        raise InputError(f"{path} is damaged ({foreign.say_error(error)}); delete it to compute it again.") from None


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """A sealed npz file of a run; nothing where it is not there or damaged."""
    try:
        return store.read_arrays(path)
    except InputError:
        return {}


def write_samples(path: Path, samples: Mapping[str, np.ndarray]) -> None:
    """Arrays [samples of a stream] by "test/client/column", filed as one array for all streams of a column: a file of
    a thousand small arrays takes nine times as long to read."""
    columns: dict[tuple[str, str], list[str]] = {}
    for name, values in samples.items():
        columns.setdefault((name.rpartition("/")[2], values.dtype.kind), []).append(name)
    index = [[[name, len(samples[name])] for name in names] for names in columns.values()]
    joined = {str(i): np.concatenate([samples[name] for name in names]) for i, names in enumerate(columns.values())}
    text = np.frombuffer(json.dumps(index).encode(), dtype=np.uint8)
    store.write_arrays(path, {**joined, "index": text}, compress=True)


def load_samples(path: Path) -> dict[str, np.ndarray]:
    """What `write_samples` wrote, here or in an earlier version."""
    arrays = store.read_arrays(path)
    if "index" not in arrays:
        return arrays
    samples: dict[str, np.ndarray] = {}
    try:
        for i, streams in enumerate(json.loads(arrays["index"].tobytes())):
            parts = np.split(arrays[str(i)], np.cumsum([length for _, length in streams])[:-1])
            samples |= {name: part for (name, _), part in zip(streams, parts, strict=True)}
        if not all(isinstance(name, str) for name in samples):
            raise TypeError("a name is not text")
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise Damaged(f"{path} is damaged ({foreign.say_error(error)}).") from None
    return samples


def read_samples(path: Path) -> dict[str, np.ndarray]:
    """The same; nothing where it is not there or damaged."""
    try:
        return load_samples(path)
    except InputError:
        return {}


def describe_environment(engine: Engine) -> dict[str, Any]:
    from . import __version__

    if isinstance(engine, RemoteEngine):
        return {**engine.environment, "command": _name_command()}
    device, threads = engine.device, getattr(engine, "threads", None)

    return {
        "fedthe": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": threads or torch.get_num_threads(),
        "command": _name_command(),
    }


def _name_command() -> str:
    """The command line; "" in an interactive session."""
    script, *words = map(hide_secrets, sys.argv or [""])
    path = Path(script)
    if path.stem == "fedthe" or path.parts[-2:] == ("fedthe", "__main__.py"):
        return shlex.join(["fedthe", *words])
    is_script = path.suffix == ".py" and path.stem not in ("__main__", "ipykernel_launcher")
    return shlex.join(["python", path.name, *words]) if is_script else ""
