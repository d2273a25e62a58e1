"""Run a client that `fedthe export --format onnx` wrote, with onnxruntime and NumPy alone: no torch is imported.

    runtime = fedthe.runtime.load("client.onnx")
    answer = runtime.predict(image)  # uint8 [h, w, c], or whatever samples the client was trained on
    answer.label, answer.probabilities, answer.weight

A runtime is one stream: its state moves on with each sample, in order. `runtime.stream()` begins another one over the
same model. A stream belongs to one thread at a time; different streams may run in different threads.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .errors import Damaged, InputError
from .foreign import check_room, explain, open_file, say_error, show_path
from .text import quote

__all__ = ["Answer", "Facts", "Runtime", "load"]

FORMAT = 1
FACTS = "fedthe"  # the key of the facts, as JSON, among the model's metadata
BLOCK = 128  # samples of a long stream that go through the graph at a time, so that memory stays small

# The seal is the last entry of the model's metadata: field 14 of a ModelProto, {1: key, 2: value}. Protocol buffers
# may be appended to each other, so it needs no parser, and covers every byte before it.
_SEAL = b"\x72\x4f\x0a\x0bfedthe.seal\x12\x40"
_SEALED = len(_SEAL) + 64


@dataclass(frozen=True)
class Answer:
    label: str
    index: int  # of the class
    probabilities: np.ndarray  # float32 [classes]
    weight: float | None  # of the global head, from 0 to 1; None if the method does not weigh two heads


@dataclass(frozen=True)
class Facts:
    """What a model says of itself."""

    method: str
    classes: tuple[str, ...]
    shape: tuple[int, ...]  # of one sample
    dtype: np.dtype[Any]
    weighs: bool  # whether answers have a weight
    quantized: bool
    about: dict[str, Any]
    state: dict[str, np.ndarray]  # before the first sample of a stream

    def write(self) -> str:
        state = {
            name: {
                "dtype": leaf.dtype.str,
                "shape": list(leaf.shape),
                "data": base64.b64encode(leaf.tobytes()).decode(),
            }
            for name, leaf in self.state.items()
        }
        named = {name: getattr(self, name) for name in ("method", "classes", "shape", "weighs", "quantized", "about")}
        return json.dumps({"format": FORMAT, **named, "dtype": self.dtype.str, "state": state})

    @classmethod
    def read(cls, text: str) -> Facts:
        facts = json.loads(text)
        if facts["format"] != FORMAT:
            raise InputError(
                f"its format is {quote(facts['format'])}, but this version of fedthe reads format {FORMAT}; "
                "use the version that wrote it."
            )
        state = {
            name: np.frombuffer(base64.b64decode(leaf["data"]), leaf["dtype"]).reshape(leaf["shape"])
            for name, leaf in facts["state"].items()
        }
        return cls(
            method=facts["method"],
            classes=tuple(facts["classes"]),
            shape=tuple(facts["shape"]),
            dtype=np.dtype(facts["dtype"]),
            weighs=facts["weighs"],
            quantized=facts["quantized"],
            about=facts["about"],
            state=state,
        )


def load(path: Path | str, threads: int = 1) -> Runtime:
    """The first stream of an exported client. One thread is best for single samples."""
    if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
        raise InputError(f"threads must be a whole number of at least 1, not {quote(threads)}.")
    path = Path(path)
    model = read_sealed(path)
    try:
        import onnxruntime
    except ImportError:
        raise InputError("onnxruntime is not installed; install it with `pip install onnxruntime`.") from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3  # errors alone
    with explain(f"onnxruntime cannot run {show_path(path)}", "use a newer onnxruntime, or export it again"):
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    with explain(f"{show_path(path)} cannot be read", "export it again"):
        facts = Facts.read(session.get_modelmeta().custom_metadata_map[FACTS])
    return Runtime(session, facts)


class Runtime:
    """One stream of samples to an exported client."""

    def __init__(self, session: Any, facts: Facts) -> None:
        self.facts = facts
        self._session = session
        self._inputs = [f"state.{name}" for name in facts.state]
        self._outputs = ["probabilities", *["weight"] * facts.weighs, *(f"new.{name}" for name in facts.state)]
        self.reset()

    def predict(self, image: np.ndarray) -> Answer:
        """The answer to the next sample of the stream."""
        self._check(image, "a sample", 0)
        return self._answer(image[None])[0]

    def predict_batch(self, images: np.ndarray) -> list[Answer]:
        """The answers to the next samples [n, ...] of the stream, in order: the same as one by one."""
        self._check(images, "samples", 1)
        return self._answer(images)

    def predict_arrays(self, images: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """The same as arrays: probabilities [n, classes], and weights [n] of the global head if the method has any."""
        self._check(images, "samples", 1)
        return self._run_all(images)

    def state(self) -> dict[str, np.ndarray]:
        """Where the stream stands; `restore` continues from there."""
        return {name: leaf.copy() for name, leaf in zip(self.facts.state, self._state, strict=True)}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from what `state` returned, of this stream or of another one over the same model."""
        if not isinstance(state, Mapping) or state.keys() != self.facts.state.keys():
            wanted = ", ".join(self.facts.state) or "nothing in it"
            raise InputError(f"a state of this model is a dict with {wanted}; give what .state() returned.")
        for name, first in self.facts.state.items():
            leaf = state[name]
            if not isinstance(leaf, np.ndarray) or leaf.shape != first.shape or leaf.dtype != first.dtype:
                raise InputError(
                    f"the state's {name} must be {first.dtype} {list(first.shape)}, but it is {_describe(leaf)}."
                )
            begins = np.isnan(leaf).all() and np.isnan(first).all()  # no sample seen yet
            if not begins and not np.isfinite(leaf).all():
                raise InputError(f"the state's {name} is not finite; give what .state() returned.")
        self._state = [np.array(state[name], order="C") for name in self.facts.state]

    def reset(self) -> None:
        """Begin the stream anew."""
        self._state = list(self.facts.state.values())

    def stream(self) -> Runtime:
        """Another stream, at its beginning, over the same model."""
        return Runtime(self._session, self.facts)

    def _answer(self, x: np.ndarray) -> list[Answer]:
        probabilities, weights = self._run_all(x)
        each = [None] * len(x) if weights is None else weights.tolist()
        best = probabilities.argmax(-1).tolist()
        names = self.facts.classes
        return [Answer(names[i], i, row, w) for i, row, w in zip(best, probabilities, each, strict=True)]

    def _run_all(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        state, parts, columns = self._state, [], 1 + self.facts.weighs
        for first in range(0, len(x), BLOCK):
            made = self._run(x[first : first + BLOCK] if len(x) > BLOCK else x, state)
            parts.append(made[:columns])
            state = made[columns:]
        answers = parts[0] if len(parts) == 1 else [np.concatenate(part) for part in zip(*parts, strict=True)]
        if not math.isfinite(answers[0].sum()):  # a weight that is not finite makes no finite probabilities
            raise InputError("an answer is not finite; look for numbers in the sample that are far too large.")
        self._state = state  # last of all: a refused sample leaves no trace
        return answers[0], answers[1] if self.facts.weighs else None

    def _run(self, x: np.ndarray, state: list[np.ndarray]) -> list[np.ndarray]:
        feeds = dict(zip(self._inputs, state, strict=True))
        feeds["x"] = x
        try:
            made: list[np.ndarray] = self._session.run(self._outputs, feeds)
        except Exception as error:  # such as a token that the model's vocabulary has not
            raise InputError(f"the model cannot answer this sample ({say_error(error)}).") from None
        return made

    def _check(self, x: np.ndarray, what: str, beside: int) -> None:
        facts = self.facts
        if not isinstance(x, np.ndarray) or x.dtype != facts.dtype or x.shape[beside:] != facts.shape:
            shape = ", ".join(["n"] * beside + [str(size) for size in facts.shape])
            raise InputError(f"{what} must be a NumPy array [{shape}] of {facts.dtype}, but got {_describe(x)}.")
        if beside and not len(x):
            raise InputError("there is no sample to answer; give at least one.")
        if x.dtype.kind == "f" and not np.isfinite(x).all():
            raise InputError(f"{what} must be finite, but a number is NaN or infinite.")


def seal(model: bytes) -> bytes:
    """A serialized model with its seal. It reveals damage; it does not say who made the model."""
    return model + _SEAL + hashlib.sha256(model).hexdigest().encode()


def read_sealed(path: Path) -> bytes:
    """The bytes of a file that `seal` made, with the seal."""
    try:
        with open_file(path) as file:
            size = file.seek(0, 2)
            check_room(show_path(path), size, "use a machine with more memory")
            file.seek(0)
            content = file.read()
    except FileNotFoundError:
        raise InputError(f"{show_path(path)} does not exist.") from None
    except OSError as error:
        raise InputError(f"{show_path(path)} cannot be read ({error.strerror}).") from None
    model, end = content[:-_SEALED], content[-_SEALED:]
    if not end.startswith(_SEAL):
        raise Damaged(f"{show_path(path)} does not end with a seal: it is cut short, or no model that fedthe exported.")
    if end[len(_SEAL) :] != hashlib.sha256(model).hexdigest().encode():
        raise Damaged(f"{show_path(path)} was changed after it was written; export it again.")
    return content


def _describe(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else quote(type(value).__name__)
