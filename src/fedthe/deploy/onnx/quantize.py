"""An exported client with int8 weights and activations in its convolutions and linear layers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

from ...errors import InputError
from ...foreign import explain, show_path
from ...runtime import FACTS, Facts, load, read_sealed
from .export import NETWORK, quiet, write_model

KINDS = ("Conv", "MatMul", "Gemm")


def quantize_onnx(path: Path, out: Path, samples: Iterable[np.ndarray]) -> None:
    """Write the client of `path` with its network in int8. The search, the filter and the probabilities stay in float.

    `samples` are like those of the client's stream, 100 or so of its training rows: the range of each activation is
    taken from them.
    """
    from onnxruntime import quantization

    path, out = Path(path), Path(out)
    model, facts = read_model(path)
    if facts.quantized:
        raise InputError(f"{show_path(path)} is quantized already; give the model in float.")
    checked = load(path)
    rows = [np.asarray(sample) for sample in samples]
    if not rows:
        raise InputError("quantization needs samples to see the range of activations; give some training rows.")
    for row in rows:
        checked.predict(row)  # refuses what does not fit
    nodes = [node.name for node in model.graph.node if node.name.startswith(NETWORK) and node.op_type in KINDS]
    with tempfile.TemporaryDirectory() as folder, quiet(), explain(f"onnxruntime cannot quantize {show_path(path)}"):
        made = Path(folder) / "quantized.onnx"
        quantization.quantize_static(
            model,
            made,
            _Reader(rows, facts),
            quant_format=quantization.QuantFormat.QDQ,
            op_types_to_quantize=list(KINDS),
            nodes_to_quantize=nodes,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
            per_channel=True,
            reduce_range=True,  # 7 bits: without VNNI, products of 8 bits saturate
        )
        quantized = onnx.load(made)
    write_model(out, quantized, replace(facts, quantized=True))


def read_model(path: Path) -> tuple[onnx.ModelProto, Facts]:
    content = read_sealed(path)
    with explain(f"{show_path(path)} cannot be read", "export it again"):
        model = onnx.load_model_from_string(content)
        facts = Facts.read(next(prop.value for prop in model.metadata_props if prop.key == FACTS))
    helper.set_model_props(model, {})
    return model, facts


class _Reader:
    """Feeds onnxruntime one sample at a time, each as the first of a stream: the network does not see the state."""

    def __init__(self, rows: list[np.ndarray], facts: Facts) -> None:
        state = {f"state.{name}": leaf for name, leaf in facts.state.items()}
        self._feeds: Iterator[dict[str, Any]] = iter([{"x": row[None]} | state for row in rows])

    def get_next(self) -> dict[str, Any] | None:
        return next(self._feeds, None)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._feeds
