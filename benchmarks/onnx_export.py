"""What an ONNX export costs and keeps, on real data: latency, parity with torch, and the accuracy of int8.

usage: python benchmarks/onnx_export.py [RUN]

RUN is a finished run with fedthe and fedthe_regime; without it, ten clients of CIFAR-10 are trained for a few rounds.
Latency is that of one sample through `fedthe.runtime`, one thread, in stream order: the bare CNN, FedTHE,
and the regime filter, and FedTHE in torch, in turns. Accuracy is over the first clients' test streams, of their own
classes and out-of-client; int8 is calibrated on training rows.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from fedthe import run, runtime, store, tree
from fedthe.config import Config
from fedthe.deploy.export import Trained, bundle_client, open_run
from fedthe.deploy.onnx import export_onnx, quantize_onnx
from fedthe.engine.evaluate import begin_one, make_samples
from fedthe.methods.base import Method
from fedthe.runtime import Runtime

RESULT = Path(__file__).with_suffix(".json")
CLIENTS, CALIBRATION = 4, 128  # that are exported; training rows that int8 sees
TIMED, TURN, WARM = 2000, 20, 4  # samples: of each contender, of a turn, and at its beginning that are not timed


def train() -> Path:
    config = Config(
        name="onnx",
        out=tempfile.mkdtemp(),
        methods=("fedthe", "fedthe_regime"),
        dataset="cifar10",
        clients=10,
        dirichlet=0.3,
        tests=("original", "ooc"),
        rounds=8,
        local_epochs=2,
        lr=0.03,
        threads=1,
        device="cpu",
    )
    return run(config).folder


def export(found: Trained, method: Method, k: int, path: Path) -> tuple[tree.Tree, tree.Tree, Runtime, Runtime]:
    """Of client k: what it deploys, its state, and the runtimes in float and in int8."""
    bundle, shard = bundle_client(found, k), found.work.run.shards[k]
    mine = bundle.parts["model"]
    state = begin_one(method, mine, shard)
    export_onnx(method, mine, state, path, classes=bundle.classes, sample=shard.x[0].numpy())
    quantized = path.with_suffix(".int8.onnx")
    quantize_onnx(path, quantized, shard.x[:CALIBRATION].numpy())
    return mine, state, runtime.load(path), runtime.load(quantized)


def read_streams(found: Trained) -> list[tuple[str, int, np.ndarray, np.ndarray]]:
    """Of each test and client: images and labels."""
    federation = found.work.federation
    chosen = [(test, k, federation.tests[test][k]) for test in ("original", "ooc") for k in range(CLIENTS)]
    return [(test, k, federation.inputs(stream), federation.labels(stream)) for test, k, stream in chosen]


def describe(apart: np.ndarray) -> dict[str, float]:
    """How far ONNX and torch are apart on all samples [n]."""
    beyond = {"beyond 1e-5": int((apart > 1e-5).sum()), "samples": len(apart)}
    return {"median": float(np.median(apart)), "largest": float(apart.max())} | beyond


def measure_in_turns(works: dict[str, Callable[[int], object]]) -> dict[str, list[float]]:
    """Seconds per sample of each. A turn is a piece of a stream, as where one model runs alone; its first samples only
    bring back what the others pushed out of the caches."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for first in range(0, TIMED, TURN):
        for name, work in works.items():
            for i in range(first, first + TURN):
                start = time.perf_counter()
                work(i)
                if i >= first + WARM:
                    times[name].append(time.perf_counter() - start)
    return times


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else train()
    fedthe, regime = open_run(folder, "fedthe"), open_run(folder, "fedthe_regime")
    contenders = {
        "cnn": (fedthe, Method(fedthe.method.net)),
        "fedthe": (fedthe, fedthe.method),
        "fedthe_regime": (regime, regime.method),
    }
    folder = Path(tempfile.mkdtemp())
    streams = read_streams(fedthe)
    accuracy: dict[str, dict[str, float]] = {}
    parity: dict[str, dict[str, dict[str, float]]] = {}
    works: dict[str, Callable[[int], object]] = {}
    pictures = streams[0][2]
    for name, (found, method) in contenders.items():
        made = [export(found, method, k, folder / f"{name}-{k}.onnx") for k in range(CLIENTS)]
        right: dict[str, list[float]] = {}
        apart: dict[str, list[np.ndarray]] = {"probabilities": [], "weight": []}
        for test, k, images, labels in streams:
            mine, state, exact, quantized = made[k]
            with torch.no_grad():
                answers, _ = method.answer(mine, state, make_samples(method, torch.from_numpy(images), (0,)))
            given, weight = exact.stream().predict_arrays(images)
            coarse, _ = quantized.stream().predict_arrays(images)
            expected = answers.logits.softmax(-1).numpy()
            apart["probabilities"].append(np.abs(given - expected).max(-1))
            if weight is not None:
                apart["weight"].append(np.abs(weight - answers.info["e"].numpy()))
            for kind, probabilities in (("torch", expected), ("onnx", given), ("int8", coarse)):
                right.setdefault(f"{test}, {kind}", []).append(float((probabilities.argmax(-1) == labels).mean()))
        accuracy[name] = {key: statistics.mean(values) for key, values in right.items()}
        parity[name] = {key: describe(np.concatenate(values)) for key, values in apart.items() if values}
        mine, state, exact, quantized = made[streams[0][1]]
        for kind, stream in (("", exact.stream()), (" int8", quantized.stream())):
            works[name + kind] = lambda i, stream=stream: stream.predict(pictures[i % len(pictures)])
        if name == "fedthe":
            works["fedthe in torch"] = answer_in_torch(method, mine, state, pictures)
    times = measure_in_turns(works)
    seconds = {
        name: {"median": statistics.median(each), "p90": float(np.quantile(each, 0.9))} for name, each in times.items()
    }
    medians = {name: each["median"] for name, each in seconds.items()}
    ratios = {
        "fedthe over the bare cnn": medians["fedthe"] / medians["cnn"],
        "fedthe_regime over the bare cnn": medians["fedthe_regime"] / medians["cnn"],
        "fedthe is faster than in torch by": medians["fedthe in torch"] / medians["fedthe"],
        "int8 is faster by": medians["cnn"] / medians["cnn int8"],
    }
    sizes = {name: (folder / f"{name}-0.onnx").stat().st_size for name in contenders}
    sizes |= {f"{name} int8": (folder / f"{name}-0.int8.onnx").stat().st_size for name in contenders}
    for name, each in seconds.items():
        print(f"{name:24s} {1e6 * each['median']:8.1f} µs, 90 % within {1e6 * each['p90']:8.1f} µs")
    for name, value in ratios.items():
        print(f"{name:40s} {value:6.2f}")
    for name, of_test in accuracy.items():
        print(f"{name:24s}", ", ".join(f"{key} {100 * value:.2f} %" for key, value in of_test.items()), parity[name])
    what = "seconds per single sample through fedthe.runtime, one thread; accuracy over the streams of a few clients"
    facts = {
        "accuracy": accuracy,
        "parity": parity,
        "bytes": sizes,
        "torch": torch.__version__,
        "rounds": fedthe.work.config.rounds,
    }
    facts |= {
        "clients": CLIENTS,
        "calibration": CALIBRATION,
        "timed": TIMED,
        "samples": sum(len(s[2]) for s in streams),
    }
    store.write_json(RESULT, {"what": what, "seconds": seconds, "ratios": ratios} | facts)


def answer_in_torch(method: Method, mine: tree.Tree, state: tree.Tree, pictures: np.ndarray) -> Callable[[int], object]:
    pixels, kept = torch.from_numpy(pictures), {"state": state}

    def work(i: int) -> object:
        at = i % len(pixels)
        with torch.no_grad():
            answers, kept["state"] = method.answer(mine, kept["state"], make_samples(method, pixels[at : at + 1], (0,)))
        return answers

    return work


if __name__ == "__main__":
    main()
