"""The ClientApp: one message, one piece of work. Data and personal state are where the node's own config says.

Keys of the node config: `partition-id` (the client's number), `data` (its folder or npz file), `state` (the folder of
its personal state and bundle), `threads`, `device`, `secure` (only runs with secure aggregation), and `anew` (begin
again if the personal state is missing).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor

from ... import store
from ...engine.server import Diverged
from ...errors import Failed, InputError
from . import messages, secure
from .member import Member, Model, join
from .rounds import check_mean, name_leaves, take_leaves
from .terms import Terms, Value, make_terms

Handler = Callable[[Message, Member, float], Message]  # with the time at which the work began
app = ClientApp()


def handle(work: Handler) -> Callable[[Message, Context], Message]:
    """As Flower calls it. A client that cannot do its work says why, in one sentence."""

    @wraps(work)
    def handler(message: Message, context: Context) -> Message:
        began = time.perf_counter()
        try:
            terms = make_terms(context.run_config)
            check_run(context.run_config, context.node_config, terms)
            return work(message, open_member(terms, context.node_config), began)
        except (InputError, Failed) as error:
            if secure.is_masked(message):  # SecAgg+ leaves out a client that fails
                raise
            return messages.refuse(message, error.fault if isinstance(error, Diverged) else error)

    return handler


def check_run(run: Mapping[str, Value], node: Mapping[str, Value], terms: Terms) -> None:
    """A node's owner can insist on secure aggregation. The server is not trusted to refuse what it does not cover."""
    if run.get("secure-aggregation"):
        check_mean(terms, "secure-aggregation")
    elif node.get("secure"):
        raise InputError("this node takes part in runs with secure-aggregation=true only.")


def open_member(terms: Terms, node: Mapping[str, Value]) -> Member:
    number, threads = node.get("partition-id"), node.get("threads", 1)
    if not isinstance(number, int) or isinstance(number, bool):
        raise InputError("the node config must have the client's number: --node-config 'partition-id=0'.")
    if not isinstance(threads, int) or isinstance(threads, bool) or not 1 <= threads <= 1024:
        raise InputError(f"threads must be from 1 to 1024, not {threads}.")
    torch.set_num_threads(threads)
    folder = Path(str(node["state"])) if "state" in node else store.home() / "clients" / str(number)
    data = Path(str(node["data"])) if "data" in node else None
    return join(terms, number, folder.absolute(), data, str(node.get("device", "cpu")), bool(node.get("anew")))


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
