"""Made-up pages of any size, for tests of what shows them."""

import base64
import io

import numpy as np
from PIL import Image

from fedthe.report.data import (
    BINS,
    Cost,
    Curve,
    Example,
    Losses,
    Page,
    Paper,
    Score,
    SeedClients,
    Shown,
    Weights,
)

TESTS = {
    "original": "original",
    "corrupted": "corrupted",
    "natural": "natural (letters, 7 classes)",
    "ooc": "out-of-client",
    "mixture": "mixture",
    "corrupted_ooc": "corrupted out-of-client",
}
METHODS = {
    "fedavg": "FedAvg",
    "gma": "GMA",
    "memo_g": "MEMO (G)",
    "fedavg_ft": "FedAvg + FT",
    "apfl": "APFL",
    "fedrep": "FedRep",
    "ditto": "Ditto",
    "fedrod": "FedRoD",
    "knn_per": "kNN-Per",
    "ttt": "TTT",
    "memo_p": "MEMO (P)",
    "t3a": "T3A",
    "fedthe": "FedTHE",
    "fedthe_plus": "FedTHE+",
}
FIGURE_CONFIG = {  # of a made-up record of `fedthe figure`
    "dataset": "glyphs",
    "net": "cnn",
    "clients": 2,
    "dirichlet": 0.1,
    "rounds": 3,
    "seeds": [0],
    "samples": None,
}
TWO_HEADS = ("fedthe", "fedthe_plus")


def make_png(rng, size=32):
    pixels = rng.integers(0, 256, (size, size, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def make_shown(
    name="made-up", methods=tuple(METHODS), clients=20, seeds=(0, 1, 2), classes=None, rounds=100, paper=True, seed=0
):
    """A run as large as a table of the paper. Its numbers mean nothing, but they fit each other."""
    rng = np.random.default_rng(seed)
    classes = [f"class {c}" for c in range(10)] if classes is None else list(classes)
    methods = {each: METHODS.get(each, each) for each in methods}
    heads_of = [each for each in methods if each in TWO_HEADS]
    by_seed = {}
    for s in seeds:
        scores = {m: {t: rng.uniform(20, 95, clients).round(2).tolist() for t in TESTS} for m in methods}
        scores[next(iter(methods))]["natural"][0] = None  # a client without that test
        heads = {
            m: {t: {h: rng.uniform(10, 90, clients).round(2).tolist() for h in ("global", "personal")} for t in TESTS}
            for m in heads_of
        }
        mix = rng.multinomial(500, rng.dirichlet([0.3] * len(classes)), clients).tolist()
        by_seed[str(s)] = SeedClients(mix, scores, heads)
    table = {}
    for m in methods:
        for t in TESTS:
            known = [[x for x in each.scores[m][t] if x is not None] for each in by_seed.values()]
            means = [float(np.mean(x)) for x in known]
            std = float(np.std(means, ddof=1)) if len(seeds) > 1 else None
            worst = float(np.mean([min(x) for x in known]))
            tenth = float(np.mean([np.mean(sorted(x)[: max(1, len(x) // 10)]) for x in known]))
            others = (float(rng.uniform(20, 95)), float(rng.uniform(0.2, 3)), float(rng.uniform(1, 40)))
            table.setdefault(m, {})[t] = Score(float(np.mean(means)), std, worst, tenth, *others)
    at = list(range(rounds // 4, rounds + 1, max(1, rounds // 4)))
    examples = [
        Example(
            test,
            int(rng.integers(clients)),
            int(seeds[0]),
            make_png(rng),
            int(rng.integers(len(classes))),
            {m: int(rng.integers(len(classes))) for m in methods},
            {m: {h: int(rng.integers(len(classes))) for h in ("global", "personal")} for m in heads_of},
            {m: float(rng.uniform()) for m in heads_of},
        )
        for test in TESTS
        for _ in range(8)
    ]
    return Shown(
        name=name,
        sentence=f"{len(methods)} methods on glyphs: {clients} clients, Dirichlet 0.1, cnn, {rounds} rounds.",
        methods=methods,
        tests=TESTS,
        seeds=list(seeds),
        scores=table,
        costs={m: Cost(float(rng.uniform(0.01, 40)), 1.0, 0.0) for m in methods},
        paper=Paper(
            "main-dir0.1",
            "CNN on CIFAR10, Dir(0.1)",
            {m: {t: (float(rng.uniform(20, 90)), 0.5) for t in ("original", "ooc")} for m in methods},
            ["natural is letters, 7 classes.", "Not the paper's data, so not compared: natural, mixture."],
        )
        if paper
        else None,
        classes=classes,
        clients=by_seed,
        weights={
            m: {t: Weights(rng.dirichlet([1.0] * BINS).tolist(), float(rng.uniform())) for t in TESTS} for m in heads_of
        },
        losses=[Losses([m], s, np.geomspace(2, 0.3, rounds).tolist()) for m in methods for s in seeds],
        curves={
            m: {t: Curve(at, rng.uniform(20, 90, len(at)).tolist(), [1.0] * len(at)) for t in TESTS} for m in methods
        },
        examples=examples,
        notes=["client 0 has no sample of the natural shift."],
        short={"natural": "3 of 60 streams have fewer than 20 samples, the shortest 7"},
        failures={"ditto, seed 2": "its loss is not finite after round 3"},
        provenance={
            "command": "fedthe run configs/quick.toml",
            "seconds": 123.4,
            "environment": {"fedthe": "0.1.0", "python": "3.12.3", "torch": "2.11.0", "device": "cpu", "threads": 2},
            "config": {"name": name, "dataset": "glyphs", "clients": clients, "seeds": list(seeds), "rounds": rounds},
            "manifests": {str(s): "0123456789abcdef" * 4 for s in seeds},
            "trainings": [
                {"seed": s, "methods": [m], "rounds": rounds, "seconds": 12.5} for m in methods for s in seeds
            ],
        },
    )


def spread_clients(scores, apart=()):
    """Two seeds of two clients around these means; on the tests `apart`, clients of the first method disagree more."""
    return {
        seed: SeedClients(
            [],
            {
                m: {
                    t: [s.mean + side * (4 if i == 0 and t in apart else 1) for side in (-1, 1)]
                    for t, s in tests.items()
                }
                for i, (m, tests) in enumerate(scores.items())
            },
            {},
        )
        for seed in ("0", "1")
    }


def make_page(**settings):
    return Page("A made-up run", [make_shown(**settings)])
