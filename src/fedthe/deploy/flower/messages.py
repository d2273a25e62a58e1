"""What travels between server and clients, as Flower's records."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.run import RunNotRunningException
from httpx import HTTPError
from safetensors.torch import load
from torch import Tensor

from ...errors import InputError
from ...text import flatten
from ..bundle import to_safetensors

HELLO, SUMMARIZE, TRAIN, EVALUATE = "query", "query.summarize", "train", "evaluate"
ARRAYS, BESIDE, METRICS, CONFIG = "arrays", "beside", "metrics", "config"
PACKED = "safetensors"  # the one array of a record
FAULT = "fault"  # in the config of a reply: why there is nothing else in it
EXPIRED = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)
LOST = (*EXPIRED, ErrorCode.NODE_UNAVAILABLE)
LONGEST = 1e9  # seconds that a client may claim
ORIGIN = re.compile("[0-9a-f]{1,32}")
RAISED = re.compile(r"<class 'fedthe\.errors\.\w+'>:<'(.*)'>", re.DOTALL)  # how Flower says what a ClientApp raised
POLL = 0.2  # seconds between looks for replies, at first
PATIENCE = 0.05  # of the time so far: seconds to the next look
LATE = 60.0  # seconds for which Flower keeps a message after the time to answer, for replies that are not fetched yet


def pack(leaves: Mapping[str, Tensor]) -> ArrayRecord:
    """All leaves in one array of bytes, as safetensors: Flower makes a request for every array of every client."""
    return ArrayRecord({PACKED: Array(np.frombuffer(to_safetensors(leaves), np.uint8))})


def unpack(record: ArrayRecord) -> dict[str, Tensor]:
    """Nothing is trusted: what is not safetensors in an array of bytes is refused."""
    try:
        (array,) = record.values()
        return load(array.numpy().tobytes())
    except Exception as error:  # whatever NumPy and safetensors make of foreign bytes
        raise InputError(f"the arrays cannot be read ({flatten(error, 200)}).") from None


def take_arrays(content: RecordDict, name: str = ARRAYS) -> dict[str, Tensor]:
    record = content.array_records.get(name)
    return {} if record is None else unpack(record)


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


def refuse(message: Message, sentence: object, client: object = None) -> Message:
    """The reply of a client that cannot do its work. client: its number, if its node config has one."""
    records = RecordDict({CONFIG: ConfigRecord({FAULT: flatten(sentence, 500)})})
    if isinstance(client, int):
        records[METRICS] = MetricRecord({"client": client})
    return Message(records, reply_to=message)


def reply(message: Message, numbers: Mapping[str, float | int], leaves: Mapping[str, Tensor] | None = None) -> Message:
    records = RecordDict({METRICS: MetricRecord(dict(numbers))})
    if leaves is not None:
        records[ARRAYS] = pack(leaves)
    return Message(records, reply_to=message)


def is_lost(message: Message) -> bool:
    """Whether Flower answers in place of a node, because the node or the message is gone."""
    return message.has_error() and message.error.code in LOST


def say_silence(timeout: float) -> str:
    return f"no answer within {timeout:g} seconds"


def has_expired(asked: Message, reply: Message, timeout: float) -> bool:
    """Whether Flower answers because the time to answer is over, by this machine's clock, too."""
    unavailable = reply.has_error() and reply.error.code in EXPIRED
    return unavailable and asked.metadata.created_at + timeout <= time.time()


def read_fault(message: Message) -> str | None:
    """Why a reply says nothing else; None if it does."""
    if message.has_error():
        reason = message.error.reason or "no reason given"
        found = RAISED.search(reason)
        return f"its node failed: {flatten(found[1] if found else reason, 300)}"
    config = message.content.config_records.get(CONFIG)
    return None if config is None or FAULT not in config else flatten(config[FAULT], 500)


def read_number(message: Message, name: str) -> float:
    """A metric of a reply; NaN where it is missing or no number."""
    metrics = message.content.metric_records.get(METRICS) if message.has_content() else None
    return as_number(None if metrics is None else metrics.get(name))


def as_number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")


def check_origin(origin: object) -> str:
    """What a server drew when it began, which becomes part of a file's name."""
    if not isinstance(origin, str) or not ORIGIN.fullmatch(origin):
        raise InputError("the origin of the federation cannot be read; it must be hexadecimal digits.")
    return origin


def keep_finite(seconds: Iterable[float]) -> list[float]:
    return [each for each in seconds if 0 <= each < LONGEST]


@dataclass
class Mail:
    """Messages to nodes, and their replies. A reply is that of the node that was asked, whatever it says of itself."""

    grid: Grid
    one_by_one: bool = False  # pull each reply apart, since one that cannot be read loses all that are pulled with it
    end: float = 0.0  # of the time to answer

    def post(self, asked: Sequence[Message]) -> dict[str, Message]:
        """Send messages; by id."""
        posted = set(self.grid.push_messages(asked))
        return {each.metadata.message_id: each for each in asked if each.metadata.message_id in posted}

    def pull(self, waiting: Mapping[str, Message]) -> dict[str, Message]:
        """The replies that are there, by the id of what they answer."""
        found: dict[str, Message] = {}
        for ids in [[id] for id in waiting] if self.one_by_one else [list(waiting)]:
            try:
                replies = list(self.grid.pull_messages(ids)) if ids else []
            except (OSError, HTTPError, RunNotRunningException):  # of the connection, or the run
                raise
            except Exception:  # reading what a node made can raise anything
                if self.one_by_one:
                    found[ids[0]] = Message(Error(ErrorCode.UNKNOWN, "it cannot be read"), reply_to=waiting[ids[0]])
                self.one_by_one = True
                continue
            for reply in replies:
                id = ids[0] if len(ids) == 1 else reply.metadata.reply_to_message_id
                if id in waiting:
                    found.setdefault(id, reply)
        return found

    def exchange(self, asked: Sequence[Message], timeout: float) -> dict[int, Message]:
        """Send messages, and wait for the replies until all are there or time is up; by node.

        If Flower says that the time is up before our own clock does, that is no reply either.
        """
        waiting, replies, began = self.post(asked), dict[int, Message](), time.monotonic()
        self.end = began + timeout
        while waiting:
            spent = time.monotonic() - began
            for id, reply in self.pull(waiting).items():
                message = waiting.pop(id)
                if not has_expired(message, reply, timeout):
                    replies[message.metadata.dst_node_id] = reply
            if spent >= timeout:  # a last look at the end
                break
            if waiting:  # every look costs the SuperLink time for every message
                time.sleep(min(max(POLL, PATIENCE * spent), timeout - spent))
        return replies


def address(contents: Mapping[int, RecordDict], kind: str, round: int, ttl: float) -> list[Message]:
    """A message to each node."""
    return [Message(records, node, kind, group_id=str(round), ttl=ttl) for node, records in contents.items()]
