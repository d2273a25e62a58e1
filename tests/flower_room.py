"""A federation on Flower in one process, for tests: messages go from the ServerApp to the ClientApp at once."""

from copy import deepcopy

import pytest
import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedthe import records, tree
from fedthe.deploy.flower import client_app, messages, nodes, server_app
from fedthe.deploy.flower.rounds import name_leaves
from fedthe.deploy.flower.status import read_status
from fedthe.deploy.flower.terms import make_terms
from fedthe.engine.loop import Loop
from fedthe.engine.train import train
from fedthe.experiment.work import prepare
from helpers import ROOT

try:
    import tomllib
except ImportError:
    import tomli as tomllib

QUICK = "train_fraction=0.05 test_fraction=0.1 local_epochs=1 batch=16 size=16"
CLIENTS = 3


def read_defaults():
    """The run config of the app, as a user finds it."""
    return tomllib.loads((ROOT / "flower" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]


class Room:
    """In place of Flower's grid: messages go to the ClientApp at once. `spoil` changes or withholds a reply."""

    def __init__(self, folder, spoil=lambda client, kind, round, reply: reply, **config):
        quick = {"method": "fedthe", "clients": CLIENTS, "rounds": 2, "settings": QUICK, "wait": 0.0, "timeout": 60.0}
        self.config = read_defaults() | quick | {"folder": str(folder / "server")} | config
        self.folder, self.spoil, self.data = folder, spoil, {}
        self.nodes = {100 + k: k for k in range(self.config["clients"])}  # by node: client
        self.sent, self.waiting = [], {}

    def get_node_ids(self):
        return list(self.nodes)

    def push_messages(self, pushed):
        for message in pushed:
            number = str(len(self.sent))
            message.metadata.__dict__["_message_id"] = number
            self.sent.append(message)
            self.waiting[number] = message
            yield number

    def pull_messages(self, wanted):
        found = []
        for number in sorted(wanted):
            message = self.waiting.pop(number, None)
            if message is None:
                continue
            kind, round = message.metadata.message_type, int(message.metadata.group_id)
            client = self.nodes.get(message.metadata.dst_node_id)
            if client is None:
                continue
            try:
                answer = client_app.app(deepcopy(message), self.make_context(client))  # as if it had travelled
            except Exception as error:
                answer = Message(Error(0, str(error)), reply_to=message)
            if (answer := self.spoil(client, kind, round, answer)) is not None:
                found.append(answer)
        return found

    def make_context(self, client):
        node = {"partition-id": client, "state": str(self.folder / f"client-{client}")}
        if client in self.data:
            node["data"] = str(self.data[client])
        return Context(1, 100 + client, node, RecordDict(), self.config)

    def run(self):
        server_app.app(self, Context(1, 0, {}, RecordDict(), self.config))
        return self.progress

    @property
    def terms(self):
        return make_terms(self.config)

    @property
    def progress(self):
        paths = (self.folder / "server").glob(f"{self.terms.id}*.safetensors")
        last = [path for path in paths if ".before." not in path.name]
        return records.load_progress(last[0]) if last else None

    def read_state(self, client):
        """What a client keeps, from its newest file."""
        paths = (self.folder / f"client-{client}").glob(f"{self.terms.id}-*.safetensors")
        return load_newest(paths).server.shared

    @property
    def status(self):
        return read_status(self.folder / "server")


@pytest.fixture(autouse=True)
def identity(monkeypatch):
    """What the processes of Flower set before they run an app."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    monkeypatch.setattr(server_app, "LOOK", 0.0)
    monkeypatch.setattr(nodes, "LOOK", 0.0)
    monkeypatch.setattr(messages, "POLL", 0.0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def simulate(terms):
    methods, (work,) = prepare(terms.config)
    (method,) = methods.values()
    return train(method.training, work.run.shards, terms.settings, terms.seed, engine=Loop(threads=1))


def load_newest(paths):
    """The progress of the highest round, which ends the file's name."""
    return records.load_progress(max(paths, key=lambda path: int(path.stem.rpartition("-")[2])))


def assert_same(one, other):
    """Two servers."""
    assert_equal(*(name_leaves(each.server.shared, each.averages) for each in (one, other)))


def assert_same_states(room, simulated):
    """What clients keep."""
    for client, state in enumerate(simulated.clients):
        assert_equal(tree.flatten(room.read_state(client)), tree.flatten(state))


def assert_equal(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
