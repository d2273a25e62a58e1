"""The ClientApp: one message, one piece of work. Data and personal state are where the node's own config says."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import NamedTuple

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor

from ... import store
from ...engine.server import Diverged
from ...errors import Failed, InputError
from ...text import clean, find_nearest
from . import messages, processes, secure
from .member import Member, Model, join
from .rounds import check_mean, name_leaves, take_leaves
from .terms import Terms, Value, make_terms

Handler = Callable[[Message, Member, float], Message]  # with the time at which the work began
KEYS = ("partition-id", "data", "state", "threads", "device", "secure", "anew")  # of the node config
IGNORED = ("num-partitions",)  # which Flower's own examples give every node


class Node(NamedTuple):
    """A node's own config."""

    number: int  # of the client
    folder: Path  # of its personal state and bundle
    data: Path | None
    threads: int  # of torch
    device: str
    secure: bool  # only runs with secure aggregation
    anew: bool  # begin again if the personal state is missing


app = ClientApp()
processes.shorten_errors()


def handle(work: Handler) -> Callable[[Message, Context], Message]:
    """As Flower calls it. A client that cannot do its work says why, in one sentence."""

    @wraps(work)
    def handler(message: Message, context: Context) -> Message:
        began = time.perf_counter()
        try:
            node = read_node(context.node_config)
            terms = make_terms(context.run_config)
            check_run(context.run_config, node, terms)
            return work(message, open_member(terms, node), began)
        except (InputError, Failed) as error:
            if secure.is_masked(message):  # SecAgg+ leaves out a client that fails
                raise
            print(f"fedthe: {error}", flush=True)  # for the owner of the node, who sees its log alone
            return messages.refuse(
                message,
                error.fault if isinstance(error, Diverged) else error,
                context.node_config.get("partition-id"),
            )

    return handler


def read_node(given: Mapping[str, Value]) -> Node:
    """What has no effect is refused: `secur=true` would protect nothing."""
    for key, value in given.items():
        if key not in (*KEYS, *IGNORED):
            raise InputError(f"the node config has an unknown key, {clean(key)!r}; {find_nearest(key, KEYS)}")
        if key in ("secure", "anew") and not isinstance(value, bool):
            raise InputError(f"{key} must be true or false, without quotes, not {value!r}.")
        if key in ("partition-id", "threads") and (not isinstance(value, int) or isinstance(value, bool)):
            raise InputError(f"{key} must be a whole number, without quotes, not {value!r}.")
    if "partition-id" not in given:
        raise InputError("the node config must have the client's number: --node-config 'partition-id=0'.")
    number, threads = int(given["partition-id"]), int(given.get("threads", 1))
    if not 1 <= threads <= 1024:
        raise InputError(f"threads must be from 1 to 1024, not {threads}.")
    folder = Path(str(given["state"])) if "state" in given else store.home() / "clients" / str(number)
    data = Path(str(given["data"])) if "data" in given else None
    device, secure, anew = str(given.get("device", "cpu")), bool(given.get("secure")), bool(given.get("anew"))
    return Node(number, folder.absolute(), data, threads, device, secure, anew)


def check_run(run: Mapping[str, Value], node: Node, terms: Terms) -> None:
    """A node's owner can insist on secure aggregation. The server is not trusted to refuse what it does not cover."""
    if run.get("secure-aggregation"):
        check_mean(terms, "secure-aggregation")
    elif node.secure:
        raise InputError("this node takes part in runs with secure-aggregation=true only.")


def open_member(terms: Terms, node: Node) -> Member:
    torch.set_num_threads(node.threads)
    return join(terms, node.number, node.folder, node.data, node.device, node.anew)


def read_model(message: Message, member: Member) -> Model:
    config = message.content.config_records[messages.CONFIG]
    number, state = config["round"], config["state"]
    assert isinstance(number, int)
    assert isinstance(state, int)
    return take_leaves(
        read_leaves(message, messages.ARRAYS, member), number, state, messages.check_origin(config["origin"])
    )


def read_leaves(message: Message, name: str, member: Member) -> dict[str, Tensor]:
    return {leaf: each.to(member.device) for leaf, each in messages.take_arrays(message.content, name).items()}


@app.query()
@handle
def hello(message: Message, member: Member, began: float) -> Message:
    """Which client this is; its data is read once, so that a fault of it shows before the first round."""
    return messages.reply(
        message, {"client": member.number, "rows": member.rows, "terms": int(member.terms.id[:12], 16)}
    )


@app.train(mods=[secure.mod])
@handle
def train(message: Message, member: Member, began: float) -> Message:
    masked = secure.is_masked(message)
    model = secure.read_model(message, member) if masked else read_model(message, member)
    done = member.train(model)
    numbers = {"rows": done.rows, "loss": done.loss, "seconds": time.perf_counter() - began}
    leaves = name_leaves(done.upload, done.averages)
    if masked:
        return secure.reply(message, numbers, leaves, name_leaves(model.shared, model.averages))
    return messages.reply(message, numbers, leaves)


@app.query("summarize")
@handle
def summarize(message: Message, member: Member, began: float) -> Message:
    made = member.summarize(read_model(message, member))
    return messages.reply(message, {"rows": member.rows}, name_leaves(made, {}))


@app.evaluate()
@handle
def evaluate(message: Message, member: Member, began: float) -> Message:
    """The accuracy of the client's own model on its own test split; after the last round, also its bundle."""
    model = read_model(message, member)
    beside = take_leaves(read_leaves(message, messages.BESIDE, member), model.round).shared
    mine = member.deploy(model, beside)
    accuracy, samples = member.rate(mine)
    if message.content.config_records[messages.CONFIG]["export"]:
        member.export(model, mine)
    seconds = time.perf_counter() - began
    return messages.reply(message, {"accuracy": accuracy, "samples": samples, "seconds": seconds})
