"""ServerApp and ClientApp, in one process: whole federations, their faults, and the way from data to a predictor."""

import json
import logging
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

flwr = pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, Context, Error, Message, MetricRecord, RecordDict  # noqa: E402
from flwr.common.constant import ErrorCode  # noqa: E402
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

import fedthe  # noqa: E402
from fedthe import cli, records, store  # noqa: E402
from fedthe.deploy.flower import client_app, messages, nodes, processes, server_app, status  # noqa: E402
from fedthe.deploy.flower.member import Member  # noqa: E402
from fedthe.deploy.flower.rounds import name_leaves  # noqa: E402
from fedthe.deploy.flower.status import read_status  # noqa: E402
from fedthe.deploy.flower.terms import make_terms  # noqa: E402
from fedthe.engine.loop import Loop  # noqa: E402
from fedthe.engine.train import train  # noqa: E402
from fedthe.errors import Failed, InputError  # noqa: E402
from fedthe.experiment.work import prepare  # noqa: E402
from flower_room import (  # noqa: E402, F401
    CLIENTS,
    QUICK,
    Room,
    assert_same,
    assert_same_states,
    identity,
    read_defaults,
    simulate,
)
from helpers import fails  # noqa: E402


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_task_id", "_run_id", "_node_id"):
            patch.setattr(TaskIdentity, name, 1)
        room = Room(tmp_path_factory.mktemp("finished"), **{"evaluate-every": 1})
        room.run()
        return room


def test_a_federation_gives_the_numbers_of_a_simulation(finished):
    expected = simulate(finished.terms)
    assert_same(finished.progress, expected)
    assert_same_states(finished, expected)


@pytest.mark.parametrize("name", fedthe.METHODS)
def test_every_method_trains_through_its_apps(name, tmp_path, monkeypatch):
    # answers and bundles do not depend on Flower, and some methods take long for them
    monkeypatch.setattr(Member, "rate", lambda member, mine: (0.0, 0))
    monkeypatch.setattr(Member, "export", lambda member, model, mine: None)
    net = " net=resnet20_gn" if name in ("tent", "sar", "rotta") else ""
    room = Room(tmp_path, method=name, clients=2, rounds=1 if net else 2, settings=QUICK + net)
    expected = simulate(room.terms)
    assert_same(room.run(), expected)
    assert_same_states(room, expected)


def test_messages_are_few_and_hold_no_more_than_they_must(finished):
    kinds = [message.metadata.message_type for message in finished.sent]
    # one to greet each client, then at most one to train and one to evaluate in each round
    assert kinds == ["query"] * 3 + (["train"] * 3 + ["evaluate"] * 3) * 2
    progress = finished.progress
    shared = name_leaves(progress.server.shared, progress.averages)
    (message,) = [m for m in finished.sent if m.metadata.message_type == "train"][:1]
    answer = client_app.app(message, finished.make_context(0))
    assert set(answer.content.array_records) == {"arrays"}
    sent = messages.take_arrays(answer.content)
    assert sent.keys() == shared.keys()
    assert answer.content.array_records["arrays"].count_bytes() < sum(4 * leaf.numel() for leaf in sent.values()) + 1000
    assert set(answer.content.metric_records["metrics"]) == {"rows", "loss", "seconds"}
    assert not answer.content.config_records
    head = finished.read_state(0)["personal"]["personal"]["out"]
    assert head.numel() > 100
    assert not any(torch.equal(head, leaf) for leaf in sent.values())


def test_the_status_tells_rounds_clients_accuracy_seconds_and_bytes(finished):
    status = finished.status
    assert (status.doing, status.round, status.rounds) == ("done", 2, 2)
    assert [each.rows for each in status.seen.values()] == [len(s.train) for s in finished.terms.federation.clients]
    assert all(0 <= each.accuracy <= 100 and each.round == 2 and each.fault is None for each in status.seen.values())
    shared = name_leaves(finished.progress.server.shared, finished.progress.averages)
    size = sum(leaf.numel() * 4 for leaf in shared.values())
    assert [each.bytes for each in status.history] == [{"down": size, "up": size}] * 2
    assert finished.terms.method.training.message_bytes == size  # as a simulation reports it
    assert [each.loss for each in status.history] == list(finished.progress.server.losses)
    assert {"nodes", "train", "mean", "slowest", "merge", "save"} == status.history[0].seconds.keys()


def test_the_command_shows_the_status(finished, tmp_path):
    runner, folder = CliRunner(), str(finished.folder / "server")
    shown = runner.invoke(cli.app, ["federate", "status", folder])
    assert shown.exit_code == 0
    assert "fedthe: 2 of 2 rounds done; done" in shown.stdout
    assert f"accuracy after round 2: {finished.status.accuracy:.2f} %" in shown.stdout
    told = json.loads(runner.invoke(cli.app, ["federate", "status", folder, "--json"]).stdout)
    assert told["accuracy"] == pytest.approx(finished.status.accuracy)
    fails(lambda: read_status(tmp_path), "has no status.json")
    (tmp_path / "status.json").write_text('{"seen": 3}')
    fails(lambda: read_status(tmp_path), "damaged")


def test_every_client_has_a_bundle_that_answers(finished):
    for k in range(CLIENTS):
        predictor = fedthe.load_bundle(finished.folder / f"client-{k}" / "bundle")
        federation = finished.terms.federation
        x = federation.inputs(federation.tests["original"][k])
        answers = [predictor.predict(each) for each in x]
        labels = federation.labels(federation.tests["original"][k])
        accuracy = 100 * np.mean(
            [each.label == federation.pool.classes[y] for each, y in zip(answers, labels, strict=True)]
        )
        assert accuracy == pytest.approx(finished.status.of(k).accuracy)


# ---- faults


def change(answer, leaves=None, **numbers):
    content = RecordDict(dict(answer.content))
    if leaves is not None:
        content["arrays"] = messages.pack(leaves(messages.take_arrays(answer.content)))
    content["metrics"] = MetricRecord({**answer.content["metrics"], **numbers})
    answer.__dict__["_content"] = content
    return answer


def replace_arrays(answer, *arrays):
    answer.content["arrays"] = ArrayRecord({str(k): Array(np.array(array)) for k, array in enumerate(arrays)})
    return answer


def fail(answer, why, code=ErrorCode.LOAD_CLIENT_APP_EXCEPTION):
    answer.__dict__.update(_content=None, _error=Error(code, why))
    return answer


def put(name, leaf):
    return lambda leaves: {**leaves, name: leaf(leaves[name])}


SPOILED = {
    "not finite": (lambda a: change(a, put("shared.head.out", lambda w: w * torch.nan)), "head.out is not finite"),
    "huge": (lambda a: change(a, put("shared.head.out", lambda w: w * 1e30)), "more than can be computed with"),
    "a forged line": (
        lambda a: change(a, lambda w: w | {"shared.x\x1b[31m\nround 9: all is well": torch.zeros(1)}),
        "not expected",
    ),
    "a long name": (lambda a: change(a, lambda w: w | {f"shared.{'x' * 10**6}": torch.zeros(1)}), "shared.xxx"),
    "another shape": (lambda a: change(a, put("shared.head.out", lambda w: w[:1])), "has shape"),
    "another dtype": (lambda a: change(a, put("shared.head.out", torch.Tensor.double)), "float64"),
    "a leaf less": (lambda a: change(a, lambda w: dict(list(w.items())[1:])), "is missing"),
    "a leaf more": (lambda a: change(a, lambda w: w | {"shared.more": torch.zeros(1)}), "not expected"),
    "no safetensors": (lambda a: replace_arrays(a, np.zeros(99, np.uint8)), "the arrays cannot be read"),
    "two arrays": (lambda a: replace_arrays(a, [1.0], [2.0]), "the arrays cannot be read"),
    "rows": (lambda a: change(a, rows=10**9), "claims 1e+09 training rows"),
    "no rows": (lambda a: change(a, rows=0), "claims 0 training rows"),
    "half a row": (lambda a: change(a, rows=1.5), "claims 1.5"),
    "rows that are no number": (lambda a: change(a, rows=float("nan")), "claims nan"),
    "loss": (lambda a: change(a, loss=float("inf")), "the loss is inf"),
    "silence": (lambda a: None, "no answer within"),
    "an error": (lambda a: fail(a, "out of\nmemory"), "its node failed: out of memory"),
    "a message that is lost": (lambda a: fail(a, "gone", ErrorCode.MESSAGE_UNAVAILABLE), "its node failed: gone"),
    "a node that is gone": (lambda a: fail(a, "no heartbeat", ErrorCode.NODE_UNAVAILABLE), "its node failed: no heart"),
}


@pytest.mark.parametrize("kind", SPOILED)
def test_a_round_goes_on_without_a_client_whose_reply_cannot_be_used(kind, tmp_path, finished):
    spoil, words = SPOILED[kind]

    def spoil_one(client, message, round, answer):
        return spoil(answer) if (client, message, round) == (1, "train", 2) else answer

    timeout = 1.0 if kind == "silence" else 60.0
    room = Room(tmp_path, spoil_one, timeout=timeout)
    progress = room.run()
    (skipped,) = progress.server.skipped
    assert skipped.startswith("client 1 in round 2: ")
    assert words in skipped
    assert len(skipped) < 400
    assert skipped.isprintable()
    assert words in room.status.of(1).fault
    assert room.status.history[1].clients == [0, 2]
    # the two others, weighted by their rows
    uploads = [message for message in room.sent if message.metadata.message_type == "train"][3:]
    expected = []
    for message, k in ((uploads[0], 0), (uploads[2], 2)):
        shutil.rmtree(tmp_path / f"client-{k}" / "bundle")
        Path(next((tmp_path / f"client-{k}").glob("*-2.safetensors"))).unlink()
        answer = client_app.app(message, room.make_context(k))
        expected.append((messages.take_arrays(answer.content), answer.content["metrics"]["rows"]))
    total = sum(rows for _, rows in expected)
    for name, leaf in name_leaves(progress.server.shared, progress.averages).items():
        torch.testing.assert_close(leaf, sum(rows / total * sent[name] for sent, rows in expected))


def test_a_server_that_finds_too_few_clients_stops_and_keeps_what_it_has(tmp_path, capsys):
    def spoil(client, kind, round, answer):
        return None if kind == "train" and round == 2 and client != 0 else answer

    room = Room(tmp_path, spoil, fewest=2, timeout=1.0)
    with pytest.raises(Failed, match="round 2 failed: 1 client can be used, but fewest=2; client 1: no answer"):
        room.run()
    assert room.progress.round == 1
    assert capsys.readouterr().out.count("attempt") == 3
    assert room.status.doing.startswith("stopped: round 2 failed: 1 client can be used")
    room.spoil = lambda client, kind, round, answer: answer
    assert_same(room.run(), simulate(room.terms))  # goes on where it stopped


def test_a_server_goes_on_from_its_checkpoint_and_clients_from_their_states(tmp_path, finished):
    room = Room(tmp_path, rounds=1)
    first = room.run()
    room.config["rounds"] = 2
    assert_same(room.run(), finished.progress)
    # the server lost the last round, which its clients have done: they go back, too
    path = tmp_path / "server" / f"{room.terms.id}.safetensors"
    records.save_progress(path, first)
    assert_same(room.run(), finished.progress)
    states = sorted(each.stem.rpartition("-")[2] for each in (tmp_path / "client-0").glob("*.safetensors"))
    assert states == ["1", "2"]  # the last two


def test_a_run_in_another_folder_leaves_the_states_of_this_one(tmp_path):
    """Both have the same settings, so clients keep states of both in one folder."""
    room = Room(tmp_path, rounds=2)
    room.run()
    other = Room(tmp_path, rounds=3)
    other.config["folder"] = str(tmp_path / "elsewhere")
    server_app.app(other, Context(1, 0, {}, RecordDict(), other.config))
    room.config["rounds"] = 3
    assert_same(room.run(), simulate(room.terms))
    assert not room.progress.server.skipped


def test_what_belongs_to_a_checkpoint_is_not_drawn_again(tmp_path):
    room = Room(tmp_path, rounds=1)
    room.run()
    (origin,) = (tmp_path / "server").glob("*.origin")
    origin.unlink()
    room.config["rounds"] = 2
    fails(room.run, origin.name, "missing; put it back")


@pytest.mark.parametrize("origin", ["../../x", "", "A", "a" * 33, 3])
def test_an_origin_is_part_of_a_file_s_name_and_nothing_else(tmp_path, finished, origin):
    message = next(each for each in finished.sent if each.metadata.message_type == "train")
    message = deepcopy(message)
    message.content.config_records["config"]["origin"] = origin
    room = Room(tmp_path)
    answer = client_app.app(message, room.make_context(0))
    assert "the origin of the federation cannot be read" in messages.read_fault(answer)
    assert not (tmp_path / "client-0").exists()


def test_a_node_that_comes_back_under_another_id_has_its_state(tmp_path):
    def spoil(client, kind, round, answer):
        if kind == "train" and round == 1 and client == 1:
            del room.nodes[101]
            room.nodes[999] = 1
        return answer

    room = Room(tmp_path, spoil, method="scaffold")  # whose uploads depend on the state
    expected = simulate(room.terms)
    assert_same(room.run(), expected)
    assert_same_states(room, expected)
    assert room.status.of(1).node == "999"


def test_a_node_that_is_gone_is_waited_for_no_longer_than_asked(tmp_path):
    room = Room(tmp_path)
    del room.nodes[102]
    progress = room.run()
    assert progress.server.skipped == tuple(f"client 2 in round {n}: its node is not there; left out" for n in (1, 2))


def test_a_greeting_that_got_lost_is_repeated(tmp_path):
    def lose(client, kind, round, answer):
        first = [message.metadata.dst_node_id for message in room.sent].count(101) == 1
        return fail(answer, "gone", ErrorCode.MESSAGE_UNAVAILABLE) if client == 1 and first else answer

    room = Room(tmp_path, lose, rounds=1, timeout=1e6, wait=60.0)
    room.run()
    assert room.status.history[0].clients == [0, 1, 2]
    greetings = [message.metadata for message in room.sent if message.metadata.message_type == "query"]
    assert [each.dst_node_id for each in greetings] == [100, 101, 102, 101]
    assert {each.ttl for each in greetings} == {600.0}  # Flower says then that it is lost, however long rounds take


def test_a_node_has_as_long_to_read_its_data_as_the_server_waits_for_it(tmp_path):
    room = Room(tmp_path, rounds=1, timeout=1e6, wait=7200.0)
    room.run()
    assert {each.metadata.ttl for each in room.sent if each.metadata.message_type == "query"} == {7200.0}


@pytest.mark.parametrize(("fewest", "settings"), [(4, QUICK), (2, f"{QUICK} participation=0.3")])
def test_no_more_clients_can_be_needed_than_a_round_has(fewest, settings, tmp_path):
    room = Room(tmp_path, fewest=fewest, settings=settings)
    fails(room.run, f"fewest={fewest}, but a round has {'3 clients' if fewest == 4 else '1 client'}; ask for fewer")
    assert not room.sent


class Slow(Room):
    """Node 101 answers its greeting late: it has other work to finish."""

    looks = 0

    def pull_messages(self, wanted):
        found = []
        for number in sorted(wanted):
            message = self.waiting.get(number)
            if message and message.metadata.dst_node_id == 101 and message.metadata.message_type == messages.HELLO:
                self.looks += 1
                if self.looks < 20:
                    continue
            found += super().pull_messages([number])
        return found


def test_a_node_that_is_busy_is_waited_for(tmp_path, capsys):
    room = Slow(tmp_path)
    assert_same(room.run(), simulate(room.terms))
    assert capsys.readouterr().out.count("waiting for 1 node that may be busy with an earlier run") == 1


def test_a_node_that_never_answers_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(nodes, "GREETING", 0.0)
    room = Slow(tmp_path, rounds=1)
    room.looks = -1000
    assert "client 1 in round 1: its node is not there, or does not answer" in room.run().server.skipped[0]


def test_a_folder_has_one_server_at_a_time(tmp_path, monkeypatch):
    room = Room(tmp_path, rounds=1)
    with store.hold(tmp_path / "server" / "server.lock"):
        monkeypatch.setattr(server_app, "HANDOVER", 0.0)
        fails(room.run, "another server is using")
        monkeypatch.setattr(server_app, "HANDOVER", 60.0)
        with ThreadPoolExecutor() as pool:
            later = pool.submit(room.run)  # it waits for the one before to notice that it was stopped
            time.sleep(0.2)
            assert not later.done()
            (tmp_path / "server" / "server.lock").unlink()  # as its holder does when it lets go
            assert later.result().round == 1


def test_another_federation_in_the_same_folders_loses_nothing(tmp_path, capsys):
    one, other = Room(tmp_path), Room(tmp_path, rounds=1, seed=1)
    one.run()
    kept, answered = one.status, (tmp_path / "client-0" / "bundle" / "bundle.json").read_bytes()
    capsys.readouterr()
    other.run()
    assert f"also holds federation {one.terms.id} (2 of 2 rounds done)" in capsys.readouterr().out
    assert (other.status.id, other.status.round) == (other.terms.id, 1)
    assert (tmp_path / "client-0" / f"bundle-{one.terms.id}" / "bundle.json").read_bytes() == answered
    one.run()
    assert "no round is left" in capsys.readouterr().out
    assert one.status.history == kept.history
    assert {path.name for path in (tmp_path / "client-0").glob("bundle*")} == {
        "bundle",
        *(f"bundle-{each.terms.id}" for each in (one, other)),
    }
    fedthe.load_bundle(tmp_path / "client-0" / "bundle")


def test_why_a_node_is_refused_is_told_everywhere(tmp_path, capsys):
    own = {"dataset": "own", "classes": "a,b,c", "shape": "16x16x3", "settings": "local_epochs=1", "rounds": 1}
    room = Room(tmp_path, **own)
    for k in range(CLIENTS):
        room.data[k] = tmp_path / f"data-{k}"
        if k != 1:
            write_pictures(room.data[k], k)
    skipped = room.run().server.skipped
    said = capsys.readouterr().out
    for where in (*skipped, room.status.of(1).fault):
        assert "its node is refused" in where
        assert "data-1" in where
    assert "data-1 is no folder and no npz file" in next(line for line in said.splitlines() if line[:7] == "fedthe:")


def test_what_apps_refuse_is_a_sentence_in_flower_s_log():
    log, heard = logging.getLogger("flwr"), StringIO()
    handler = logging.StreamHandler(heard)
    log.addHandler(handler)
    try:
        log.error("%s raised an exception", "ServerApp", exc_info=InputError("name a folder."))
        log.error("%s raised an exception", "ServerApp", exc_info=KeyError("a bug"))
    finally:
        log.removeHandler(handler)
    ours, theirs = heard.getvalue().split("\n", 1)
    assert ours == "fedthe: name a folder."
    assert "KeyError: 'a bug'" in theirs


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        (
            "<class 'fedthe.errors.InputError'>:<'x is missing; put it back.'>",
            "its node failed: x is missing; put it back.",
        ),
        ("<class 'KeyError'>:<''x''>", "its node failed: <class 'KeyError'>:<''x''>"),
    ],
)
def test_what_a_client_app_raised_is_told_without_python(reason, shown):
    asked = messages.address({1: RecordDict()}, messages.TRAIN, 1, 60.0)[0]
    assert messages.read_fault(Message(Error(0, reason), reply_to=asked)) == shown


def test_no_reply_is_fetched_for_longer_than_there_is_time(monkeypatch):
    from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectUnavailableError
    from flwr.superlink.grid import http_grid

    def never(id):
        raise ObjectUnavailableError("it is announced, and does not come")

    monkeypatch.setattr(http_grid, "pull_objects", http_grid.pull_objects)  # put back after the test
    monkeypatch.setattr(processes, "TRANSFER", 0.0)
    mail = messages.Mail(grid=None)
    processes.bound_transfers(mail)
    with pytest.raises(ObjectPullError):
        http_grid.pull_objects(["1"], never)
    assert http_grid.pull_objects(["1", "2"], lambda id: id.encode()) == {"1": b"1", "2": b"2"}  # however late


def test_a_rule_that_leaves_out_nobody_is_refused(tmp_path):
    own = {"dataset": "own", "classes": "a,b,c", "shape": "16x16x3", "rounds": 1}
    room = Room(tmp_path, **own, settings="aggregation=multi_krum")
    fails(room.run, "aggregation=multi_krum leaves out nobody in rounds of 3 clients; it needs at least 5")
    assert not room.sent


def test_strangers_are_refused(tmp_path, capsys):
    room = Room(tmp_path, rounds=1)
    room.nodes[500] = 7  # a client that the run does not have
    room.run()
    assert "node 500 is refused: partition-id=7, but the clients of the run are 0 to 2." in capsys.readouterr().out


def test_a_client_with_other_data_is_refused(tmp_path, capsys, monkeypatch):
    room = Room(tmp_path, rounds=1)
    make = client_app.make_terms

    def make_other(config):
        return make(config | {"seed": 5}) if TaskIdentity.node_id == 5 else make(config)

    ask = room.make_context

    def make_context(client):
        TaskIdentity.node_id = 5 if client == 1 else 1
        return ask(client)

    monkeypatch.setattr(client_app, "make_terms", make_other)
    monkeypatch.setattr(room, "make_context", make_context)
    room.run()
    assert "node 101 is refused: its settings or data differ from the server's" in capsys.readouterr().out


def test_participation_and_messages_after_the_last_round(tmp_path):
    room = Room(tmp_path, method="fedthe_regime_lda", settings=f"{QUICK} participation=0.67")
    assert_same(room.run(), simulate(room.terms))
    kinds = [message.metadata.message_type for message in room.sent]
    assert kinds == ["query"] * 3 + ["train"] * 4 + ["query.summarize"] * 3 + ["evaluate"] * 3
    assert not any(each.fault for each in room.status.seen.values())


# ---- what a hostile node can say of itself


def test_a_reply_is_that_of_the_node_that_was_asked(tmp_path):
    def pose(client, kind, round, answer):
        if client == 1 and kind == "train":
            answer.metadata.__dict__["_src_node_id"] = 100  # client 0's
        return answer

    room = Room(tmp_path, pose)
    assert_same(room.run(), simulate(room.terms))


def test_a_greeting_that_answers_nothing_is_ignored(tmp_path):
    def stray(client, kind, round, answer):
        if client == 1 and kind == "query":
            answer.metadata.__dict__["_reply_to_message_id"] = "nobody asked"
        return answer

    room = Room(tmp_path, stray, rounds=1, timeout=1.0)
    room.run()
    assert room.status.history[0].clients == [0, 2]


class Garbled(Room):
    """What client 1 sends for a round cannot be read, and takes along what is pulled with it."""

    def pull_messages(self, wanted):
        found = []
        for number in sorted(wanted):
            message = self.waiting.get(number)
            if message and message.metadata.message_type == "train" and message.metadata.dst_node_id == 101:
                raise ValueError("no protobuf")
            found += super().pull_messages([number])
        return found


def test_a_reply_that_cannot_be_read_loses_a_round_of_others_at_most(tmp_path):
    room = Garbled(tmp_path, timeout=1.0)
    room.run()
    assert [each.clients for each in room.status.history] == [[2], [0, 2]]
    assert "its node failed: it cannot be read" in room.status.of(1).fault


def test_two_nodes_for_one_client_do_not_take_turns(tmp_path, capsys):
    room = Room(tmp_path)
    room.nodes[200] = 0
    assert_same(room.run(), simulate(room.terms))
    assert capsys.readouterr().out.count("takes the place of node 100 as client 0") == 1
    asked = [message.metadata.dst_node_id for message in room.sent if message.metadata.message_type == "train"]
    assert 100 not in asked


def test_wrong_summaries_are_left_out(tmp_path, capsys):
    def spoil(client, kind, round, answer):
        if kind != "query.summarize":
            return answer
        if client == 0:
            return replace_arrays(answer, np.zeros(99, np.uint8))
        return change(answer, rows=float("nan")) if client == 1 else answer

    room = Room(tmp_path, spoil, method="fedthe_regime_lda", rounds=1)
    room.run()
    said = capsys.readouterr().out
    assert "client 0 sends no summary: the arrays cannot be read" in said
    assert "client 1 sends no summary: it claims nan training rows" in said
    assert room.status.doing == "done"
    assert all((tmp_path / f"client-{k}" / "bundle").is_dir() for k in range(CLIENTS))


@pytest.mark.parametrize("wrong", [lambda leaf: -1e3 * leaf, lambda leaf: torch.full_like(leaf, 1e17)])
def test_a_summary_that_nothing_can_be_made_of_is_left_out(tmp_path, capsys, wrong):
    def spoil(client, kind, round, answer):
        if client != 1 or kind != "query.summarize":
            return answer
        return change(answer, lambda leaves: {name: wrong(leaf) for name, leaf in leaves.items()})

    room = Room(tmp_path, spoil, method="fedthe_regime_lda", rounds=1)
    room.run()
    assert "client 1 sends no summary: " in capsys.readouterr().out
    assert all((tmp_path / f"client-{k}" / "bundle").is_dir() for k in range(CLIENTS))


def test_without_any_summary_the_run_stops_and_can_be_continued(tmp_path):
    room = Room(tmp_path, lambda k, kind, r, answer: None if kind == "query.summarize" else answer, timeout=1.0)
    room.config |= {"method": "fedthe_regime_lda", "rounds": 1}
    with pytest.raises(Failed, match="no client sent a summary that can be used"):
        room.run()
    room.spoil = lambda client, kind, round, answer: answer
    room.run()
    assert room.status.doing == "done"


def test_claims_are_not_shown_if_they_cannot_be(tmp_path):
    def boast(client, kind, round, answer):
        if client == 0 and kind == "evaluate":
            return change(answer, accuracy=1e6)
        return change(answer, seconds=float("nan")) if kind == "train" and client == 0 else answer

    room = Room(tmp_path, boast, rounds=1)
    room.run()
    assert room.status.of(0).accuracy is room.status.of(0).fault is None
    assert 0 <= room.status.accuracy <= 100
    assert all(0 <= value < 100 for value in room.status.history[0].seconds.values())


def test_an_operator_can_go_back_a_round(tmp_path, finished):
    room = Room(tmp_path)
    room.run()
    (last,) = [path for path in (tmp_path / "server").glob("*.safetensors") if ".before." not in path.name]
    last.unlink()
    assert_same(room.run(), simulate(room.terms))
    assert [each.round for each in room.status.history] == [1, 2]
    assert time.time() - 60 < room.status.at <= time.time()


def test_a_state_that_is_damaged_is_said_and_not_replaced(tmp_path):
    room = Room(tmp_path, rounds=1)
    room.run()
    (path,) = (tmp_path / "client-0").glob("*-1.safetensors")
    path.write_bytes(path.read_bytes()[:-7])
    room.config["rounds"] = 2
    progress = room.run()
    assert "client 0 in round 2" in progress.server.skipped[0]
    assert f"{path.name}, the client's state after round 1, is damaged; put back a copy" in progress.server.skipped[0]


def test_a_state_that_is_missing_is_begun_again_only_if_asked(tmp_path):
    room = Room(tmp_path, method="scaffold", rounds=1)
    room.run()
    (path,) = (tmp_path / "client-0").glob("*-1.safetensors")
    path.unlink()
    room.config["rounds"] = 2
    progress = room.run()
    assert f"{path.name}, the client's state after round 1, is missing; put it back" in progress.server.skipped[0]
    assert room.status.history[1].clients == [1, 2]

    ask = room.make_context

    def make_context(client):
        made = ask(client)
        made.node_config["anew"] = True
        return made

    room.make_context, room.config["rounds"] = make_context, 3
    assert len(room.run().server.skipped) == 1
    assert room.status.history[2].clients == [0, 1, 2]


def test_a_round_that_a_client_was_left_out_of_leaves_no_trace(tmp_path):
    """Its second round begins with the state that it had before the first. Scaffold's uploads depend on it."""

    def lose(client, kind, round, answer):
        return fail(answer, "gone") if (client, kind, round) == (1, "train", 1) else answer

    class Late(Room):
        """Client 1 joins after the first round."""

        def get_node_ids(self):
            begun = any(message.metadata.message_type == "train" for message in self.sent)
            return [node for node in self.nodes if begun or node != 101]

    lost = Room(tmp_path / "lost", lose, method="scaffold")
    late = Late(tmp_path / "late", method="scaffold")
    assert [run.run().round for run in (lost, late)] == [2, 2]
    assert [each.clients for each in late.status.history] == [[0, 2], [0, 1, 2]]
    assert_same(lost.progress, late.progress)


def test_a_node_that_was_mended_takes_part_in_the_next_round(tmp_path):
    own = {"dataset": "own", "classes": "a,b,c", "shape": "16x16x3", "settings": "batch=8"}

    def mend(client, kind, round, answer):
        if kind == "train" and not room.data[1].exists():
            write_pictures(room.data[1], 1)
        return answer

    room = Room(tmp_path, mend, **own)
    for k in range(CLIENTS):
        room.data[k] = tmp_path / f"data-{k}"
        if k != 1:
            write_pictures(room.data[k], k)
    room.run()
    assert [each.clients for each in room.status.history] == [[0, 2], [0, 1, 2]]


def test_only_accuracies_of_the_last_evaluation_count(tmp_path):
    def leave(client, kind, round, answer):
        return None if (client, kind, round) == (1, "evaluate", 2) else answer

    room = Room(tmp_path, leave, timeout=1.0, **{"evaluate-every": 1})
    room.run()
    assert room.status.of(1).accuracy is None
    assert room.status.accuracy == pytest.approx((room.status.of(0).accuracy + room.status.of(2).accuracy) / 2)


def test_a_message_that_expired_is_no_fault_of_the_node(tmp_path):
    def expire(client, kind, round, answer):
        if (client, kind, round) != (1, "train", 1):
            return answer
        time.sleep(1.1)
        return fail(answer, "expired", ErrorCode.MESSAGE_UNAVAILABLE)

    progress = Room(tmp_path, expire, timeout=1.0, rounds=1).run()
    assert "client 1 in round 1: no answer within 1 seconds" in progress.server.skipped[0]


def test_the_status_keeps_the_last_rounds(tmp_path, monkeypatch):
    monkeypatch.setattr(status, "MOST_ROUNDS", 2)
    room = Room(tmp_path, rounds=3, method="fedavg")
    room.run()
    assert [each.round for each in room.status.history] == [2, 3]


# ---- clients with data of their own


def write_pictures(folder, k):
    """Colours of two of three classes, as PNG files."""
    draw = np.random.default_rng(k)
    for c, name in ((k % 3, "abc"[k % 3]), ((k + 1) % 3, "abc"[(k + 1) % 3])):
        (folder / name).mkdir(parents=True)
        for i in range(24):
            pixels = draw.integers(0, 80, (20, 20, 3))
            pixels[..., c] += 150
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{i}.png")


def test_from_folders_of_pictures_to_a_predictor(tmp_path):
    own = {"dataset": "own", "classes": "a,b,c", "shape": "16x16x3", "settings": "local_epochs=2 batch=8 lr=0.05"}
    room = Room(tmp_path, rounds=4, **own)
    for k in range(CLIENTS):
        room.data[k] = tmp_path / f"data-{k}"
        write_pictures(room.data[k], k)
    room.run()
    assert room.status.accuracy > 90
    predictor = fedthe.load_bundle(tmp_path / "client-1" / "bundle")
    assert predictor.predict(np.asarray(Image.open(next((room.data[1] / "b").iterdir())))).label == "b"
    assert tuple(predictor.bundle.classes) == ("a", "b", "c")


def test_a_federation_file_gives_each_client_its_part(tmp_path):
    draw = np.random.default_rng(0)
    clients = []
    for k in range(CLIENTS):
        labels = (np.arange(30) + k) % 2
        x = draw.integers(0, 80, (30, 16, 16, 3)) + 150 * labels[:, None, None, None]
        clients.append((x.astype(np.uint8), labels))
    federation = fedthe.Federation.from_clients(clients, classes=["dark", "bright"])
    own = {"dataset": "own", "classes": "dark,bright", "shape": "16x16x3", "settings": "batch=8"}
    room = Room(tmp_path, **own)
    room.data = dict.fromkeys(range(CLIENTS), federation.save(tmp_path / "all.npz"))
    progress = room.run()
    assert progress.server.skipped == ()
    assert [each.rows for each in room.status.seen.values()] == [18] * 3
    methods, (work,) = prepare(replace(room.terms.config, dataset="x", clients=3, partition="given"), federation.source)
    (method,) = methods.values()
    expected = train(method.training, work.run.shards, room.terms.settings, 0, engine=Loop(threads=1))
    assert_same(progress, expected)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"method": "fedtha"}, "fedthe"),
        ({"rounds": 0}, "rounds must be a whole number"),
        ({"clients": "many"}, "clients must be"),
        ({"seed": True}, "seed"),
        ({"settings": "rounds=3"}, "settings cannot have rounds"),
        ({"settings": "unseen=0.2"}, "no clients that join later"),
        ({"settings": "learning=3"}, "there is no setting"),
        ({"settings": "attackers=0.2"}, "attacks are simulated by `fedthe run` alone"),
        ({"settings": "device=cuda"}, "settings cannot have device; it has no effect in a federation"),
        ({"settings": "lr='0.1"}, "settings cannot be read"),
        ({"dataset": "own"}, "classes must name"),
        ({"dataset": "own", "classes": "a,a"}, "classes must name"),
        ({"dataset": "own", "classes": "a,b"}, "shape must be"),
        ({"dataset": "own", "classes": "a,b", "shape": "32x32x2"}, "shape must be"),
        ({"dataset": "own", "classes": "a,b", "shape": "999999x1x3"}, "shape must be"),
        ({"dataset": "own", "classes": "a,b", "shape": "3x3x3"}, "crop must be less"),
        ({"dataset": "own", "classes": "a,b", "shape": "9x9x3", "kind": "sounds"}, "kind must be"),
        ({"dataset": "own", "classes": "a,b", "shape": "32x32x3", "settings": "standardize=true"}, "standardize"),
        ({"settings": "name=mine"}, "settings cannot have name; it has no effect in a federation"),
        ({"dataset": "own", "kind": "features", "settings": "flip=true"}, "flip; it has no effect on data that is not"),
        ({"dataset": "own", "settings": "train_fraction=0.5"}, "train_fraction; it has no effect on data that clients"),
        ({"dataset": "own", "settings": "feature_shift=rotation"}, "feature_shift; it has no effect"),
    ],
)
def test_bad_terms_are_refused_in_a_sentence(given, words):
    settings = "local_epochs=1" if "dataset" in given else QUICK
    fails(lambda: make_terms(read_defaults() | {"settings": settings} | given), words)


@pytest.mark.parametrize(
    "given", [{"timeout": 0}, {"wait": -1.0}, {"fewest": 0}, {"most-rows": "all"}, {"timeout": 1e999}]
)
def test_bad_options_are_refused_in_a_sentence(given):
    fails(lambda: server_app.read_options(read_defaults() | given), next(iter(given)))


def open_member(terms, node):
    return client_app.open_member(terms, client_app.read_node(node))


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ({}, "partition-id=0"),
        ({"partition-id": "0"}, "partition-id must be a whole number, without quotes, not '0'"),
        ({"partition-id": -1}, "partition-id=-1, but the clients of the run are 0 to 2"),
        ({"partition-id": 0, "threads": "2"}, "threads must be a whole number, without quotes"),
        ({"partition-id": 0, "secur": True}, "an unknown key, 'secur'; did you mean secure?"),
        ({"partition-id": 0, "secure": "false"}, "secure must be true or false, without quotes, not 'false'"),
        ({"partition-id": 0, "anew": 1}, "anew must be true or false"),
        ({"partition-id": 0, "threads": 0}, "threads"),
        ({"partition-id": 0, "device": "abacus"}, "device=abacus cannot be used on this node"),
        ({"partition-id": 0, "device": "cuda:99"}, "device=cuda:99 cannot be used on this node"),
        ({"partition-id": 0, "data": "x"}, "leave `data` out"),
    ],
)
def test_bad_node_configs_are_refused_in_a_sentence(node, words, finished):
    fails(lambda: open_member(finished.terms, node), words)


def test_data_that_does_not_fit_is_refused_in_a_sentence(tmp_path):
    terms = make_terms(read_defaults() | {"dataset": "own", "classes": "a,b", "shape": "16x16x3"})
    fails(lambda: open_member(terms, {"partition-id": 0}), "bring their data")
    write_pictures(tmp_path / "other", 1)
    node = {"partition-id": 0, "data": str(tmp_path / "other")}
    fails(lambda: open_member(terms, node), "class 'c'")
    (tmp_path / "plain").mkdir()
    Image.new("RGB", (16, 16)).save(tmp_path / "plain" / "0.png")
    fails(lambda: open_member(terms, node | {"data": str(tmp_path / "plain")}), "has no labels")
    fails(lambda: open_member(terms, node | {"data": str(tmp_path / "none")}), "none")
