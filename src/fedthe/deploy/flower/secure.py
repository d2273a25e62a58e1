"""Secure aggregation, by Flower's SecAgg+: the server learns the weighted mean of what clients send, and no upload.

Clients send how the shared leaves changed, in the order of their names: SecAgg+ knows lists of arrays, and rounds each
number to one of 2**22 in a range, which is finer for a change than for a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.app.typing import ConfigRecordValues
from flwr.client.mod import secaggplus_mod
from flwr.common import FitIns, FitRes, Parameters, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS
from flwr.compat.common.recorddict_compat import parameters_to_arrayrecord
from flwr.server import LegacyContext
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key
from torch import Tensor

from ...engine.server import LARGEST
from ...text import flatten
from . import messages
from .member import Member, Model
from .rounds import name_leaves, start, take_leaves

MOST_SHARES = 31  # of a client's keys; with more clients, each shares with its neighbours only
THRESHOLD = 2 / 3  # of the shares, which restore a key
MOST_ROWS = 1e12  # that are shown of a client
MOST_CLIENTS = 1000  # of a round: sums of 2**22 steps must stay below 2**32
Call = Callable[[Message, Context], Message]


class Masked(NamedTuple):
    """What the server learns in a round."""

    leaves: dict[str, Tensor]  # the weighted mean
    rows: dict[int, float]  # by node that is in it
    losses: dict[int, float]
    seconds: list[float]
    bytes: dict[str, int]  # of all stages, down to each client and up from it
    faults: dict[int, str]  # by node that failed: why


# ---- a client


def mod(message: Message, context: Context, call_next: Call) -> Message:
    """Flower's mod where the run asks for it. A client of such a run answers no train message that goes around it."""
    if not context.run_config.get("secure-aggregation"):
        return call_next(message, context)
    if not is_masked(message):
        return messages.refuse(message, "in a run with secure aggregation, nothing is sent without masks.")
    return secaggplus_mod(message, context, call_next)


def is_masked(message: Message) -> bool:
    """Whether a reply to it is masked before it leaves the client."""
    return RECORD_KEY_CONFIGS in message.content.config_records


def read_model(message: Message, member: Member) -> Model:
    arrays = message.content.array_records["fitins.parameters"].to_numpy_ndarrays()
    number = message.content.config_records["fitins.config"]["round"]
    assert isinstance(number, int)
    first = start(member.terms)
    leaves = _name_arrays(arrays, name_leaves(first.server.shared, first.averages))
    return take_leaves({name: leaf.to(member.device) for name, leaf in leaves.items()}, number)


def reply(
    message: Message, numbers: Mapping[str, float | int], leaves: Mapping[str, Tensor], before: Mapping[str, Tensor]
) -> Message:
    """The change of leaves, as the mod expects it. The numbers travel as they are."""
    changes = [np.atleast_1d((leaves[name] - before[name]).cpu().numpy()) for name in sorted(before)]
    rest: dict[str, ConfigRecordValues] = {name: number for name, number in numbers.items() if name != "rows"}
    records: dict[str, ArrayRecord | MetricRecord | ConfigRecord] = {
        "fitres.parameters": ArrayRecord(changes),
        "fitres.num_examples": MetricRecord({"num_examples": int(numbers["rows"])}),
        "fitres.metrics": ConfigRecord(rest),
        "fitres.status": ConfigRecord({"code": 0, "message": ""}),
    }
    return Message(RecordDict(records), reply_to=message)


# ---- the server


def collect(
    mail: messages.Mail,
    context: Context,
    nodes: Sequence[int],
    sent: Mapping[str, Tensor],
    round: int,
    rows: float,
    limit: float,
) -> Masked | str:
    """A round of SecAgg+ with these nodes; or why it came to nothing. rows: what weights are relative to."""
    if not 2 <= len(nodes) <= MOST_CLIENTS:
        return f"{len(nodes)} clients are there, and secure aggregation takes 2 to {MOST_CLIENTS}"
    caught = _Catch(nodes, round)
    legacy = LegacyContext(
        context=Context(context.run_id, context.node_id, {}, RecordDict(), {}),
        strategy=caught,  # type: ignore[arg-type]  # it has what the workflow calls
        client_manager=SimpleNamespace(num_available=lambda: len(nodes)),  # type: ignore[arg-type]
    )
    legacy.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({Key.CURRENT_ROUND: round + 1})
    arrays = [np.atleast_1d(sent[name].cpu().numpy()) for name in sorted(sent)]
    legacy.state.array_records[MAIN_PARAMS_RECORD] = parameters_to_arrayrecord(ndarrays_to_parameters(arrays), True)
    shares = 1.0 if len(nodes) <= MOST_SHARES else MOST_SHARES
    workflow = SecAggPlusWorkflow(shares, THRESHOLD, max_weight=float(rows), timeout=limit)
    counted = _Exchange(mail)
    try:
        workflow(counted, legacy)  # type: ignore[arg-type]  # a grid that polls as we do
        if caught.mean is None:
            return "too few clients went through with secure aggregation"
        changes = _name_arrays(parameters_to_ndarrays(caught.mean), sent)
    except Exception as error:  # whatever it makes of what clients sent
        return f"secure aggregation failed: {flatten(error, 300)}"
    leaves = {name: (leaf.double() + changes[name].double().cpu()).to(leaf.dtype) for name, leaf in sent.items()}
    told = {node: result.metrics for node, result in caught.results.items()}
    return Masked(
        leaves,
        {node: _bound(result.num_examples, MOST_ROWS) for node, result in caught.results.items()},
        {node: _bound(metrics.get("loss"), LARGEST) for node, metrics in told.items()},
        [messages.as_number(metrics.get("seconds")) for metrics in told.values()],
        {way: count // len(nodes) for way, count in counted.bytes.items()},
        counted.faults,
    )


def _bound(value: object, most: float) -> float:
    """A number that a client claims; 0 for one that cannot be."""
    number = messages.as_number(value)
    return number if abs(number) <= most else 0.0


def _name_arrays(arrays: Sequence[np.ndarray], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    named = zip(sorted(like), arrays, strict=True)
    return {name: torch.from_numpy(np.array(array)).reshape(like[name].shape) for name, array in named}


class _Catch:
    """In place of a strategy: it hands the workflow its nodes, and catches what comes of it."""

    def __init__(self, nodes: Sequence[int], round: int) -> None:
        self.nodes, self.round = nodes, round
        self.mean: Parameters | None = None
        self.results: dict[int, FitRes] = {}

    def configure_fit(self, server_round: int, parameters: Parameters, client_manager: object) -> list[Any]:
        return [(SimpleNamespace(node_id=node), FitIns(parameters, {"round": self.round})) for node in self.nodes]

    def aggregate_fit(self, server_round: int, results: list[Any], failures: object) -> tuple[Parameters | None, Any]:
        self.results = {proxy.node_id: result for proxy, result in results}
        self.mean = results[0][1].parameters if results else None
        return self.mean, {}


class _Exchange:
    """A grid that looks for replies as often as we do, and counts bytes."""

    def __init__(self, mail: messages.Mail) -> None:
        self.mail, self.bytes = mail, {"down": 0, "up": 0}
        self.faults: dict[int, str] = {}

    def send_and_receive(self, asked: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        asked = list(asked)
        self.bytes["down"] += sum(messages.count_content(each) for each in asked)
        replies = self.mail.exchange(asked, timeout or float("inf"))
        for node, reply in replies.items():
            reply.metadata.__dict__["_src_node_id"] = node  # whatever the reply says of itself
            if reply.has_error():
                self.faults[node] = str(messages.read_fault(reply))
            else:
                self.bytes["up"] += messages.count_content(reply)
        return list(replies.values())
