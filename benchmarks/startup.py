"""Start-up times: `import fedthe` and `fedthe --help`.

usage: python benchmarks/startup.py

Medians of whole processes. The start of Python and the import of torch alone are given for comparison.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

from fedthe import store

RESULT = Path(__file__).with_suffix(".json")
CASES = {
    "python": ["-c", "pass"],
    "import fedthe": ["-c", "import fedthe"],
    "import fedthe, then every public name": [
        "-c",
        "import fedthe; [getattr(fedthe, name) for name in fedthe.__all__]",
    ],
    "import torch": ["-c", "import torch"],
    "fedthe --help": ["-m", "fedthe", "--help"],
    "fedthe data list": ["-m", "fedthe", "data", "list"],
}


def measure(arguments: list[str], runs: int = 9) -> float:
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    seconds = {name: measure(arguments) for name, arguments in CASES.items()}
    for name, value in seconds.items():
        print(f"{name:40s} {1000 * value:7.0f} ms")
    store.write_json(RESULT, {"what": "seconds of a whole process, median of 9", "seconds": seconds})


if __name__ == "__main__":
    main()
