"""Secure aggregation and differential privacy: what the server learns, and what comes of it."""

import hashlib
import math
import sys

import numpy as np
import pytest
import torch

flwr = pytest.importorskip("flwr")

from cryptography.hazmat.primitives import serialization  # noqa: E402
from cryptography.hazmat.primitives.asymmetric import ec  # noqa: E402
from flwr.app import Context, MetricRecord, RecordDict  # noqa: E402
from flwr.client.mod import secaggplus_mod  # noqa: E402
from flwr.common import bytes_to_ndarray, ndarray_to_bytes  # noqa: E402
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage  # noqa: E402
from flwr.server.workflow import SecAggPlusWorkflow  # noqa: E402

from fedthe import tree  # noqa: E402
from fedthe.deploy.flower import client_app, masks, messages, privacy, rounds, secure, server_app  # noqa: E402
from fedthe.deploy.flower.member import Member  # noqa: E402
from fedthe.deploy.flower.rounds import name_leaves  # noqa: E402
from fedthe.errors import Failed, InputError  # noqa: E402
from flower_room import Room, identity, simulate  # noqa: E402, F401
from helpers import fails  # noqa: E402

SECURE = {"secure-aggregation": True}


class Watched(Room):
    """A room that keeps what the server receives, and clients that keep Flower's state from message to message."""

    def __init__(self, *given, **config):
        super().__init__(*given, **config)
        self.contexts, self.received = {}, []

    def make_context(self, client):
        return self.contexts.setdefault(client, super().make_context(client))

    def pull_messages(self, wanted):
        found = super().pull_messages(wanted)
        self.received += [each for each in found if each.metadata.message_type == "train"]
        return found


def compare(room):
    one, other = room.progress, simulate(room.terms)
    mine, theirs = (name_leaves(each.server.shared, each.averages) for each in (one, other))
    return max(float((mine[name] - theirs[name]).abs().max()) for name in theirs)


@pytest.mark.parametrize("method", ["fedavg", "fedthe_regime", "fedbabu", "ditto"])
def test_secure_aggregation_gives_the_mean_and_shows_no_upload(tmp_path, method):
    room = Watched(tmp_path, method=method, **SECURE)
    room.run()
    assert compare(room) < 1e-4  # numbers are rounded to 2**22 steps in [-8, 8]
    assert len(room.received) == 4 * 3 * 2  # stages, clients, rounds
    assert [each.clients for each in room.status.history] == [[0, 1, 2]] * 2
    for reply in room.received:
        assert not any(len(record) for record in reply.content.array_records.values())
    assert {each.metadata.ttl for each in room.sent if each.metadata.message_type == "train"} == {60.0 + messages.LATE}
    masked = [reply.content.config_records[RECORD_KEY_CONFIGS].get(Key.MASKED_PARAMETERS) for reply in room.received]
    assert sum(each is not None for each in masked) == 3 * 2
    plain = tree.count_bytes(name_leaves(room.progress.server.shared, room.progress.averages))
    for spent in (each.bytes for each in room.status.history):
        assert plain < spent["down"] < 1.1 * plain + 10_000  # the model once, and keys
        assert 2 * plain < spent["up"] < 2.1 * plain + 10_000  # sums need eight bytes where a weight has four


def test_masks_are_those_of_shake_256(tmp_path):
    seed, shapes = bytes(range(32)), [(1,), (3, 2), (5,)]
    stream = hashlib.shake_256(seed).digest(4 * 12)
    expected = [int.from_bytes(stream[i : i + 4], "little") for i in range(0, 48, 4)]
    found = masks.draw_masks(seed, 2**32, shapes)
    assert [each.shape for each in found] == shapes
    assert [each.dtype for each in found] == [np.int64] * 3
    assert [int(number) for each in found for number in each.ravel()] == expected
    assert max(int(each.max()) for each in masks.draw_masks(seed, 2**10, [(999,)])) < 2**10
    with pytest.raises(ValueError, match="power of 2"):
        masks.draw_masks(seed, 1000, shapes)


def test_every_bit_of_a_seed_counts_and_flower_draws_with_it():
    """Flower's own generator folds the seed to 32 bits, so that all seeds can be tried."""
    seed = bytes(range(32))
    same_fold = seed[4:8] + seed[:4] + seed[8:]
    for other in (same_fold, *(flip(seed, bit) for bit in range(256))):
        assert (masks.draw_masks(seed, 2**32, [(9,)])[0] != masks.draw_masks(other, 2**32, [(9,)])[0]).any()
    for user in (secaggplus_mod, SecAggPlusWorkflow):
        assert sys.modules[user.__module__].pseudo_rand_gen is masks.draw_masks


def flip(seed, bit):
    return bytes(byte ^ (1 << bit % 8 if i == bit // 8 else 0) for i, byte in enumerate(seed))


def test_masks_are_spread_over_the_whole_range(tmp_path):
    room = Watched(tmp_path, rounds=1, **SECURE)
    room.run()
    configs = [reply.content.config_records[RECORD_KEY_CONFIGS] for reply in room.received]
    first = next(config[Key.MASKED_PARAMETERS] for config in configs if Key.MASKED_PARAMETERS in config)
    spread = np.concatenate([bytes_to_ndarray(part).ravel() for part in first[1:]]) / 2**32
    assert abs(spread.mean() - 0.5) < 0.02
    assert abs(spread.std() - math.sqrt(1 / 12)) < 0.02


def test_the_mean_of_those_who_hold_out_is_unmasked(tmp_path, capsys):
    def spoil(client, kind, round, reply):
        gone = client == 3 and kind == "train" and round == 1 and reply.content.array_records
        return None if gone else reply  # its masked upload never arrives

    room = Watched(tmp_path, spoil, clients=4, rounds=1, timeout=1.0, method="fedavg", **SECURE)
    room.run()
    assert measure_distance(room, train_without(tmp_path / "plain", [3], 4)) < 1e-4
    assert room.status.history[0].clients == [0, 1, 2]
    assert "client 3 is left out: no answer within 1 seconds" in capsys.readouterr().out


def in_stage(reply, key):
    """Whether a reply is that of the stage whose answer has this key."""
    return reply.has_content() and key in reply.content.config_records.get(RECORD_KEY_CONFIGS, {})


def train_without(folder, lost, clients, method="fedavg"):
    """The same round in the clear, without some clients."""

    def lose(client, kind, round, reply):
        return None if client in lost and kind == "train" else reply

    plain = Room(folder, lose, clients=clients, rounds=1, timeout=1.0, method=method)
    plain.run()
    return name_leaves(plain.progress.server.shared, plain.progress.averages)


def measure_distance(room, other):
    one = name_leaves(room.progress.server.shared, room.progress.averages)
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in other)


def test_a_round_goes_on_without_clients_lost_in_any_stage(tmp_path):
    stages = {3: Key.PUBLIC_KEY_1, 4: Key.DESTINATION_LIST, 5: Key.MASKED_PARAMETERS, 6: Key.SHARE_LIST}

    def spoil(client, kind, round, reply):
        gone = kind == "train" and client in stages and in_stage(reply, stages[client])
        return None if gone else reply

    room = Watched(tmp_path, spoil, clients=12, rounds=1, timeout=1.0, method="fedavg", **SECURE)
    room.run()
    # client 6 was lost after its upload had arrived
    assert room.status.history[0].clients == [0, 1, 2, 6, 7, 8, 9, 10, 11]
    assert measure_distance(room, train_without(tmp_path / "plain", [3, 4, 5], 12)) < 1e-4


def put(key, make):
    """A spoiled answer: another value under one key."""

    def spoil(config):
        config[key] = make(config[key])

    return key, spoil


def widen(arrays):
    """Arrays that broadcast to much larger ones."""
    like = bytes_to_ndarray(arrays[2])
    return [*arrays[:2], ndarray_to_bytes(np.zeros((50, *(1,) * like.ndim), np.int64)), *arrays[3:]]


WRONG_PARTS = {
    "no key": put(Key.PUBLIC_KEY_1, lambda key: b"no key"),
    "a key of another curve": put(Key.PUBLIC_KEY_2, lambda key: make_key(ec.SECP256R1())),
    "one key twice": put(Key.PUBLIC_KEY_1, lambda key: ONE_KEY),
    "shares for strangers": put(Key.DESTINATION_LIST, lambda nodes: [7, *nodes[1:]]),
    "shares for one client twice": put(Key.DESTINATION_LIST, lambda nodes: [nodes[1], *nodes[1:]]),
    "shares for too few": put(Key.DESTINATION_LIST, lambda nodes: nodes[1:]),
    "huge shares": put(Key.CIPHERTEXT_LIST, lambda shares: [bytes(10**6)] * len(shares)),
    "arrays of other shapes": put(Key.MASKED_PARAMETERS, widen),
    "an array less": put(Key.MASKED_PARAMETERS, lambda arrays: arrays[:-1]),
    "arrays of another type": put(
        Key.MASKED_PARAMETERS, lambda arrays: [ndarray_to_bytes(bytes_to_ndarray(a).astype(float)) for a in arrays]
    ),
    "no arrays": put(Key.MASKED_PARAMETERS, lambda arrays: [b""] * len(arrays)),
    "an array that claims more than it has": put(Key.MASKED_PARAMETERS, lambda arrays: [arrays[0][:-1], *arrays[1:]]),
}


def make_key(curve):
    public = ec.generate_private_key(curve).public_key()
    return public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


ONE_KEY = make_key(ec.SECP384R1())


@pytest.mark.parametrize("kind", WRONG_PARTS)
def test_a_part_that_cannot_be_used_is_left_out(tmp_path, kind, capsys):
    key, wrong = WRONG_PARTS[kind]

    def spoil(client, type, round, reply):
        if client == 3 and type == "train" and in_stage(reply, key):
            config = reply.content.config_records[RECORD_KEY_CONFIGS]
            wrong(config)
            if kind == "one key twice":
                config[Key.PUBLIC_KEY_2] = ONE_KEY
        return reply

    room = Watched(tmp_path, spoil, clients=4, rounds=1, method="fedavg", **SECURE)
    room.run()
    assert room.status.history[0].clients == [0, 1, 2]
    assert "client 3 is left out: its part of secure aggregation cannot be used" in capsys.readouterr().out
    assert measure_distance(room, train_without(tmp_path / "plain", [3], 4)) < 1e-4


def test_shares_of_others_than_asked_for_are_refused(tmp_path):
    def spoil(client, kind, round, reply):
        if client == 3 and kind == "train" and in_stage(reply, Key.SHARE_LIST):
            config = reply.content.config_records[RECORD_KEY_CONFIGS]
            config[Key.NODE_ID_LIST] = [*config[Key.NODE_ID_LIST][1:], 7]
        return reply

    room = Watched(tmp_path, spoil, clients=4, rounds=1, method="fedavg", **SECURE)
    room.run()
    assert measure_distance(room, train_without(tmp_path / "plain", [], 4)) < 1e-4  # three shares are enough


def test_a_sum_whose_shares_were_asked_for_is_not_asked_for_again(tmp_path):
    """One client sends shares that fit nothing: those of the others might do, so a second sum could tell too much."""

    def spoil(client, kind, round, reply):
        if client == 3 and kind == "train" and in_stage(reply, Key.SHARE_LIST):
            config = reply.content.config_records[RECORD_KEY_CONFIGS]
            config[Key.SHARE_LIST] = [bytes(reversed(share)) for share in config[Key.SHARE_LIST]]
        return reply

    room = Watched(tmp_path, spoil, clients=4, rounds=1, method="fedavg", **SECURE)
    with pytest.raises(Failed, match="asked to unmask the sum of round 1 already"):
        room.run()
    assert count_unmasked(room) == 4


def test_a_sum_of_too_few_shares_is_not_asked_for_again(tmp_path):
    """The shares that are missing may arrive later: then the server can unmask what it holds."""

    def spoil(client, kind, round, reply):
        lost = kind == "train" and client > 1 and in_stage(reply, Key.SHARE_LIST) and not room.mended
        return None if lost else reply

    room = Watched(tmp_path, spoil, clients=4, rounds=1, timeout=1.0, method="fedavg", **SECURE)
    for room.mended in (False, True):
        with pytest.raises(Failed, match="asked to unmask the sum of round 1 already"):
            room.run()
        assert count_unmasked(room) == 4
    (path,) = (tmp_path / "server").glob("*.unmasked")
    path.unlink()  # as the sentence says
    room.run()
    assert measure_distance(room, train_without(tmp_path / "plain", [], 4)) < 1e-4


@pytest.mark.parametrize("how", ["killed", "back"])
def test_a_server_that_starts_again_unmasks_no_round_twice(tmp_path, monkeypatch, how):
    room = Watched(tmp_path, clients=4, rounds=2, method="fedavg", **SECURE)
    checkpoint = tmp_path / "server" / f"{room.terms.id}.safetensors"
    with monkeypatch.context() as patch:
        if how == "killed":  # after the sum of the second round was unmasked, before its checkpoint
            finish = rounds.finish_round

            def stop(terms, progress, judged):
                if progress.round:
                    raise KeyboardInterrupt
                return finish(terms, progress, judged)

            patch.setattr(rounds, "finish_round", stop)
            with pytest.raises(KeyboardInterrupt):
                room.run()
        else:  # the operator goes back a round
            room.run()
            checkpoint.unlink()
    asked = count_unmasked(room)
    with pytest.raises(Failed, match="asked to unmask the sum of round 2 already") as caught:
        room.run()
    assert count_unmasked(room) == asked
    path = checkpoint.with_suffix(".unmasked")
    assert str(path) in str(caught.value)
    path.unlink()  # as the sentence says
    room.run()
    assert compare(room) < 1e-4


def test_a_round_with_too_few_clients_is_not_unmasked(tmp_path, capsys):
    def spoil(client, kind, round, reply):
        return None if client and kind == "train" and reply.content.array_records else reply

    room = Watched(tmp_path, spoil, timeout=1.0, **SECURE)
    with pytest.raises(Failed, match="round 1 failed: 0 clients can be used"):
        room.run()
    assert "client 0 is left out: too few clients completed secure aggregation" in capsys.readouterr().out


def test_a_client_answers_no_message_that_goes_around_the_masks(tmp_path):
    room = Watched(tmp_path, **SECURE)
    plain = Room(tmp_path / "plain")
    plain.run()
    message = next(each for each in plain.sent if each.metadata.message_type == "train")
    answer = client_app.app(message, room.make_context(0))
    assert "nothing is sent without masks" in messages.read_fault(answer)
    assert not answer.content.array_records
    # nor one of a kind that Flower's mod lets through
    room.run()
    message = next(each for each in room.sent if "fitins.parameters" in each.content.array_records)
    message.metadata.__dict__["_message_type"] = "train.default"
    answer = client_app.app(message, room.make_context(0))
    assert "nothing is sent without masks" in messages.read_fault(answer)
    assert not answer.content.array_records


def test_a_client_does_not_rely_on_the_server_to_refuse_what_masks_do_not_cover(tmp_path):
    plain = Room(tmp_path / "plain", method="fedthe_regime_lda", rounds=1)
    plain.run()
    room = Room(tmp_path, method="fedthe_regime_lda", rounds=1, **SECURE)
    for kind in ("query", "query.summarize", "evaluate"):
        message = next(each for each in plain.sent if each.metadata.message_type == kind)
        answer = client_app.app(message, room.make_context(0))
        assert "secure-aggregation does not cover the summary" in messages.read_fault(answer)
        assert not answer.content.array_records


def test_a_node_can_insist_on_secure_aggregation(tmp_path, capsys):
    room = Room(tmp_path, rounds=1)
    insist = room.make_context

    def make_context(client):
        made = insist(client)
        made.node_config["secure"] = client == 1
        return made

    room.make_context = make_context
    room.run()
    assert room.status.history[0].clients == [0, 2]
    assert "takes part in runs with secure-aggregation=true only" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"method": "gma", **SECURE}, ["gma", "needs each upload"]),
        ({"method": "scaffold", **SECURE}, ["scaffold", "needs each upload"]),
        ({"method": "fedthe_regime_lda", **SECURE}, ["summary"]),
        ({"method": "gma", "noise-multiplier": 1.0, "clipping-norm": 1.0}, ["gma"]),
        ({"settings": "aggregation=median", **SECURE}, ["plain mean only"]),
        ({"noise-multiplier": 1.0}, ["go together"]),
        ({"noise-multiplier": 1.0, "clipping-norm": 1.0, **SECURE}, ["set one"]),
        ({"noise-multiplier": -1.0}, ["noise-multiplier"]),
        ({"noise-multiplier": "much"}, ["noise-multiplier must be a number from 0 on, not much"]),
        ({"secure-aggregation": 1}, ["true or false"]),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, config, words):
    fails(Room(tmp_path, **config).run, *words)


def test_numbers_beside_a_masked_upload_stop_nothing(tmp_path, monkeypatch):
    honest = Member.train

    def train(member, model):
        done = honest(member, model)
        return done._replace(loss=float("nan")) if member.number == 1 else done

    monkeypatch.setattr(Member, "train", train)
    room = Watched(tmp_path, **SECURE)
    room.run()
    assert compare(room) < 1e-4
    assert [each.clients for each in room.status.history] == [[0, 1, 2]] * 2
    assert all(0 <= each.loss < 10 for each in room.status.history)


def test_a_client_that_claims_many_rows_does_not_drown_the_others(tmp_path, monkeypatch):
    asked, collect = [], server_app.secure.collect
    monkeypatch.setattr(
        server_app.secure,
        "collect",
        lambda mail, context, *given: asked.append(given[0]) or collect(mail, context, *given),
    )

    def boast(client, kind, round, reply):
        if client == 0 and kind == "query":
            reply.content["metrics"] = MetricRecord({**reply.content["metrics"], "rows": 1_000_000})
        return reply

    room = Watched(tmp_path, boast, rounds=1, **SECURE)
    room.run()
    rows = [len(shard.train) for shard in room.terms.federation.clients]
    assert asked[0].most <= 8 * max(rows)
    assert compare(room) < 1e-4


def count_unmasked(room):
    """How many clients were asked for what unmasks a sum."""
    configs = [each.content.config_records.get(RECORD_KEY_CONFIGS, {}) for each in room.sent]
    return sum(config.get(Key.STAGE) == Stage.UNMASK for config in configs)


def test_a_sum_of_fewer_clients_than_asked_is_not_unmasked(tmp_path, capsys):
    def spoil(client, kind, round, reply):
        return None if client == 3 and kind == "train" and reply.content.array_records else reply

    room = Watched(tmp_path, spoil, clients=4, rounds=1, timeout=1.0, fewest=4, **SECURE)
    with pytest.raises(Failed, match="round 1 failed: 0 clients can be used, but fewest=4"):
        room.run()
    assert count_unmasked(room) == 0  # else the next try would give the difference of two sums
    assert "client 3 is left out: no answer within 1 seconds" in capsys.readouterr().out


def test_at_least_two_thirds_of_the_shares_unmask_a_sum(tmp_path, monkeypatch):
    thresholds, collect = [], secure.collect

    def note(*given):
        workflow = secure._Workflow(given[2], 1.0)
        thresholds.append(workflow.reconstruction_threshold)
        return collect(*given)

    monkeypatch.setattr(secure, "collect", note)

    def spoil(client, kind, round, reply):
        return None if kind == "train" and client > 2 and in_stage(reply, Key.MASKED_PARAMETERS) else reply

    room = Watched(tmp_path, spoil, clients=5, rounds=1, timeout=1.0, method="fedavg", **SECURE)
    with pytest.raises(Failed, match="round 1 failed: 0 clients can be used"):  # 3 of 5 are 60 %
        room.run()
    assert count_unmasked(room) == 0
    assert thresholds == [4] * 3
    asked = secure.Asked({}, 0, "0", dict.fromkeys(range(100), 0), 1, 1, None)
    assert secure._Workflow(asked, 1.0).reconstruction_threshold == 21  # of 31


def test_a_masked_upload_of_rows_that_are_no_number_is_left_out(tmp_path, capsys):
    def spoil(client, kind, round, reply):
        if client == 0 and "fitres.num_examples" in reply.content.metric_records:
            reply.content["fitres.num_examples"] = MetricRecord({"num_examples": [1]})
        return reply

    room = Watched(tmp_path, spoil, clients=4, rounds=1, method="fedavg", **SECURE)
    room.run()
    assert room.status.history[0].clients == [1, 2, 3]
    assert "client 0 is left out: its part of secure aggregation cannot be used" in capsys.readouterr().out


def test_a_masked_upload_that_counts_too_much_is_left_out(tmp_path, capsys):
    """A hostile client: an honest one counts no more than it is told."""

    def boast(client, kind, round, reply):
        if client == 0 and "fitres.num_examples" in reply.content.metric_records:
            reply.content["fitres.num_examples"] = MetricRecord({"num_examples": 10**9})
        return reply

    room = Watched(tmp_path, boast, clients=4, rounds=1, **SECURE)
    room.run()
    assert room.status.history[0].clients == [1, 2, 3]
    assert "client 0 is left out: it claims 1e+09 training rows" in capsys.readouterr().out
    assert count_unmasked(room) == 3
    assert measure_distance(room, train_without(tmp_path / "plain", [0], 4, "fedthe")) < 1e-4


# ---- differential privacy


def test_a_run_with_noise_does_not_continue_one_without(tmp_path, capsys):
    Room(tmp_path, rounds=1).run()
    room = Room(tmp_path, rounds=2, **{"noise-multiplier": 1.0, "clipping-norm": 1.0})
    server_app.app(room, Context(1, 0, {}, RecordDict(), room.config))
    assert "going on" not in capsys.readouterr().out
    assert [each.round for each in room.status.history] == [1, 2]


def test_noise_has_the_promised_size_and_updates_the_promised_length():
    torch.manual_seed(0)
    before = {"a": torch.randn(300, 100), "b": torch.randn(())}
    sent = [{name: leaf + 100 * torch.randn(leaf.shape) for name, leaf in before.items()} for _ in range(4)]
    noise = privacy.Noise(1.5, 2.0)
    found = privacy.average(before, sent, noise)
    clipped = [_clip(before, leaves, 2.0) for leaves in sent]
    mean = {name: torch.stack([leaves[name] for leaves in clipped]).mean(0) for name in before}
    std = (found["a"] - mean["a"]).std()
    assert float(std) == pytest.approx(1.5 * 2.0 / 4, rel=0.03)
    assert found["b"].shape == ()
    assert found["a"].dtype == torch.float32


def _clip(before, leaves, norm):
    length = math.sqrt(sum(float((leaves[name] - before[name]).square().sum()) for name in before))
    return {name: before[name] + (leaves[name] - before[name]) * min(1, norm / length) for name in before}


def test_short_updates_are_left_alone():
    before = {"a": torch.zeros(4), "b": torch.ones(2)}
    sent = [{"b": torch.full((2,), 1.5), "a": torch.full((4,), value)} for value in (0.1, 0.3)]  # in another order
    found = privacy.average(before, sent, privacy.Noise(1e-9, 10.0))
    torch.testing.assert_close(found["a"], torch.full((4,), 0.2))
    torch.testing.assert_close(found["b"], torch.full((2,), 1.5))


@pytest.mark.parametrize("change", [0.0, 1e-30])
def test_a_client_that_changed_nothing_counts(change):
    before = {"a": torch.ones(4), "b": torch.zeros(2)}
    sent = [{"a": torch.ones(4), "b": torch.full((2,), change)}, {"a": torch.ones(4) + 1, "b": torch.zeros(2)}]
    found = privacy.average(before, sent, privacy.Noise(1e-9, 10.0))
    torch.testing.assert_close(found["a"], torch.full((4,), 1.5))


def test_epsilon_is_that_of_the_gaussian_mechanism():
    # zero-concentrated privacy of T rounds is T / (2 z^2); by hand for z = 2, T = 8: rho = 1
    assert privacy.bound_epsilon(privacy.Noise(2.0, 1.0), 8, 1e-5) == pytest.approx(1 + 2 * math.sqrt(math.log(1e5)))
    # it may only be larger than the exact epsilon of one release (Balle and Wang 2018), found by bisection
    for z in (0.8, 1.0, 3.0):
        assert privacy.bound_epsilon(privacy.Noise(z, 1.0), 1, 1e-5) > _find_epsilon(z, 1e-5)


def _find_epsilon(z, delta):
    def spent(epsilon):
        normal = lambda x: 0.5 * math.erfc(-x / math.sqrt(2))  # noqa: E731
        return normal(0.5 / z - epsilon * z) - math.exp(epsilon) * normal(-0.5 / z - epsilon * z)

    low, high = 0.0, 100.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if spent(middle) > delta else (low, middle)
    return high


@pytest.mark.parametrize("method", ["fedavg", "fedthe"])
def test_a_federation_with_noise(tmp_path, method, capsys):
    """The descriptor of FedTHE is noised with the weights."""
    noised = {"noise-multiplier": 0.5, "clipping-norm": 0.2}
    room = Room(tmp_path, method=method, rounds=1, **noised)
    room.run()
    one, other = room.progress, simulate(room.terms)
    before = rounds.start(room.terms)
    for name, leaf in name_leaves(one.server.shared, one.averages).items():
        start = name_leaves(before.server.shared, before.averages)[name]
        rest = leaf - start
        if leaf.numel() > 500:  # clipped to 0.2 in all, so nearly all of it is noise
            assert float(rest.std()) == pytest.approx(0.5 * 0.2 / 3, rel=0.2)
    assert one.averages.keys() == other.averages.keys()
    assert "epsilon is at most 11.6 at delta 1e-05, if no round is repeated" in capsys.readouterr().out


def test_without_noise_nothing_is_said_of_it(tmp_path):
    assert server_app.read_options(Room(tmp_path).config).noise is None
    with pytest.raises(InputError):
        privacy.read_noise(0.0, 1.0)
