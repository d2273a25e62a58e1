"""The cost of an answer at test time, side by side in one run.

usage: python benchmarks/testtime.py

FedTHE over a stream of 1,000 samples: its head ensemble against a literal Algorithm 2 (autograd and Adam, sample
by sample, in tests/oracles.py) on the same features. All of FedTHE and of the regime filter against a plain forward
pass of the same CNN.
FedTHE+ and MEMO per sample, against the usual implementation: Pillow augmentations one view at a time, a module whose
weights are restored after every sample, torch.optim.SGD.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fedthe import store
from fedthe.engine.evaluate import answer_stream, make_samples
from fedthe.methods import METHODS, compose
from fedthe.methods.head_ensemble import head_ensemble
from fedthe.methods.memo import Memo
from fedthe.methods.regime import regime_ensemble
from fedthe.methods.two_heads import heads as split_heads
from fedthe.nets.cnn import CNN
from fedthe.types import Shard, scale

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import oracles

RESULT = Path(__file__).with_suffix(".json")
STREAM, LITERAL, TUNED = 1000, 200, 40  # samples of the stream, of the literal loop, and of the fine-tuning methods


def measure(work: Callable[[], object], runs: int) -> float:
    work()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure_in_turns(*works: Callable[[], object], runs: int = 25) -> list[float]:
    """The median seconds of each, one after another in every run."""
    times = [[measure(work, 1) for work in works] for _ in range(runs)]
    return [statistics.median(each) for each in zip(*times, strict=True)]


class Module(nn.Module):
    """The same CNN as a plain module."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 32, 5, bias=False), nn.Conv2d(32, 64, 5, bias=False)
        self.fc = nn.Linear(1600, 64, bias=False)
        self.heads = nn.ModuleList(nn.Linear(64, 10, bias=False) for _ in range(heads))

    def forward(self, x: Tensor) -> Tensor:
        for conv in (self.conv1, self.conv2):
            x = torch.max_pool2d(torch.relu(conv(x)), 2)
        h = torch.relu(self.fc(x.flatten(1)))
        return sum(head(h) for head in self.heads) / len(self.heads)


def tune_as_the_field_does(images: np.ndarray, views: int, heads: int, steps: int = 3, lr: float = 0.0005) -> None:
    """For every image: minimize the marginal entropy over Pillow views, answer, and restore the weights."""
    module = Module(heads)
    kept = copy.deepcopy(module.state_dict())
    for number, image in enumerate(images):
        optimizer = torch.optim.SGD(module.parameters(), lr)
        for step in range(steps):
            seen = [oracles.augmix_one(image, (0, step), number, view) for view in range(views)]
            x = torch.from_numpy(np.stack(seen).astype(np.float32) / 127.5 - 1).permute(0, 3, 1, 2).contiguous()
            p = module(x).softmax(1).mean(0)
            optimizer.zero_grad()
            (-(p * p.log()).sum()).backward()
            optimizer.step()
        with torch.no_grad():
            module(torch.from_numpy(image).permute(2, 0, 1)[None].float() / 127.5 - 1)
        module.load_state_dict(kept)


def main() -> None:
    generator = np.random.default_rng(0)
    smooth = generator.normal(size=(STREAM, 8, 8, 3)).repeat(4, 1).repeat(4, 2)
    images = (128 + 50 * smooth + 20 * generator.normal(size=(STREAM, 32, 32, 3))).clip(0, 255).astype(np.uint8)
    labels = generator.integers(0, 10, STREAM)
    net = CNN(10)
    rows = torch.from_numpy(images[:50])
    real, some = torch.ones(50, dtype=torch.bool), torch.from_numpy(labels[:50])
    shard = Shard(rows, some, real, torch.ones(10), rows, some, real)
    method, regime, plus = (compose(net, METHODS[name]) for name in ("fedthe", "fedthe_regime", "fedthe_plus"))
    memo = compose(net, Memo(views=16))
    mine = net.init(0) | {
        "personal": net.init(1)["head"],
        "descriptor": torch.rand(64),
        "own_descriptor": torch.rand(64),
    }

    x = scale(torch.from_numpy(images))
    with torch.no_grad():
        state = method.predictor.start(method, mine, shard)
        samples = make_samples(method, torch.from_numpy(images), (0,))
        begun = regime.predictor.start(regime, mine, shard)
        # in turns, since the machine's speed drifts
        forward, ensemble, filtered = measure_in_turns(
            lambda: net.logits(mine, x),
            lambda: method.answer(mine, state, samples),
            lambda: regime.answer(mine, begun, samples),
        )
        h, of_global, of_local = split_heads(net, mine, x)
        descriptors = (mine["descriptor"], mine["own_descriptor"])
        heads = measure(lambda: head_ensemble(h, of_global, of_local, *descriptors), 9)
        regimes = measure(lambda: regime_ensemble(of_global, of_local, shard.counts), 9)
    part = (h[:LITERAL], of_global[:LITERAL], of_local[:LITERAL])
    literal = measure(lambda: oracles.head_ensemble_stream(*part, *descriptors), 1)

    few, truth = images[:TUNED], labels[:TUNED]
    seconds = {
        "forward": forward / STREAM,
        "fedthe": ensemble / STREAM,
        "fedthe_regime": filtered / STREAM,
        "head_ensemble": heads / STREAM,
        "regime_ensemble": regimes / STREAM,
        "head_ensemble_literal": literal / LITERAL,
        "fedthe_plus": measure(lambda: answer_stream(plus, mine, shard, few, truth, (0,)), 3) / TUNED,
        "fedthe_plus_field": measure(lambda: tune_as_the_field_does(few, 16, 2), 1) / TUNED,
        "memo16": measure(lambda: answer_stream(memo, net.init(0), shard, few, truth, (0,)), 3) / TUNED,
        "memo16_field": measure(lambda: tune_as_the_field_does(few, 16, 1), 1) / TUNED,
    }
    ratios = {
        "head_ensemble is faster than the literal loop by": seconds["head_ensemble_literal"] / seconds["head_ensemble"],
        "fedthe over a plain forward pass": seconds["fedthe"] / seconds["forward"],
        "fedthe_regime over a plain forward pass": seconds["fedthe_regime"] / seconds["forward"],
        "fedthe_plus is faster than the field's loop by": seconds["fedthe_plus_field"] / seconds["fedthe_plus"],
        "memo is faster than the field's loop by": seconds["memo16_field"] / seconds["memo16"],
    }
    # forward: a multiplication and an addition for each weight at each position; backward is twice that
    macs = 28 * 28 * 2400 + 10 * 10 * 51200 + 102400 + 2 * 640
    floor = {"gflop_forward": 2e-9 * macs, "gflop_fedthe_plus": 2e-9 * macs * (3 * 48 + 2)}
    achieved = floor["gflop_fedthe_plus"] / seconds["fedthe_plus"]
    for name, value in seconds.items():
        print(f"{name:24s} {1000 * value:9.4f} ms per sample")
    for name, value in ratios.items():
        print(f"{name:50s} {value:7.2f}")
    print(f"fedthe_plus runs at {achieved:.0f} GFLOP/s of arithmetic")
    what = "seconds per sample of a stream; literal loops on a part of it, scaled"
    sizes = {"stream": STREAM, "literal": LITERAL, "tuned": TUNED}
    facts = {"threads": torch.get_num_threads(), "torch": torch.__version__, "floor": floor, "gflop_per_s": achieved}
    store.write_json(RESULT, {"what": what, "samples": sizes, "seconds": seconds, "ratios": ratios} | facts)


if __name__ == "__main__":
    main()
