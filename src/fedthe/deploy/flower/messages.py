"""What travels between server and clients, as Flower's records."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from torch import Tensor

from ...errors import InputError
from ...text import flatten

HELLO, SUMMARIZE, TRAIN, EVALUATE = "query", "query.summarize", "train", "evaluate"
ARRAYS, BESIDE, METRICS, CONFIG = "arrays", "beside", "metrics", "config"
FAULT = "fault"  # in the config of a reply: why there is nothing else in it
LOST = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE)
POLL = 0.2  # seconds between looks for replies


def pack(leaves: Mapping[str, Tensor]) -> ArrayRecord:
    return ArrayRecord({name: Array(leaf.detach().cpu().contiguous().numpy()) for name, leaf in leaves.items()})


def unpack(record: ArrayRecord) -> dict[str, Tensor]:
    """No array is trusted: one that is not what it says is refused."""
    try:
        return {name: torch.from_numpy(array.numpy().copy()) for name, array in record.items()}
    except Exception as error:  # whatever NumPy or torch make of foreign bytes
        raise InputError(f"the arrays cannot be read ({flatten(error, 200)}).") from None


def take_arrays(content: RecordDict, name: str = ARRAYS) -> dict[str, Tensor]:
    record = content.array_records.get(name)
    return {} if record is None else unpack(record)


def count_bytes(leaves: Mapping[str, Tensor]) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves.values())


def count_content(message: Message) -> int:
    """Bytes of all that a message holds."""
    content = message.content
    arrays = sum(record.count_bytes() for record in content.array_records.values())
    numbers: list[MetricRecord | ConfigRecord] = [*content.metric_records.values(), *content.config_records.values()]
    return arrays + sum(_weigh(value) for record in numbers for value in record.values())


def _weigh(value: object) -> int:
    if isinstance(value, list):
        return sum(map(_weigh, value))
    return len(value) if isinstance(value, str | bytes) else 8


def refuse(message: Message, sentence: object) -> Message:
    """The reply of a client that cannot do its work."""
    return Message(RecordDict({CONFIG: ConfigRecord({FAULT: flatten(sentence, 500)})}), reply_to=message)


def reply(message: Message, numbers: Mapping[str, float | int], leaves: Mapping[str, Tensor] | None = None) -> Message:
    records = RecordDict({METRICS: MetricRecord(dict(numbers))})
    if leaves is not None:
        records[ARRAYS] = pack(leaves)
    return Message(records, reply_to=message)


def is_lost(message: Message) -> bool:
    """Whether Flower answers in place of a node, because the node or the message is gone."""
    return message.has_error() and message.error.code in LOST


def read_fault(message: Message) -> str | None:
    """Why a reply says nothing else; None if it does."""
    if message.has_error():
        return f"its node failed: {flatten(message.error.reason or 'no reason given', 300)}"
    config = message.content.config_records.get(CONFIG)
    return None if config is None or FAULT not in config else flatten(config[FAULT], 500)


def read_number(message: Message, name: str) -> float:
    """A metric of a reply; NaN where it is missing or no number."""
    metrics = message.content.metric_records.get(METRICS)
    value = None if metrics is None else metrics.get(name)
    return float(value) if isinstance(value, int | float) else float("nan")


def exchange(grid: Grid, messages: Sequence[Message], timeout: float) -> list[Message]:
    """Send messages, and wait for the replies until all are there or time is up."""
    waiting, replies, end = set(grid.push_messages(messages)), list[Message](), time.monotonic() + timeout
    while waiting and time.monotonic() < end:
        found = list(grid.pull_messages(waiting))
        replies += found
        waiting -= {each.metadata.reply_to_message_id for each in found}
        if waiting:
            time.sleep(POLL)
    return replies


def address(nodes: Iterable[int], kind: str, round: int, records: RecordDict, timeout: float) -> list[Message]:
    """The same message to several nodes."""
    return [Message(records, node, kind, group_id=str(round), ttl=timeout) for node in nodes]
