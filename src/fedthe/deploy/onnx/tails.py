"""What follows the network in the graph: how a predictor answers. Each writes out a file of `fedthe.methods`, in
float64 like it: FedTHE's search, and the regime filter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from onnx import GraphProto, TensorProto, ValueInfoProto

from ...errors import InputError
from ...methods.base import Method
from ...methods.fedthe import HeadEnsemble
from ...methods.head_ensemble import Search
from ...methods.memo import Memo
from ...methods.predictor import Forward
from ...methods.regime_filter import RegimeFilter
from ...tree import Tree
from .graph import Graph, Value, axes, info

State = dict[str, Value]
SWEEPS = 4  # of a search, before it is asked whether there must be more
STILL = 2e-6  # the change of a sample's scores that needs no further sweep; its weight changes by a fourth at most
AT_FIRST = 1e-5  # the same after SWEEPS; as a threshold of later sweeps, it was seen to leave weights 1e-5 off


def check_predictor(method: Method) -> None:
    """Refuse a method whose answers cannot be a graph."""
    predictor = method.predictor
    if isinstance(predictor, HeadEnsemble) and predictor.batch > 1:
        why = f"has batch={predictor.batch}, so that samples share a weight"
    elif isinstance(predictor, HeadEnsemble | RegimeFilter) and isinstance(predictor.then, Memo):
        why = "tunes the weights of the network for every sample"
    elif type(predictor) not in (Forward, HeadEnsemble, RegimeFilter):
        why = "is not written for ONNX"
    else:
        return
    raise InputError(f"the predictor {type(predictor).__name__} {why}, so it has no ONNX export; deploy it with torch.")


def is_weighing(method: Method) -> bool:
    return not isinstance(method.predictor, Forward)


def add_tail(graph: Graph, method: Method, mine: Tree, state: State, seen: Sequence[Value]) -> State:
    """Add the outputs "probabilities" and "weight", and return the next state. `seen` is what the network gives."""
    predictor = method.predictor
    if isinstance(predictor, HeadEnsemble):
        return _ensemble(graph, predictor, mine, state, method.net.classes, *seen)
    if isinstance(predictor, RegimeFilter):
        return _filter(graph, predictor, mine, state, *seen)
    graph.narrow(graph("Softmax", graph.wide(seen[0]), axis=-1), "probabilities")
    return state


def _ensemble(
    graph: Graph, predictor: HeadEnsemble, mine: Tree, state: State, classes: int, h: Value, z: Value
) -> State:
    """h [n, d], and z [n, 2, classes], the logits of the global and of the personal head"""
    h, z = graph.wide(h), graph.wide(z)
    z = graph("Sub", z, graph("ReduceMax", z, axes(-1), keepdims=1))  # an offset's rounding would hide differences
    after = state
    if predictor.history:
        rows, last = _smooth(graph, h, state["history"], predictor.alpha, predictor.beta)
        after = {"history": last}
    else:
        rows = graph("Unsqueeze", h, axes(1))
    both = _find_weights(graph, z, _measure_gaps(graph, rows, mine), predictor, classes)  # [n, 2, 1]
    logits = graph("Squeeze", graph("MatMul", graph.turn(both), z), axes(1))
    graph.last("Softmax", graph("Cast", logits, to=TensorProto.FLOAT), "probabilities", axis=-1)
    graph.narrow(graph("Squeeze", graph("Gather", both, np.array(0, np.int64), axis=1), axes(1)), "weight")
    return after


def _smooth(graph: Graph, h: Value, history: Value, alpha: float, beta: float) -> tuple[Value, Value]:
    """Every feature drawn to the history before it [n, 1, d], and the last history [d]."""
    first = graph("Gather", h, np.array(0, np.int64))
    before = graph("Where", graph("IsNaN", history), first, history)
    step = Graph("step/")
    apart = step("Sub", "step/h", "step/before")
    for output, share in (("step/after", np.array(alpha)), ("step/smoothed", np.array([[beta]]))):
        step.name(step("Add", "step/before", step("Mul", apart, share)), output)
    body = step.body(
        "step",
        [info("step/before", ["d"]), info("step/h", ["d"])],
        [info("step/after", ["d"]), info("step/smoothed", [1, "d"])],
    )
    last, smoothed = graph.many(2, "Scan", before, h, body=body, num_scan_inputs=1)
    return smoothed, last


def _measure_gaps(graph: Graph, rows: Value, mine: Tree) -> Value:
    """How much farther rows [n, 1, d] are from one descriptor than from the other [n, 2, 1], the global one first.

    The difference of two distances, unlike measure_gap: features of float32 are nowhere near so far away that its
    rounding in float64 would count.
    """
    descriptors = np.stack([mine[name].double().numpy() for name in ("descriptor", "own_descriptor")])
    distances = graph("ReduceL2", graph("Sub", rows, descriptors), axes(-1), keepdims=1)
    return graph("MatMul", np.array([[1.0, -1.0], [-1.0, 1.0]]), distances)


def _find_weights(graph: Graph, z: Value, gaps: Value, predictor: HeadEnsemble, classes: int) -> Value:
    """e and 1 - e [n, 2, 1] of logits [n, 2, classes]

    The two rows of whatever is [n, 2, ...] from here on are for e and for 1 - e: equal, or opposite. The gradient of
    the entropy by e is -cov(z, d), of the mixed logits z and d = global - personal, under the probabilities softmax(z).
    """
    if predictor.weighting == "slw":
        p = graph("LpNormalization", graph("Softmax", z, axis=-1), axis=-1, p=2)
        apart = graph("MatMul", np.array([[0.5**0.5, -(0.5**0.5)]]), p)
        rest: Value | float = graph("ReduceSumSquare", apart, axes(-1), keepdims=1)
        turn = graph("Sub", rest, 1.0)  # minus the cosine: p are unit vectors
    else:
        lam = {"fa": 0.0, "em": 1.0, "half": 0.5}[predictor.weighting]
        rest, turn = 1 - lam, graph.constant(-lam)
    pull = graph("Mul", rest, gaps)
    turned = graph("Mul", turn, graph("MatMul", np.array([[1.0, -1.0]]), z))
    return _descend(graph, Slopes(z, pull, turned, classes), predictor.search)


def _descend(graph: Graph, slopes: Slopes, search: Search) -> Value:
    """The weights [n, 2, 1] after all steps of Adam, which are found together: given the scores before every step, one
    sweep gives every gradient, and from these follow the scores again. A sweep makes at least one more step exact, and
    mostly far more: after four, the scores of nearly all samples stand still. Sweeps go on until all do. One step after
    another would be twice as many operators, and a single sample takes as long as there are operators.
    """
    if not search.steps:
        return graph("Sigmoid", graph("Mul", slopes.pull, 0.0))
    adam = Adam.of(search)
    rough, narrow = adam.narrow(), slopes.narrow(graph)  # a last sweep in float64 corrects what rounding did to others
    scores = graph("MatMul", rough.move(graph, _guess(graph, rough, narrow)), rough.before)
    for _ in range(SWEEPS - 2):
        before, scores = scores, graph("MatMul", rough.sweep(graph, scores, narrow), rough.before)
    change = graph.wide(graph("ReduceL2", graph("Sub", scores, before), axes(1, 2), keepdims=1))
    before = graph.wide(scores)
    steps = adam.sweep(graph, before, slopes)
    scores = graph("MatMul", steps, adam.before)
    steps = _settle(graph, before, scores, steps, change, slopes, adam)
    return graph("Sigmoid", graph("MatMul", steps, np.full((search.steps, 1), -1.0)))


def _guess(graph: Graph, adam: Adam, slopes: Slopes) -> Value:
    """The slopes of a first sweep [n, 2, steps]: at scores that go down or up, whichever the slope at 0 says."""
    down = 1 / (1 + np.exp(-adam.guess))
    e = np.concatenate([np.stack([down, 1 - down]), np.stack([1 - down, down])], 1)  # [2, 2 * steps]
    by_e = slopes.by_e(graph, graph("MatMul", e.T, slopes.z))
    both = graph.many(2, "Split", graph("Mul", by_e, (e * (1 - e))), axis=2, num_outputs=2)
    at_0 = graph("Slice", both[0], axes(0, 0), axes(1, 1), axes(1, 2))
    return graph("Where", graph("Greater", at_0, np.array(0, np.float32)), *both)


def _settle(
    graph: Graph, before: Value, scores: Value, steps: Value, change: Value, slopes: Slopes, adam: Adam
) -> Value:
    """Sweep until no score moves any more. `change` is that of the sweep before the last."""

    def square(graph: Graph, before: Value, after: Value) -> Value:
        return graph("ReduceSumSquare", graph("Sub", after, before), axes(1, 2), keepdims=1)

    def goes_on(graph: Graph, earlier: Value, change: Value, still: float) -> Value:
        # changes shrink ever faster, so the next one is at most the square of this one over the earlier
        excess = graph("Sub", change, graph("Mul", earlier, still))
        return graph("Greater", graph("ReduceMax", excess, keepdims=0), 0.0)

    names, sweep = ("scores", "steps", "change"), Graph("sweep/")
    made = adam.sweep(sweep, "sweep/scores", slopes)
    after = sweep("MatMul", made, adam.before)
    changed = square(sweep, "sweep/scores", after)
    sweep.name(goes_on(sweep, sweep("Sqrt", "sweep/change"), changed, STILL), "sweep/goes_on")
    for name, value in zip(names, (after, made, changed), strict=True):
        sweep.name(value, f"sweep/{name}_after")
    wide: list[int | str] = ["n", 2, len(adam.first)]
    shapes: list[list[int | str]] = [wide, wide, ["n", 1, 1]]
    body = sweep.body(
        "sweep",
        [info("sweep/number", [], TensorProto.INT64), info("sweep/moves", [], TensorProto.BOOL)]
        + [info(f"sweep/{name}", shape) for name, shape in zip(names, shapes, strict=True)],
        [info("sweep/goes_on", [], TensorProto.BOOL)]
        + [info(f"sweep/{name}_after", shape) for name, shape in zip(names, shapes, strict=True)],
    )
    changed = square(graph, before, scores)
    most = np.array(len(adam.first) - 1, np.int64)  # then every step is exact
    moves = goes_on(graph, change, changed, AT_FIRST)
    return graph.many(3, "Loop", most, moves, scores, steps, changed, body=body)[1]


class Slopes(NamedTuple):
    """What the loss of each sample is made of."""

    z: Value  # [n, 2, classes]
    pull: Value  # [n, 2, 1]: of the distances
    turned: Value  # [n, 1, classes]: global - personal logits, times minus the weight of the entropy
    classes: int
    dtype: type[np.floating[Any]] = np.float64

    def narrow(self, graph: Graph) -> Slopes:
        z, pull, turned = (graph("Cast", value, to=TensorProto.FLOAT) for value in (self.z, self.pull, self.turned))
        return Slopes(z, pull, turned, self.classes, np.float32)

    def by_e(self, graph: Graph, z: Value) -> Value:
        """The gradient by e and by 1 - e [n, 2, steps] at the mixed logits z [n, steps, classes]"""
        p = graph("Softmax", z, axis=-1)
        centred = graph("Sub", self.turned, graph("MatMul", p, graph.turn(self.turned)))
        parts = graph("Mul", graph("Mul", p, z), centred)
        both = np.repeat([[1.0], [-1.0]], self.classes, 1).astype(self.dtype)
        return graph("Add", graph("MatMul", both, graph.turn(parts)), self.pull)

    def by_score(self, graph: Graph, scores: Value) -> Value:
        """[n, 2, steps] like the scores, which are twice those of `descend`"""
        e = graph("Sigmoid", scores)
        by_e = self.by_e(graph, graph("MatMul", graph.turn(e), self.z))
        if self.dtype == np.float32:  # onnxruntime has no product of float64
            return graph("Mul", by_e, graph("ReduceProd", e, axes(1), keepdims=1))
        return graph("Mul", by_e, graph("Sub", e, graph("Mul", e, e)))


@dataclass(frozen=True)
class Adam:
    """Adam as matrices [steps, steps], for rows over steps: its moments are sums over the gradients so far."""

    first: np.ndarray  # the first moment, times the learning rate of twice the score
    second: np.ndarray
    before: np.ndarray  # the score before each step, of what each step subtracts
    guess: np.ndarray  # [steps]: the scores before each step where the slope by e is constant and positive
    eps: np.ndarray  # [steps]

    @classmethod
    def of(cls, search: Search) -> Adam:
        t = np.arange(1, search.steps + 1)
        ago = np.tril(t[:, None] - t)
        first, second = (
            np.tril(beta**ago) * ((1 - beta) / (1 - beta**t))[:, None] for beta in (search.beta1, search.beta2)
        )
        first = first * 2 * float(search.lr)
        slopes, guess = np.zeros(0), np.zeros(1)
        for i in range(search.steps):
            e = 1 / (1 + np.exp(-guess[-1]))
            slopes = np.append(slopes, e * (1 - e))
            step = first[i, : i + 1] @ slopes / np.sqrt(second[i, : i + 1] @ slopes**2)
            guess = np.append(guess, guess[-1] - step)
        before = -np.tril(np.ones_like(first), -1)
        return cls(first.T, second.T, before.T, guess[:-1], np.full(search.steps, search.eps))

    def narrow(self) -> Adam:
        return Adam(*(getattr(self, each.name).astype(np.float32) for each in fields(self)))

    def sweep(self, graph: Graph, scores: Value, slopes: Slopes) -> Value:
        """What every step subtracts from the scores, given those before it; all are [n, 2, steps]."""
        return self.move(graph, slopes.by_score(graph, scores))

    def move(self, graph: Graph, slope: Value) -> Value:
        """The same, given the slopes."""
        m = graph("MatMul", slope, self.first)
        v = graph("MatMul", graph("Mul", slope, slope), self.second)
        return graph("Div", m, graph("Add", graph("Sqrt", v), self.eps))


def _filter(graph: Graph, predictor: RegimeFilter, mine: Tree, state: State, z: Value) -> State:
    """z [n, 2 or 3, classes]: the logits of the global and of the personal head, and of the discriminant"""
    settings, own, everybody = predictor.regimes, state["own"], state["everybody"]
    z = graph("Div", graph.wide(z), graph("Unsqueeze", state["temperatures"], axes(1)))
    parts = graph.many(
        3 if predictor.discriminant else 2,
        "Split",
        graph("LogSoftmax", z, axis=-1),
        axis=1,
        num_outputs=3 if predictor.discriminant else 2,
    )
    of_global, of_local, *of_discriminant = (graph("Squeeze", part, axes(1)) for part in parts)  # [n, classes]
    if of_discriminant:
        share = float(mine["discriminant"]["share"])
        both = graph("Add", graph("Mul", of_global, 1 - share), graph("Mul", of_discriminant[0], share))
        of_global = graph("LogSoftmax", both, axis=-1)
    adjusted = graph("Mul", graph("Add", of_global, graph("Log", own)), 1 - settings.personal)
    of_own = graph("Softmax", graph("Add", graph("Mul", of_local, settings.personal), adjusted), axis=-1)
    p = graph("Exp", of_global)
    of_everybody = graph("Mul", p, everybody)
    by_everybody = graph.sum(of_everybody)
    of_everybody = graph("Div", of_everybody, by_everybody)
    evidence = graph("Pow", graph("Div", graph.sum(graph("Mul", p, own)), by_everybody), settings.trust)  # [n, 1]
    moving, rows = ("regimes", "recent", "mix"), (p, of_everybody, of_own, evidence)
    body = _write_step(predictor, own, everybody)
    *after, answer, of_sample = graph.many(
        5, "Scan", *(state[name] for name in moving), *rows, body=body, num_scan_inputs=len(rows)
    )
    graph.narrow(answer, "probabilities")
    graph.narrow(graph("Squeeze", graph("Sub", 1.0, of_sample), axes(1)), "weight")
    return {**state, **dict(zip(moving, after, strict=True))}


def _write_step(predictor: RegimeFilter, own: Value, everybody: Value) -> GraphProto:
    """One sample of `follow` and `combine` in methods/regime.py."""
    settings, step = predictor.regimes, Graph("step/")
    names = ("regimes", "recent", "mix", "p", "of_everybody", "of_own", "evidence")
    regimes, recent, mix, p, of_everybody, of_own, evidence = (f"step/{name}" for name in names)

    def blend(share: Value | float, a: Value, b: Value) -> Value:
        return step("Add", b, step("Mul", share, step("Sub", a, b)))

    def move(before: Value, likely: Value, start: np.ndarray) -> tuple[Value, Value]:
        """The probabilities after a sample, and the sum by which they were divided."""
        joint = step("Mul", before, likely)
        total = step.sum(joint)
        kept = step("Mul", step("Div", joint, total), 1 - settings.leave)
        return step("Add", kept, settings.leave * start), total

    shares = np.array(settings.own)
    likely = step("Add", step("Mul", evidence, shares), 1 - shares)
    regimes_after, total = move(regimes, likely, np.array(settings.start))
    share = step.sum(step("Mul", regimes, shares))
    of_sample = step("Min", step("Div", step("Mul", share, evidence), total), 1.0)
    answer, expected = blend(of_sample, of_own, of_everybody), blend(share, own, everybody)
    seen = blend(settings.regress, expected, mix)
    ratio = step("Div", seen, expected)
    explained = step("Div", step.sum(step("Mul", p, seen)), step.sum(step("Mul", p, expected)))
    gain = step("Mul", step("Pow", explained, settings.trust), settings.penalty if settings.recent else 0.0)
    likely = step("Concat", step.constant(np.ones(1)), gain, axis=0)
    recent_after, total = move(recent, likely, np.array([1 - settings.recent, settings.recent]))
    second = step("Gather", recent, np.array([1], np.int64))
    posterior = step("Div", step("Mul", second, gain), total)
    shifted = step("Mul", answer, ratio)
    shifted = step("Div", shifted, step.sum(shifted))
    made: Mapping[str, Value] = {
        "regimes_after": regimes_after,
        "recent_after": recent_after,
        "mix_after": blend(settings.forget, answer, mix),
        "answer": blend(posterior, shifted, answer),
        "own": of_sample,
    }
    for name, value in made.items():
        step.name(value, f"step/{name}")
    sizes: dict[str, int | str] = {"regimes": "r", "recent": 2, "evidence": 1, "own": 1}

    def describe(name: str) -> ValueInfoProto:
        return info(f"step/{name}", [sizes.get(name.removesuffix("_after"), "c")])

    return step.body("step", [describe(name) for name in names], [describe(name) for name in made])
