"""A round of methods that send the same, side by side and one after the other. Needs torch and NumPy alone.

usage: python benchmarks/beside.py [--out FILE]

On a GPU: 20 clients with 1,500 images each and three runs stacked, every network; on a CPU two clients, and the CNN.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))  # runs where the package is not installed

from fedthe import store
from fedthe.bench.lab import begin, time_calls
from fedthe.bench.machine import describe_machine
from fedthe.bench.workload import make_federation
from fedthe.config import OPTIMIZERS
from fedthe.engine.pick import pick_engine
from fedthe.engine.shards import Shards
from fedthe.engine.train import put_beside, train_round
from fedthe.engine.visit import Engine, Progress, Run, Training
from fedthe.methods.apfl import APFL
from fedthe.methods.base import Method
from fedthe.methods.fedrod import FedRoD
from fedthe.methods.fedthe import TwoHeads
from fedthe.nets import NETS

REPEATS = 5
PAIRS = {"fedrod + fedthe": (FedRoD, TwoHeads), "fedavg + apfl": (Method, APFL)}


def time_round(method: Method, begun: Progress, runs: list[Run], settings: Training, engine: Engine) -> float:
    return time_calls(
        lambda: train_round(method, runs, settings, [begun] * len(runs), engine), REPEATS, engine.device
    ).median


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="default: beside-cpu.json or beside-GPU.json beside this file")
    parser.add_argument("--nets", nargs="+", choices=list(NETS), default=["cnn"])
    given = parser.parse_args()
    engine = pick_engine("auto", "auto", "auto")
    on_cpu = engine.device.type == "cpu"
    clients, train, count = (2, 300, 1) if on_cpu else (20, 1500, 3)
    shards = Shards(make_federation(clients, train), engine.device)
    runs, seconds = [Run(seed, shards) for seed in range(count)], {}
    for name in given.nets:
        settings = Training(optimizer=OPTIMIZERS[name])
        for pair, kinds in PAIRS.items():
            begun = {each: begin(each, clients, engine.device) for each in (kind(NETS[name](10)) for kind in kinds)}
            both = put_beside(begun)
            assert both is not None
            alone = [time_round(each, progress, runs, settings, engine) for each, progress in begun.items()]
            beside = time_round(*both, runs, settings, engine)
            seconds[f"{name}, {pair}"] = {"alone": alone, "beside": beside, "ratio": sum(alone) / beside}
            print(f"{name}, {pair}: {sum(alone):.3f} s alone, {beside:.3f} s beside, {sum(alone) / beside:.2f} times")
    machine = describe_machine(engine.device)
    result = {"what": f"seconds of a round, {clients} clients x {train} images, {count} runs", "seconds": seconds}
    out = given.out or Path(__file__).parent / f"beside-{machine.slug}.json"
    store.write_json(out, result | {"machine": asdict(machine)})
    print(f"written to {out}")


if __name__ == "__main__":
    main()
