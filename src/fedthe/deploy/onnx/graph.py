"""Write an ONNX graph by hand, one operator a line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

Value: TypeAlias = str  # the name of a tensor in the graph
Given: TypeAlias = str | float | np.ndarray  # a tensor of the graph, or a constant: numbers are float64


@dataclass
class Graph:
    """Nodes and constants, in order. `graph("Add", a, 1.0)` adds a node and returns the name of what it makes."""

    prefix: str = ""
    nodes: list[NodeProto] = field(default_factory=list)
    constants: list[TensorProto] = field(default_factory=list)
    _names: dict[Any, str] = field(default_factory=dict)

    def __call__(self, operator: str, *inputs: Given, **attributes: Any) -> Value:
        return self.many(1, operator, *inputs, **attributes)[0]

    def many(self, count: int, operator: str, *inputs: Given, **attributes: Any) -> list[Value]:
        """A node with several outputs."""
        name = f"{self.prefix}{operator}.{len(self.nodes)}"
        outputs = [name] if count == 1 else [f"{name}.{i}" for i in range(count)]
        taken = [self.constant(each) if not isinstance(each, str) else each for each in inputs]
        self.nodes.append(helper.make_node(operator, taken, outputs, name, **attributes))
        return outputs

    def constant(self, value: float | Sequence[int] | np.ndarray) -> Value:
        array = value if isinstance(value, np.ndarray) else np.asarray(value, np.float64)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._names:
            self._names[key] = f"{self.prefix}constant.{len(self._names)}"
            self.constants.append(numpy_helper.from_array(array.copy(), self._names[key]))
        return self._names[key]

    def sum(self, x: Value, axis: int = -1, keep: bool = True) -> Value:
        return self("ReduceSum", x, axes(axis), keepdims=int(keep))

    def turn(self, x: Value) -> Value:
        """The last two of three axes swapped. onnxruntime makes it part of a product that follows."""
        return self("Transpose", x, perm=[0, 2, 1])

    def wide(self, x: Value) -> Value:
        return self("Cast", x, to=TensorProto.DOUBLE)

    def last(self, operator: str, x: Value, name: str, **attributes: Any) -> None:
        """A node whose output leaves the graph under this name."""
        self.nodes.append(helper.make_node(operator, [x], [name], name, **attributes))

    def narrow(self, x: Value, name: str) -> None:
        """Let a tensor leave the graph as float32."""
        self.last("Cast", x, name, to=TensorProto.FLOAT)

    def name(self, x: Value, name: str) -> None:
        """Let a tensor leave the graph under this name."""
        self.last("Identity", x, name)

    def body(self, name: str, inputs: list[ValueInfoProto], outputs: list[ValueInfoProto]) -> GraphProto:
        """All of it as the body of a Scan."""
        return helper.make_graph(self.nodes, name, inputs, outputs, self.constants)


def axes(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def info(name: str, shape: Sequence[int | str], kind: int = TensorProto.DOUBLE) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, list(shape))
