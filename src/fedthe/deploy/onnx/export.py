"""Write one deployed client as one ONNX file: network, predictor, the state of a stream, and all that a runtime needs.

torch exports the network. What a predictor does with the network's answers is written out by hand in `tails`: the
recursion over a stream of any length is a Scan, and a single sample takes as long as there are operators.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper
from torch import Tensor, nn

from ... import tree
from ...errors import InputError
from ...foreign import explain
from ...methods.base import Method
from ...methods.discriminant import discriminate
from ...methods.fedthe import HeadEnsemble
from ...methods.regime_filter import RegimeFilter
from ...methods.two_heads import heads
from ...methods.views import Views
from ...nets.net import Net, PictureNet
from ...runtime import FACTS, Facts, seal
from ...store import write_bytes
from ...text import quote
from ...tree import Tree
from ...types import scale
from .graph import Graph, info
from .tails import add_tail, check_predictor, is_weighing

NETWORK = "network/"  # what the nodes of the network are called
TRACED = 3  # samples that the exporter sees; any number but 0 and 1 stands for every number


def export_onnx(
    method: Method,
    mine: Tree,
    state: Tree,
    path: Path,
    *,
    classes: Sequence[str],
    sample: np.ndarray,
    name: str = "",
    about: Mapping[str, Any] = {},
) -> None:
    """Write a client that deploys `mine` and begins streams with `state`, both on the CPU.

    The graph takes samples x [n, ...] as they are in a dataset, like `sample`, in stream order, and the state's leaves
    as state.NAME; it gives probabilities [n, classes], the weight [n] of the global head if the method weighs two, and
    the next state as new.NAME. `name` is what the method is called, and `about` whatever else should be known of the
    client, as JSON values: both are kept in the file. `fedthe.runtime` runs it.
    """
    check_predictor(method)
    if len(classes) != method.net.classes:
        raise InputError(f"the network has {method.net.classes} classes, but {len(classes)} names were given.")
    begin = {name: leaf.detach().contiguous().numpy() for name, leaf in tree.flatten(state).items()}
    facts = Facts(
        method=name or type(method.predictor).__name__,
        classes=tuple(map(str, classes)),
        shape=sample.shape,
        dtype=sample.dtype,
        weighs=is_weighing(method),
        quantized=False,
        about=dict(about),
        state=begin,
    )
    with explain(f"about must be values that JSON has, not {quote(dict(about))}"):
        facts.write()
    network = export_network(Network(method, mine), sample)
    write_model(path, _assemble(network, method, mine, facts), facts)


class Network(nn.Module):
    """The part of a method's answers in which samples do not depend on each other."""

    def __init__(self, method: Method, mine: Tree) -> None:
        super().__init__()
        self.method, self._names = method, list(tree.flatten(mine))
        for i, leaf in enumerate(tree.flatten(mine).values()):
            self.register_buffer(f"leaf{i}", leaf.detach().clone())

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        mine = tree.unflatten({name: self.get_buffer(f"leaf{i}") for i, name in enumerate(self._names)})
        method, x = self.method, scale(x)
        predictor = method.predictor
        if isinstance(predictor, HeadEnsemble):
            h, both = _see(method.net, mine, x)
            return h, both
        if not isinstance(predictor, RegimeFilter):
            return (method.personal.logits(method.net, mine, x),)

        def see(x: Tensor) -> tuple[Tensor, ...]:
            h, both = _see(method.net, mine, x)
            if not predictor.discriminant:
                return (both,)
            return (torch.cat([both, discriminate(mine["discriminant"], h).to(h.dtype)[:, None]], 1),)

        return predictor.then.average(see, x) if isinstance(predictor.then, Views) else see(x)


def _see(net: Net, mine: Tree, x: Tensor) -> tuple[Tensor, Tensor]:
    """The features [n, d], and the logits [n, 2, classes] of the global and of the personal head."""
    one_layer = type(net).head in (Net.head, PictureNet.head) and mine["head"].keys() <= {"out", "bias"}
    if not one_layer:
        h, *both = heads(net, mine, x)
        return h, torch.stack(both, 1)
    h = net.features(mine["body"], x)
    joined = tree.map_leaves(lambda *leaves: torch.cat(leaves), mine["head"], mine["personal"])
    return h, net.head(joined, h).unflatten(1, (2, net.classes))


def export_network(network: Network, sample: np.ndarray) -> onnx.ModelProto:
    x, name = torch.from_numpy(np.stack([sample] * TRACED)), network.method.net.name
    with torch.no_grad(), explain(f"{name} cannot take a sample {list(sample.shape)} of {sample.dtype}"):
        network(x)  # also makes the copy that a wrapped module needs, outside of tracing
    with torch.no_grad(), quiet(), explain(f"torch cannot export {name} to ONNX", "deploy it with torch"):
        program = torch.onnx.export(
            network.eval(), (x,), dynamo=True, dynamic_shapes=({0: torch.export.Dim("n")},), input_names=["x"],
            verbose=False,
        )  # fmt: skip
        assert program is not None
        return program.model_proto


def _assemble(network: onnx.ModelProto, method: Method, mine: Tree, facts: Facts) -> onnx.ModelProto:
    """The network with its predictor."""
    seen = _rename(network.graph)
    graph = Graph()
    leaves = {name: info(f"state.{name}", leaf.shape, _kind(leaf)) for name, leaf in facts.state.items()}
    after = add_tail(graph, method, mine, {name: leaf.name for name, leaf in leaves.items()}, seen)
    for name, value in after.items():
        graph.name(value, f"new.{name}")
    outputs = [info("probabilities", ["n", method.net.classes], onnx.TensorProto.FLOAT)]
    outputs += [info("weight", ["n"], onnx.TensorProto.FLOAT)] * facts.weighs
    outputs += [info(f"new.{name}", leaf.shape, _kind(leaf)) for name, leaf in facts.state.items()]
    whole = helper.make_graph(
        [*network.graph.node, *graph.nodes],
        "fedthe",
        [*network.graph.input, *leaves.values()],
        outputs,
        [*network.graph.initializer, *graph.constants],
    )
    return helper.make_model(
        whole, opset_imports=network.opset_import, ir_version=network.ir_version, producer_name="fedthe"
    )


def _rename(graph: onnx.GraphProto) -> list[str]:
    """Mark all that is the network's by its name, but the input; the names of the outputs."""
    for node in graph.node:
        node.name = NETWORK + node.name
        for names in (node.input, node.output):
            names[:] = [_mark(name) for name in names]
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _rename(attribute.g)
    for initializer in graph.initializer:
        initializer.name = _mark(initializer.name)
    return [_mark(output.name) for output in graph.output]


def _mark(name: str) -> str:
    return name if name in ("", "x") else NETWORK + name


def write_model(path: Path, model: onnx.ModelProto, facts: Facts) -> None:
    del model.metadata_props[:]
    helper.set_model_props(model, {FACTS: facts.write()})
    with explain("the graph is not valid ONNX"):
        onnx.checker.check_model(model)
    write_bytes(path, seal(model.SerializeToString()))


def _kind(leaf: np.ndarray) -> int:
    return int(helper.np_dtype_to_tensor_dtype(leaf.dtype))


@contextmanager
def quiet() -> Iterator[None]:
    """Without what the exporter and the quantizer say: functions of their own that are deprecated, packages that they
    do not need, advice that is followed."""
    exporter, root = logging.getLogger("torch.onnx"), logging.getLogger()
    level = exporter.level
    exporter.setLevel(logging.ERROR)
    root.addFilter(_is_worth_saying)
    try:
        with warnings.catch_warnings():
            for kind in (DeprecationWarning, FutureWarning, UserWarning):
                warnings.simplefilter("ignore", kind)
            yield
    finally:
        exporter.setLevel(level)
        root.removeFilter(_is_worth_saying)


def _is_worth_saying(record: logging.LogRecord) -> bool:
    return "pre-processing before quantization" not in record.getMessage()
