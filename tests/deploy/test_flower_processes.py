"""Federations of real processes on loopback: TLS, keys, and what happens when parts of them fail."""

import json
import re
import subprocess
import sys
import time

import pytest
import torch

flwr = pytest.importorskip("flwr")

from typer.testing import CliRunner  # noqa: E402

from fedthe import cli, records, store  # noqa: E402
from fedthe.deploy.flower import rounds  # noqa: E402
from fedthe.deploy.flower.member import Model, join  # noqa: E402
from fedthe.deploy.flower.rounds import Reply, name_leaves  # noqa: E402
from fedthe.deploy.flower.status import read_status  # noqa: E402
from fedthe.deploy.flower.terms import make_terms  # noqa: E402
from flower_room import assert_same, load_newest, read_defaults  # noqa: E402
from helpers import ROOT  # noqa: E402

sys.path.insert(0, str(ROOT / "examples" / "flower"))
import loopback  # noqa: E402

SETTINGS = "train_fraction=0.05 test_fraction=0.1 local_epochs=1 batch=16 size=16"


def wait_for(what, here, names, seconds=700.0):
    end = time.monotonic() + seconds
    while not (found := what()):
        for name in names:
            here.check(name)
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.2)
    return found


def test_processes_with_tls_train_what_a_simulation_does(tmp_path):
    with loopback.federation(tmp_path, 2, limit=600.0, tls=True) as here:
        settings = loopback.say_settings("fedthe", 2, 2, tmp_path / "server", SETTINGS) | {"wait": 300.0}
        done = here.run(loopback.say_words(settings))
        assert loopback.compare(settings, tmp_path / "server") <= loopback.NEAR, done.stdout
        loopback.make_keys(tmp_path / "keys", 3)  # a third key, which nobody registered
        here.start_node(2)
        assert here.processes["supernode-2"].wait(180) != 0
        assert "Failed to activate SuperNode" in (tmp_path / "supernode-2.log").read_text()
    for client in range(2):
        assert (tmp_path / f"client-{client}" / "bundle").is_dir()
    said = CliRunner().invoke(cli.app, ["federate", "status", str(tmp_path / "server"), "--json"])
    assert json.loads(said.stdout)["round"] == 2


# What nodes do wrong: client 2 sleeps in round 2, and client 3 sends what cannot be used in rounds 1 to 3.
FAULTS = """
import os, sys, time

class Patch:
    def find_spec(self, name, path=None, target=None):
        if name == "fedthe.deploy.flower.client_app":
            sys.meta_path.remove(self)
            spoil()

def spoil():
    from pathlib import Path
    import torch
    from fedthe import tree
    from fedthe.deploy.flower.member import Member
    honest, asleep = Member.train, Path(os.environ["ASLEEP"])

    def train(self, model):
        if self.number == 2 and model.round == 1 and not asleep.exists():
            asleep.write_text("")
            time.sleep(600)
        done = honest(self, model)
        if self.number == 3 and model.round == 0:
            return done._replace(upload=tree.map_leaves(lambda leaf: leaf * float("nan"), done.upload))
        if self.number == 3 and model.round == 1:
            return done._replace(upload=tree.map_leaves(lambda leaf: leaf[..., None], done.upload))
        if self.number == 3 and model.round == 2:
            return done._replace(rows=10**9)
        return done

    Member.train = train

sys.meta_path.insert(0, Patch())
"""
TOOK_PART = [[0, 1, 2], [0, 1], [0, 1, 2], [0, 1, 2, 3]]


def replay(terms, folder):
    """The server after these clients' rounds, by the functions that need no Flower."""
    torch.set_num_threads(1)
    members = [join(terms, number, folder / str(number)) for number in range(4)]
    progress = rounds.start(terms)
    for clients in TOOK_PART:
        replies = []
        for client in clients:
            state = rounds.find_state(progress, client)
            done = members[client].train(Model(progress.round, progress.server.shared, progress.averages, state))
            replies.append(Reply(client, name_leaves(done.upload, done.averages), done.rows, done.loss))
        progress = rounds.finish_round(terms, progress, rounds.judge(progress, replies, 10**6))
    return progress


def is_free(lock):
    with store.hold(lock, wait=False) as ours:
        return ours


def test_rounds_go_on_whatever_a_node_does_and_resume_with_the_server(tmp_path):
    patch, asleep = tmp_path / "patch", tmp_path / "asleep"
    patch.mkdir()
    (patch / "sitecustomize.py").write_text(FAULTS)
    wrong = {"PYTHONPATH": str(patch), "ASLEEP": str(asleep)}
    settings = loopback.say_settings("ditto", 4, 4, tmp_path / "server", SETTINGS) | {"timeout": 300.0, "wait": 300.0}
    database = ["--database", str(tmp_path / "link.db")]
    here, terms = loopback.Federation(tmp_path, 1000.0), make_terms(read_defaults() | settings)
    names = ["superlink", "supernode-0", "supernode-1"]

    def read_round():
        file = tmp_path / "server" / "status.json"
        return read_status(file.parent).round if file.exists() else 0

    try:
        here.start_link(*database)
        for number in range(4):
            here.start_node(number, **(wrong if number > 1 else {}))
        begun = here.flwr("run", str(loopback.APP), "here", "--run-config", loopback.say_words(settings))
        assert begun.returncode == 0, begun.stdout + begun.stderr
        wait_for(asleep.exists, here, names)  # in the middle of the second round
        kept = sorted((tmp_path / "client-2").glob("*-1.safetensors"))
        here.kill("supernode-2")
        wait_for(lambda: read_round() >= 2, here, names)
        here.start_node(2, **wrong)
        wait_for(lambda: read_round() >= 3, here, names)
        here.kill("superlink")
        wait_for(lambda: is_free(tmp_path / "server" / "server.lock"), here, names[1:], 120.0)  # its app ends, too
        here.start_link(*database)
        assert "going on after round 3" in here.run(loopback.say_words(settings)).stdout
    finally:
        here.close()

    one, other = records.load_progress(tmp_path / "server" / f"{terms.id}.safetensors"), replay(terms, tmp_path / "r")
    assert one.round == other.round == 4
    assert_same(one, other)
    for client in range(4):
        states = [
            load_newest(place.glob("*-4.safetensors"))
            for place in (tmp_path / f"client-{client}", tmp_path / "r" / str(client))
        ]
        assert_same(*states)
    assert len(kept) == 1  # the personal state that client 2 came back to
    left_out = "\n".join(one.server.skipped)
    for words in ("client 3 in round 1: the upload's", "is not finite", "client 3 in round 2: the upload's"):
        assert words in left_out
    assert "client 3 in round 3: it claims 1e+09 training rows" in left_out
    # whichever comes first: the end of the time to answer, or Flower's notice that the node is gone
    assert re.search(
        "client 2 in round 2: (no answer within 300 seconds|its node failed: .*Node Unavailable)", left_out
    )
    assert [each.clients for each in read_status(tmp_path / "server").history] == TOOK_PART
    shown = CliRunner().invoke(cli.app, ["federate", "status", str(tmp_path / "server")])
    assert shown.exit_code == 0
    assert "1e+09" in shown.stdout


def test_the_script_compares_no_federation_of_an_earlier_call(tmp_path):
    (tmp_path / "server").mkdir()
    done = subprocess.run(
        [sys.executable, loopback.__file__, "--folder", str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "has a federation already; name another folder" in done.stderr
