"""One deployed client answers a stream of unlabeled samples, one by one or in batches."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import tree
from ..engine.evaluate import make_samples, to_host
from ..errors import InputError
from ..foreign import explain
from ..methods.predictor import Forward
from ..methods.samples import Answers, Samples, join
from ..methods.two_heads import heads
from ..text import clean
from ..tree import Tree
from ..types import scale
from .bundle import Bundle, read_bundle, refusing
from .monitor import Monitor, Reference, Verdict
from .picture import take_sample

CHUNK = 256  # samples of a batch that are answered at a time, so that memory stays bounded
UNANSWERED = "the model cannot answer this sample"
SMOOTH = 1 / 16  # the share of equal classes in a client's mix: a class that it never saw may come


@dataclass(frozen=True)
class Prediction:
    """The answer to one sample."""

    label: str
    index: int  # of the label among the classes
    probabilities: np.ndarray  # float64 [classes]
    weight: float | None  # of the global head; None for a method without two heads
    why: str  # in a sentence
    status: str  # of the stream: calm, drifting or collapsed; unwatched where nobody looks for drift
    heads: tuple[str, str] | None = None  # what the global and the personal head answer alone

    @property
    def probability(self) -> float:
        return float(self.probabilities[self.index])


class Seen(NamedTuple):
    """What the model without adaptation makes of samples."""

    logits: Tensor  # [n, classes]
    gap: Tensor | None  # [n]: how much nearer features are to the client's descriptor than to the global one, negated


class Observed(NamedTuple):
    """One sample, as the monitor and the caller see it."""

    adapted: np.ndarray  # float64 [classes]: the probabilities of the method's answer
    safe: np.ndarray  # the same without adaptation
    signals: dict[str, float]
    weight: float | None  # of the global head
    of_heads: tuple[int, int] | None  # the classes that the global and the personal head answer alone

    @property
    def watched(self) -> tuple[dict[str, float], int, int, float]:
        """What a monitor takes. An answer that one of the heads gives is no collapse, whichever head it is."""
        answer = int(self.adapted.argmax())
        agrees = self.of_heads is not None and answer in self.of_heads
        return self.signals, answer, answer if agrees else int(self.safe.argmax()), float(self.adapted[answer])


@dataclass(frozen=True)
class Stream:
    """Where a stream is. A new one replaces it after every answer, so a refused sample changes nothing."""

    position: int  # samples answered so far
    state: Tree  # of the predictor
    pending: Tensor  # [k, ...]: samples of a window that is not full yet
    monitor: Mapping[str, np.ndarray]


class Online:
    """Answers a stream of samples with the model of a bundle. Not for several threads: give each its own `stream()`."""

    def __init__(self, bundle: Bundle, stream: str = "online", *, monitor: bool = True) -> None:
        """stream: its name, which augmented views are drawn by. monitor: watch the stream, at a pass per sample."""
        if bundle.kind != "client":
            raise InputError(
                "this bundle is for clients to join with; `fedthe personalize` makes a client's own of it."
            )
        self.bundle, self.name, self._watches = bundle, stream, monitor
        self._method, self._mine = bundle.method, bundle.parts["model"]
        counts = np.asarray(bundle.about.get("counts") or np.ones(len(bundle.classes)), dtype=np.float64)
        self._mix = (1 - SMOOTH) * counts / max(counts.sum(), 1) + SMOOTH / len(counts)
        arrays = {name: leaf.numpy() for name, leaf in tree.flatten(bundle.parts["monitor"]).items()}
        self._reference = Reference.of(arrays) if arrays else None
        begun = tree.flatten(bundle.parts["state"])
        self._finite = [name for name, leaf in begun.items() if leaf.is_floating_point() and leaf.isfinite().all()]
        self._stream: Stream
        self.reset()

    @property
    def classes(self) -> tuple[str, ...]:
        return self.bundle.classes

    @property
    def position(self) -> int:
        """How many samples of the stream were answered."""
        return self._stream.position

    def predict(self, sample: Any) -> Prediction:
        """The answer to the next sample: a NumPy array, a picture of Pillow, the path of a file, or a tensor.

        A method that answers windows of samples together (`tent`, `lame` and others) answers from those of the window
        so far.
        """
        return self.predict_batch([sample])[0]

    def predict_batch(self, samples: Iterable[Any]) -> list[Prediction]:
        """The answers to the next samples, in order: the same as one by one, except for methods with a window, whose
        samples of a batch are answered together. If one is refused, none is answered."""
        x = [take_sample(sample, self.bundle.input) for sample in samples]
        before = self._stream
        try:
            return self._answer(torch.from_numpy(np.stack(x))) if x else []
        except BaseException:
            self._stream = before
            raise

    def stream(self, name: str = "online") -> Online:
        """Another stream from its beginning, over the same model."""
        other = copy(self)  # with what was made of the bundle: the monitor's reference takes milliseconds
        other.name = name
        other.reset()
        return other

    def reset(self) -> None:
        """Forget the stream."""
        self._stream = Stream(0, self._begin(), self.bundle.input.zeros(0), Monitor(self._reference).state())

    def state(self) -> bytes:
        """All that the stream's next answers depend on beside the bundle, for `restore`."""
        from safetensors.numpy import save

        now = self._stream
        arrays = {f"state.{name}": leaf.numpy() for name, leaf in tree.flatten(now.state).items()}
        arrays |= {f"monitor.{name}": array for name, array in now.monitor.items()}
        plain = {
            name: np.array(array, order="C") for name, array in (arrays | {"pending": now.pending.numpy()}).items()
        }
        about = {"bundle": self.bundle.id, "stream": self.name, "position": now.position}
        return save(plain, {"fedthe": json.dumps(about)})

    def restore(self, state: bytes) -> None:
        """Continue where `state` was taken, with the same bundle."""
        from safetensors.torch import load

        what = "this is not the state of a stream"
        with explain(what, "give what `state()` returned"):
            about, tensors = _read_metadata(state), load(bytes(state))
            found = {
                part: {name.partition(".")[2]: leaf.clone() for name, leaf in tensors.items() if name.startswith(part)}
                for part in ("state.", "monitor.")
            }
            position, pending = about["position"], tensors["pending"].clone()
        if about.get("bundle") != self.bundle.id:
            raise InputError("this is the state of a stream of another bundle.")
        expected = tree.flatten(self.bundle.parts["state"])
        fault = tree.find_fault(expected, found["state."])
        if fault or pending.shape[1:] != self.bundle.input.shape or not isinstance(position, int) or position < 0:
            raise InputError(f"{what} ({clean(fault or 'its samples do not fit')}); give what `state()` returned.")
        monitor = Monitor(self._reference)
        monitor.restore({name: leaf.numpy() for name, leaf in found["monitor."].items()})
        self.name = str(about.get("stream", self.name))
        in_order = tree.unflatten({name: found["state."][name] for name in expected})
        self._stream = Stream(position, in_order, pending, monitor.state())

    def observe(self, x: np.ndarray) -> list[Observed]:
        """What the monitor would see along the next samples [n, ...], which it does not."""
        rows = torch.from_numpy(x)
        answers, self._stream = self._advance(rows)
        seen = self._see(rows)
        return [self._observe(answers, seen, i) for i in range(len(rows))]

    def _answer(self, x: Tensor) -> list[Prediction]:
        """The answers to samples [n, ...]; where the monitor resets the predictor, those after it are from anew."""
        predictions: list[Prediction] = []
        while len(predictions) < len(x):
            rest = x[len(predictions) :]
            answers, after = self._advance(rest)
            predictions += self._follow(answers, self.see(rest), after)
        return predictions

    def _follow(self, answers: Answers, seen: Seen | None, after: Stream) -> list[Prediction]:
        """Tell the answers up to a reset, and move the stream on."""
        predictions, monitor = [], Monitor(self._reference)
        monitor.restore(self._stream.monitor)
        for i in range(len(answers.logits)):
            observed = self._observe(answers, seen, i)
            verdict = monitor.watch(*observed.watched) if self._watches else None
            predictions.append(self._tell(observed, verdict))
            if verdict is not None and verdict.reset:
                position = self._stream.position + len(predictions)
                after = Stream(position, self._begin(), after.pending[:0], after.monitor)
                break
        self._stream = replace(after, monitor=monitor.state())
        return predictions

    def finish(self, answers: Answers, states: Tree, seen: Seen | None, row: int) -> Prediction:
        """Move on by one sample, which was answered side by side with those of other streams."""
        mine = Answers(answers.logits[row], {name: column[row] for name, column in answers.info.items()})
        state = tree.take(states, row)
        self._check(mine, state)
        some = None if seen is None else Seen(seen.logits[row, None], None if seen.gap is None else seen.gap[row, None])
        after = replace(self._stream, position=self._stream.position + 1, state=state)
        return self._follow(mine, some, after)[0]

    def _begin(self) -> Tree:
        return tree.map_leaves(torch.clone, self.bundle.parts["state"])

    def _advance(self, x: Tensor) -> tuple[Answers, Stream]:
        """The answers to samples [n, ...], and where the stream is after them."""
        now, window = self._stream, self._method.predictor.window
        path = (self.bundle.seed, self.name, self.bundle.client or 0)
        rows = torch.cat([now.pending, x])
        first, state, pending, parts = now.position - len(now.pending), now.state, now.pending[:0], []
        with refusing(UNANSWERED), torch.no_grad():
            for chunk in rows.split(window if window and window > 1 else CHUNK):
                samples = make_samples(self._method, chunk, path, first)
                answers, after = self._method.answer(self._mine, tree.map_leaves(torch.clone, state), samples)
                parts.append(answers)
                if window and window > 1 and len(chunk) < window:
                    pending = chunk  # its samples are answered again with those to come
                else:
                    state = after
                first += len(chunk)
        answers = _take_last(parts, len(x))
        self._check(answers, state)
        return answers, Stream(now.position + len(x), state, pending, now.monitor)

    def _check(self, answers: Answers, state: Tree) -> None:
        """Refuse what is not finite. A leaf of the state may hold such numbers if it began with some."""
        flat = tree.flatten(state)
        if not (all(flat[name].isfinite().all() for name in self._finite) and answers.logits.isfinite().all()):
            raise InputError("the model's answer to this sample is not finite; the sample is left out of the stream.")

    @property
    def predictor_state(self) -> Tree:
        return self._stream.state

    def see(self, x: Tensor) -> Seen | None:
        """What the model without adaptation makes of samples [n, ...]; None if nobody asks, or it does not adapt."""
        return self._see(x) if self._watches else None

    def _see(self, x: Tensor) -> Seen | None:
        if isinstance(self._method.predictor, Forward):
            return None
        with refusing(UNANSWERED), torch.no_grad():
            logits, gaps = zip(*(self._see_some(scale(some)) for some in x.split(CHUNK)), strict=True)
        return Seen(torch.cat(logits), None if gaps[0] is None else torch.cat(gaps))

    def _see_some(self, x: Tensor) -> Seen:
        mine = self._mine
        if not {"personal", "descriptor", "own_descriptor"} <= mine.keys():
            return Seen(self._method.logits(mine, x), None)
        h, of_global, of_personal = heads(self._method.net, mine, x)
        own, of_all = (torch.linalg.vector_norm(h - mine[name], dim=-1) for name in ("own_descriptor", "descriptor"))
        return Seen((of_global + of_personal) / 2, own - of_all)

    def _observe(self, answers: Answers, seen: Seen | None, i: int) -> Observed:
        """What there is to say of sample i."""
        adapted = _softmax(to_host(answers.logits[i]))
        info = {name: column[i].item() for name, column in answers.info.items()}
        of_heads = (int(info["global"]), int(info["personal"])) if {"global", "personal"} <= info.keys() else None
        safe, weight, answer = adapted, info.get("e"), int(adapted.argmax())
        signals = {"entropy": _entropy(adapted), "surprise": float(-np.log(self._mix[answer]))}
        if weight is not None:
            signals["weight"] = float(weight)
        if seen is not None:
            safe = _softmax(to_host(seen.logits[i]))
            signals |= {} if seen.gap is None else {"gap": float(seen.gap[i])}
        return Observed(adapted, safe, signals, weight, of_heads)

    def _tell(self, observed: Observed, verdict: Verdict | None) -> Prediction:
        probabilities = observed.safe if verdict and verdict.fall_back else observed.adapted
        index, of_heads = int(probabilities.argmax()), observed.of_heads
        named = (self.classes[of_heads[0]], self.classes[of_heads[1]]) if of_heads else None
        why = _explain(observed.weight, named, verdict)
        return Prediction(self.classes[index], index, probabilities, observed.weight, why, self._judge(verdict), named)

    def _judge(self, verdict: Verdict | None) -> str:
        """The status of the stream. Without a reference, a monitor sees collapses alone, so it cannot say calm."""
        watched = self._reference is not None and self._reference.charts
        return "unwatched" if verdict is None or (verdict.status == "calm" and not watched) else verdict.status


def predict_together(streams: Sequence[Online], samples: Sequence[Any]) -> list[Prediction | InputError]:
    """The answer of each stream to its next sample, side by side where the method allows; the streams are different
    ones of one bundle. A sample that is refused leaves its stream as it is, and the others alone."""
    bundle = streams[0].bundle
    taken = [_try(take_sample, sample, bundle.input) for sample in samples]
    good = [i for i, each in enumerate(taken) if not isinstance(each, InputError)]
    if len(good) > 1 and bundle.method.predictor.window is None and not bundle.method.predictor.augments[0]:
        some = [streams[i] for i in good]
        done = _try(_answer_together, some, torch.from_numpy(np.stack([taken[i] for i in good])))
        if not isinstance(done, InputError):  # else one by one, to find out whose fault it is
            answered = {i: _try(streams[i].finish, *done, row) for row, i in enumerate(good)}
            return [answered.get(i, each) for i, each in enumerate(taken)]
    return [_try(streams[i].predict, each) if i in good else each for i, each in enumerate(taken)]


def load_bundle(path: Path | str, *, verify: Path | str | None = None, net: Any = None, monitor: bool = True) -> Online:
    """An online predictor from a folder that `fedthe export` wrote.

    Args:
        path: the folder.
        verify: the file of a public key that must have signed it.
        net: the network, if it is a wrapped module of your own, which a bundle does not hold.
        monitor: watch the stream for drift and collapse, at the cost of a forward pass per sample.
    """
    return Online(read_bundle(path, verify=verify, net=net), monitor=monitor)


def _answer_together(streams: Sequence[Online], x: Tensor) -> tuple[Answers, Tree, Seen | None]:
    """One sample of each stream: answers with logits [streams, 1, classes], the states after them [streams, ...], and
    what the model without adaptation sees, if the streams are watched."""
    bundle, mine = streams[0].bundle, streams[0].bundle.parts["model"]
    method, states = bundle.method, tree.stack([each.predictor_state for each in streams])

    def answer(state: Tree, pixels: Tensor) -> tuple[Tensor, dict[str, Tensor], Tree]:
        no_views = pixels.new_empty(1, 0, 0, *pixels.shape[1:])
        answers, after = method.answer(mine, state, Samples(pixels, lambda _: no_views))
        return answers.logits, answers.info, after

    with refusing(UNANSWERED), torch.no_grad():
        if tree.flatten(states):
            logits, info, states = torch.vmap(answer)(states, scale(x)[:, None])
        else:  # nothing is kept: one batch
            answers, _ = method.answer(mine, {}, make_samples(method, x, (bundle.seed, "together")))
            logits, info = answers.logits[:, None], {name: each[:, None] for name, each in answers.info.items()}
    return Answers(logits, info), states, streams[0].see(x)


def _try(call: Callable[..., Any], *given: Any) -> Any:
    """What it returns, or the InputError that it raises."""
    try:
        return call(*given)
    except InputError as error:
        return error


def _take_last(parts: list[Answers], count: int) -> Answers:
    whole = join(parts)
    return Answers(whole.logits[-count:], {name: column[-count:] for name, column in whole.info.items()})


def _read_metadata(content: bytes) -> dict[str, Any]:
    """The JSON header of a safetensors file begins with its length."""
    length = int.from_bytes(content[:8], "little")
    return dict(json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["fedthe"]))


def _softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum())


def _entropy(probabilities: np.ndarray) -> float:
    """In nats."""
    return float(-(probabilities * np.log(np.clip(probabilities, 1e-300, None))).sum())


def _explain(weight: float | None, of_heads: tuple[str, str] | None, verdict: Verdict | None) -> str:
    """Why this answer, in a sentence."""
    parts = []
    if weight is not None and of_heads is not None:
        of_global, of_personal = of_heads
        if of_global == of_personal:
            parts.append(f"both heads say {of_global}")
        else:
            who = f"the global head says {of_global} and has weight {weight:.2f}, the personal head {of_personal}"
            parts.append(who)
    if verdict is not None and verdict.status != "calm":
        parts.append(f"the stream is {verdict.status}: {verdict.why}")
    if verdict is not None and verdict.fall_back:
        parts.append("so the model answers without adaptation")
    return "; ".join(parts) or "one model answers"
