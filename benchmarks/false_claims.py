"""How often a comparison claims a difference where there is none: simulated experiments, for docs/results.md.

Five tests of 20 clients, normal differences with mean 0. The ratio is that of the variance of seed means to what their
clients explain.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from fedthe.statistics import compare_pairs

CLIENTS, TESTS = 20, 5
SEEDS, RATIOS = (3, 5, 8), (1, 1.5, 5, 20)
LEVELS = (0.05, 0.01, 0.001)


def simulate(seeds: int, ratio: float, experiments: int) -> dict[str, float]:
    """The shares of p-values below each level, and of experiments with any Holm-corrected one below 0.05."""
    draw, apart = np.random.default_rng(5), ((ratio - 1) / CLIENTS) ** 0.5
    ps, corrected = [], []
    for _ in range(experiments):
        more = draw.normal(size=(TESTS, seeds, CLIENTS)) + apart * draw.normal(size=(TESTS, seeds, 1))
        found = compare_pairs({t: [np.stack([each, 0 * each], 1) for each in more[t]] for t in range(TESTS)}).values()
        ps += [each.p for each in found]
        corrected.append(min(each.p_holm for each in found))
    shares = {f"p < {level:g}": float(np.mean(np.array(ps) < level)) for level in LEVELS}
    return shares | {"any p (Holm) < 0.05": float(np.mean(np.array(corrected) < 0.05))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experiments", type=int, default=400)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    rows = []
    for seeds in SEEDS:
        for ratio in RATIOS:
            rows.append({"seeds": seeds, "ratio": ratio, **simulate(seeds, ratio, options.experiments)})
            print(rows[-1], flush=True)
    record = {"clients": CLIENTS, "tests": TESTS, "experiments": options.experiments, "rows": rows}
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
