"""A round of methods that train the same shared model, side by side and one after the other.

Needs only torch and NumPy.

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
from fedthe.engine.train import train_round
from fedthe.engine.visit import Engine, Run, Training, Visit
from fedthe.methods import METHODS, compose
from fedthe.methods.base import Method
from fedthe.nets import NETS

REPEATS = 5
PAIRS = (("fedrod", "fedthe"), ("fedavg", "apfl"))


def time_round(methods: list[Method], runs: list[Run], settings: Training, engine: Engine) -> float:
    begun = [begin(method, len(runs[0].shards), engine.device) for method in methods]
    visit = Visit(tuple(methods), settings, runs, [begun] * len(runs))
    return time_calls(lambda: train_round(visit, engine), REPEATS, engine.device).median


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
        for pair in PAIRS:
            methods = [compose(NETS[name](10), METHODS[each]).training for each in pair]
            assert methods[0].core == methods[1].core
            alone = [time_round([each], runs, settings, engine) for each in methods]
            beside = time_round(methods, runs, settings, engine)
            what, ratio = f"{name}, {' + '.join(pair)}", sum(alone) / beside
            seconds[what] = {"alone": alone, "beside": beside, "ratio": ratio}
            print(f"{what}: {sum(alone):.3f} s alone, {beside:.3f} s beside, {ratio:.2f} times")
    machine = describe_machine(engine.device)
    result = {"what": f"seconds of a round, {clients} clients x {train} images, {count} runs", "seconds": seconds}
    out = given.out or Path(__file__).parent / f"beside-{machine.slug}.json"
    store.write_json(out, result | {"machine": asdict(machine)})
    print(f"written to {out}")


if __name__ == "__main__":
    main()
