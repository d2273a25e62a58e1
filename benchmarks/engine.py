"""The speed of the engine on this machine, beside the machine's limits. Needs only torch and NumPy.

usage: python benchmarks/engine.py [--device cuda] [--engine stack] [--quick] [--only ROW]... [--out FILE]

The same as `fedthe bench`, in plain text. src/fedthe/bench/ explains the rows, the sizes and the floors.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))  # runs where the package is not installed

from fedthe import store
from fedthe.bench.measure import measure
from fedthe.bench.text import as_text
from fedthe.errors import InputError
from fedthe.progress.events import Event, listening


def report(event: Event) -> None:
    if event.remark:
        print(f"{event.done}/{event.total} {event.remark}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or one such as cuda:1")
    parser.add_argument("--engine", default="auto", help="auto, loop or stack")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, and smaller sizes on a CPU")
    parser.add_argument("--only", action="append", default=[], metavar="ROW", help="only this row; may be repeated")
    parser.add_argument("--out", type=Path, help="default: engine-cpu.json or engine-GPU.json beside this file")
    given = parser.parse_args()
    if (given.quick or given.only) and not given.out:
        parser.error("--quick and --only need --out: the file beside this script holds all rows at full size")
    try:
        with listening(report):
            measured = measure(given.engine, given.device, quick=given.quick, only=given.only)
        print(as_text(measured), flush=True)
        out = given.out or Path(__file__).parent / f"engine-{measured.machine.slug}.json"
        store.write_json(out, measured.as_dict())
    except InputError as error:
        print(f"engine.py: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"{measured.seconds:.0f} s; written to {out}")


if __name__ == "__main__":
    main()
