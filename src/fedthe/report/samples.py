"""Per-sample data: the accuracy of both heads, their weights, and examples to look at."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from ..experiment.results import Results
from ..experiment.tables import Samples
from ..experiment.work import EXAMPLES
from .data import BINS, Example, Percents, Weights
from .read import read_examples

HEADS = ("global", "personal")
SHOWN_EXAMPLES = 9  # of each test, correct and wrong ones in turn


def has_labels(samples: Samples) -> bool:
    return any(name.endswith("/label") for name in samples)


def score_heads(samples: Samples, tests: Sequence[str], clients: int) -> dict[str, dict[str, Percents]]:
    """The accuracy of each client by test and head, if samples have the answers of both heads."""
    scored: dict[str, dict[str, Percents]] = {}
    for test in tests:
        heads: dict[str, Percents] = {
            head: [_rate(samples.get(f"{test}/{k}/{head}"), samples.get(f"{test}/{k}/label")) for k in range(clients)]
            for head in HEADS
        }
        if any(each is not None for percents in heads.values() for each in percents):
            scored[test] = heads
    return scored


def _rate(answers: np.ndarray | None, labels: np.ndarray | None) -> float | None:
    """Of the samples whose class clients hold."""
    if answers is None or labels is None:
        return None
    return round(100 * float((answers == labels)[labels >= 0].mean()), 3)


def spread_weights(seeds: Sequence[Samples]) -> dict[str, Weights]:
    """The weight of the personal head by test, over all clients and seeds."""
    found: dict[str, list[np.ndarray]] = {}
    for samples in seeds:
        for name, values in samples.items():
            test, _, column = name.rsplit("/", 2)
            if column == "e":
                found.setdefault(test, []).append(1 - values)
    spread = {}
    for test, parts in found.items():
        weights = np.concatenate(parts)
        counts, _ = np.histogram(weights.clip(0, 1), BINS, (0, 1))
        spread[test] = Weights((counts / len(weights)).round(5).tolist(), float(weights.mean()))
    return spread


def pick_examples(results: Results, samples: Mapping[tuple[str, int], Samples]) -> list[Example]:
    """Samples of each test, in turn one that the last method answers correctly and one that it gets wrong."""
    images, seed = read_examples(results), results.examples["seed"]
    known = {method: kept for (method, at), kept in samples.items() if at == seed}
    labelled = [kept for kept in known.values() if has_labels(kept)]
    if not labelled:  # files of earlier versions
        return []
    judge = labelled[-1]
    picked = []
    for test in results.tests:
        places = [
            (k, i)
            for i in range(EXAMPLES)  # the first of each client before the second of any
            for k in range(results.config.client_count)
            if i < min(len(images.get(f"{test}/{k}", ())), len(judge.get(f"{test}/{k}/label", ())))
            if f"{test}/{k}/right" in judge and judge[f"{test}/{k}/label"][i] >= 0
        ]
        right = [(k, i) for k, i in places if judge[f"{test}/{k}/right"][i]]
        wrong = [place for place in places if place not in right]
        turns = [place for pair in zip_longest(right, wrong) for place in pair if place is not None]
        for k, i in turns[:SHOWN_EXAMPLES]:
            said = {method: _take_sample(kept, f"{test}/{k}/", i) for method, kept in known.items()}
            picked.append(
                Example(
                    test=test,
                    client=k,
                    seed=seed,
                    image=_encode(images[f"{test}/{k}"][i]),
                    label=int(judge[f"{test}/{k}/label"][i]),
                    answers={method: int(each["answer"]) for method, each in said.items() if "answer" in each},
                    heads={
                        method: {head: int(each[head]) for head in HEADS}
                        for method, each in said.items()
                        if each.keys() >= {*HEADS}
                    },
                    weights={method: 1 - float(each["e"]) for method, each in said.items() if "e" in each},
                )
            )
    return picked


def _take_sample(samples: Samples, where: str, i: int) -> dict[str, Any]:
    return {name: samples[where + name][i] for name in ("answer", *HEADS, "e") if where + name in samples}


def _encode(image: np.ndarray) -> str:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image[..., 0] if image.shape[2] == 1 else image).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"
