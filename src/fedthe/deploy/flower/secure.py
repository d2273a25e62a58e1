"""Secure aggregation, by Flower's SecAgg+: the server learns the weighted mean of what clients send, and no upload.

Masks come from a generator of our own (masks.py), and what clients answer is checked first (secure_checks.py).

Clients send how the shared leaves changed, in the order of their names: SecAgg+ knows lists of arrays, and rounds each
number to one of 2**22 in a range, which is finer for a change than for a weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.app.typing import ConfigRecordValues
from flwr.client.mod import secaggplus_mod
from flwr.common import FitIns, FitRes, Parameters, Scalar, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.common.constant import ErrorCode
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS
from flwr.compat.common.recorddict_compat import parameters_to_arrayrecord
from flwr.server import LegacyContext
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key
from flwr.server.workflow.secure_aggregation.secaggplus_workflow import WorkflowState
from flwr.serverapp import Grid
from torch import Tensor

from ... import foreign, store
from ...engine.server import LARGEST
from ...foreign import show_path
from ...text import count, flatten
from . import masks, messages
from .member import Member, Model
from .rounds import name_leaves, say_rows, start, take_leaves
from .secure_checks import Checks

MOST_SHARES = 31  # of a client's keys; with more clients, each shares with its neighbours only
MOST_CLIENTS = 1000  # of a round: sums of 2**22 steps must stay below 2**32
Call = Callable[[Message, Context], Message]
masks.install()


class Unmasked:
    """The last round that clients were asked to unmask, in a file: a server that starts again must know it, too.

    A round must not be unmasked twice: the difference of two sums can be the upload of a client. What clients were
    asked for counts: their answers can arrive after the server has given up.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> int:
        if not self.path.exists():
            return 0
        with foreign.explain(f"{show_path(self.path)} is damaged"):
            return int(foreign.read_file(self.path, 20))

    def write(self, round: int) -> None:
        store.write_bytes(self.path, str(round).encode())
        store.sync_folder(self.path.parent)


class Asked(NamedTuple):
    """What the server sends in a round."""

    leaves: Mapping[str, Tensor]
    round: int
    origin: str
    states: Mapping[int, int]  # by node: the last round that its client was part of
    most: int  # the rows that a client may count with
    fewest: int  # clients whose sum is unmasked
    unmasked: Unmasked


class Masked(NamedTuple):
    """What the server learns in a round."""

    mean: dict[str, Tensor] | None  # weighted; None: nothing was unmasked
    why: str  # there is no mean
    losses: dict[int, float]  # by node that is in the mean
    seconds: list[float]
    bytes: dict[str, int]  # of all stages, down to each client and up from it
    faults: dict[int, str]  # by node that failed: why
    gone: set[int]  # nodes that gave no answer
    wrong: set[int]  # nodes that claim rows that they cannot have


# ---- a client


def mod(message: Message, context: Context, call_next: Call) -> Message:
    """Flower's mod where the run asks for it. A client of such a run answers no train message that goes around it."""
    if not context.run_config.get("secure-aggregation"):
        return call_next(message, context)
    if not is_masked(message) or message.metadata.message_type != MessageType.TRAIN:  # Flower's mod ignores others
        return messages.refuse(message, "in a run with secure aggregation, nothing is sent without masks.")
    return secaggplus_mod(message, context, call_next)


def is_masked(message: Message) -> bool:
    """Whether a reply to it is masked before it leaves the client."""
    return RECORD_KEY_CONFIGS in message.content.config_records


def read_model(message: Message, member: Member) -> Model:
    arrays = message.content.array_records["fitins.parameters"].to_numpy_ndarrays()
    first = start(member.terms)
    leaves = _name_arrays(arrays, name_leaves(first.server.shared, first.averages))
    placed = {name: leaf.to(member.device) for name, leaf in leaves.items()}
    origin = messages.check_origin(message.content.config_records["fitins.config"]["origin"])
    return take_leaves(placed, _read_config(message, "round"), _read_config(message, "state"), origin)


def _read_config(message: Message, name: str) -> int:
    value = message.content.config_records["fitins.config"][name]
    assert isinstance(value, int)
    return value


def reply(
    message: Message, numbers: Mapping[str, float | int], leaves: Mapping[str, Tensor], before: Mapping[str, Tensor]
) -> Message:
    """The change of leaves, as the mod expects it. The numbers travel as they are.

    The mod multiplies the change by rows / most, and cuts what is too large then: more rows would spoil the sum.
    """
    weight = min(int(numbers["rows"]), _read_config(message, "most"))
    changes = [np.atleast_1d((leaves[name] - before[name]).cpu().numpy()) for name in sorted(before)]
    rest: dict[str, ConfigRecordValues] = {name: number for name, number in numbers.items() if name != "rows"}
    records: dict[str, ArrayRecord | MetricRecord | ConfigRecord] = {
        "fitres.parameters": ArrayRecord(changes),
        "fitres.num_examples": MetricRecord({"num_examples": weight}),
        "fitres.metrics": ConfigRecord(rest),
        "fitres.status": ConfigRecord({"code": 0, "message": ""}),
    }
    return Message(RecordDict(records), reply_to=message)


# ---- the server


def collect(mail: messages.Mail, context: Context, asked: Asked, limit: float) -> Masked:
    """A round of SecAgg+ with the nodes that are asked."""
    counted, caught, why = _Exchange(mail, limit, Checks(asked.leaves)), _Catch(asked), ""
    mean = None
    workflow = _Workflow(asked, limit)
    if not 2 <= len(asked.states) <= MOST_CLIENTS:
        why = f"{count(len(asked.states), 'client')} can be reached; secure aggregation takes 2 to {MOST_CLIENTS}"
    else:
        try:
            _run(workflow, counted, caught, context)
            mean = None if caught.changes is None else _add(asked.leaves, caught.changes)
        except Exception as error:  # whatever it makes of what clients sent
            why = f"secure aggregation failed: {flatten(error, 300)}"
    told = {node: result.metrics for node, result in caught.results.items()}
    return Masked(
        mean,
        why or "too few clients completed secure aggregation",
        {node: _bound_loss(metrics.get("loss")) for node, metrics in told.items()},
        [messages.as_number(metrics.get("seconds")) for metrics in told.values()],
        {way: total // max(1, len(asked.states)) for way, total in counted.bytes.items()},
        counted.faults | {node: say_rows(rows, asked.most) for node, rows in workflow.wrong.items()},
        counted.gone,
        set(workflow.wrong),
    )


def _run(workflow: _Workflow, counted: _Exchange, caught: _Catch, context: Context) -> None:
    asked = workflow.asked
    legacy = LegacyContext(
        context=Context(context.run_id, context.node_id, {}, RecordDict(), {}),
        strategy=caught,  # type: ignore[arg-type]  # it has what the workflow calls
        client_manager=SimpleNamespace(num_available=lambda: len(asked.states)),  # type: ignore[arg-type]
    )
    legacy.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({Key.CURRENT_ROUND: asked.round + 1})
    arrays = [np.atleast_1d(asked.leaves[name].cpu().numpy()) for name in sorted(asked.leaves)]
    legacy.state.array_records[MAIN_PARAMS_RECORD] = parameters_to_arrayrecord(ndarrays_to_parameters(arrays), True)
    workflow(counted, legacy)  # type: ignore[arg-type]  # a grid that polls as we do


def _add(before: Mapping[str, Tensor], changes: Parameters) -> dict[str, Tensor]:
    named = _name_arrays(parameters_to_ndarrays(changes), before)
    return {name: (leaf.double().cpu() + named[name].double()).to(leaf.dtype) for name, leaf in before.items()}


def _bound_loss(value: object) -> float:
    """What a client claims; 0 for what cannot be."""
    number = messages.as_number(value)
    return number if abs(number) <= LARGEST else 0.0


def _name_arrays(arrays: Sequence[np.ndarray], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    named = zip(sorted(like), arrays, strict=True)
    return {name: torch.from_numpy(np.array(array)).reshape(like[name].shape) for name, array in named}


class _Catch:
    """In place of a strategy: it hands the workflow its nodes, and catches what comes of it."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.changes: Parameters | None = None
        self.results: dict[int, FitRes] = {}

    def configure_fit(self, server_round: int, parameters: Parameters, client_manager: object) -> list[Any]:
        asked = self.asked
        how: dict[str, Scalar] = {"round": asked.round, "origin": asked.origin, "most": asked.most}
        return [
            (SimpleNamespace(node_id=node), FitIns(parameters, {**how, "state": state}))
            for node, state in asked.states.items()
        ]

    def aggregate_fit(self, server_round: int, results: list[Any], failures: object) -> tuple[Parameters | None, Any]:
        self.results = {proxy.node_id: result for proxy, result in results}
        self.changes = results[0][1].parameters if results else None
        return self.changes, {}


class _Workflow(SecAggPlusWorkflow):
    """It unmasks a sum only if the round can be finished with it, and notes that before it asks clients for shares."""

    def __init__(self, asked: Asked, limit: float) -> None:
        clients = len(asked.states)
        shares = 1.0 if clients <= MOST_SHARES else MOST_SHARES  # 1.0: of all clients
        threshold = math.ceil(2 * min(clients, MOST_SHARES) / 3)  # at least two thirds of the shares restore a key
        super().__init__(shares, threshold, max_weight=float(asked.most), timeout=limit)
        self.asked = asked
        self.wrong: dict[int, int] = {}  # by node: rows that it claims, if that cannot be

    def share_keys_stage(self, grid: Grid, context: LegacyContext, state: WorkflowState) -> bool:
        """A client that is lost by now sends no masks, and none are made for it: the round goes on without it.

        Flower would ask the others for shares of its key, which nobody has.
        """
        super().share_keys_stage(grid, context, state)
        left = set(state.active_node_ids)
        state.sampled_node_ids = set(left)
        state.nid_to_neighbours = {node: near & left for node, near in state.nid_to_neighbours.items() if node in left}
        return len(left) >= 2 and self._check_threshold(state)

    def unmask_stage(self, grid: Grid, context: LegacyContext, state: WorkflowState) -> bool:
        claims = {proxy.node_id: result.num_examples for proxy, result in state.legacy_results}
        self.wrong = {node: rows for node, rows in claims.items() if not 1 <= rows <= self.asked.most}
        if self.wrong or len(claims) < self.asked.fewest:
            return False
        self.asked.unmasked.write(self.asked.round + 1)
        return super().unmask_stage(grid, context, state)


class _Exchange:
    """A grid that looks for replies as often as we do, checks them, counts bytes, and notes who fails."""

    def __init__(self, mail: messages.Mail, limit: float, checks: Checks) -> None:
        self.mail, self.limit, self.checks, self.bytes = mail, limit, checks, {"down": 0, "up": 0}
        self.faults: dict[int, str] = {}
        self.gone: set[int] = set()

    def send_and_receive(self, asked: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        asked = list(asked)
        for each in asked:
            each.metadata.ttl = self.limit + messages.LATE
        self.bytes["down"] += sum(messages.count_content(each) for each in asked)
        replies = self.mail.exchange(asked, self.limit)
        silent = {each.metadata.dst_node_id for each in asked} - replies.keys()
        self.gone |= silent | {node for node, reply in replies.items() if messages.is_lost(reply)}
        self.faults |= dict.fromkeys(silent, messages.say_silence(self.limit))
        found = []
        for message in asked:
            node = message.metadata.dst_node_id
            reply = replies.get(node)
            if reply is None:
                continue
            if reply.has_error():
                self.faults[node] = str(messages.read_fault(reply))
            else:
                self.bytes["up"] += messages.count_content(reply)
                if fault := self.checks.find_fault(message, reply):
                    self.faults[node] = fault
                    reply = Message(Error(ErrorCode.UNKNOWN, fault), reply_to=message)
            reply.metadata.__dict__["_src_node_id"] = node  # whatever the reply says of itself
            found.append(reply)
        return found
