"""Rules of the server against wrong uploads: against literal ones, in every engine, and under attack."""

import math
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import fedthe
import oracles
import oracles_robust as robust
from fedthe import tree
from fedthe.config import Config
from fedthe.engine.loop import Loop
from fedthe.engine.robust import Attack, Defense, check_effect, choose_trusted, find_start, guard, scale_update
from fedthe.engine.server import Sent, Server, aggregate
from fedthe.engine.stack import Stack
from fedthe.engine.train import start, train, train_together
from fedthe.engine.visit import Run, Training
from fedthe.methods.base import FedAvg, Rounds
from fedthe.methods.compose import compose
from fedthe.methods.scaffold import Scaffold
from helpers import fails
from literal_rounds import CLIENTS, DECAY, LR, ROWS, SETTINGS, assert_near, draw_batches, every_engine, train_in_doubles
from tiny_net import TINY, leaves, make_shard, tiny_params

RULES = ["mean", "median", "trimmed_mean", "multi_krum"]
numbers = st.floats(-100, 100, allow_nan=False, width=32)
stacks = st.integers(1, 9).flatmap(
    lambda n: st.lists(st.lists(numbers, min_size=5, max_size=5), min_size=n, max_size=n)
)
START = {"body": {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)}, "b": torch.tensor(-1.0).double()}


def to_tree(uploads):
    """Stacked uploads of these updates [clients][5], in double precision."""
    rows = torch.tensor(uploads, dtype=torch.float64)
    updates = {"body": {"w": rows[:, :4].reshape(-1, 2, 2)}, "b": rows[:, 4]}
    return tree.map_leaves(torch.add, updates, START)


def to_rows(uploads):
    updates = tree.map_leaves(torch.sub, uploads, START)
    return torch.cat([updates["body"]["w"].flatten(1), updates["b"][:, None]], 1)


def assert_rows(uploads, expected):
    torch.testing.assert_close(to_rows(uploads), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-9)


@given(stacks)
def test_the_median_is_the_literal_one(uploads):
    guarded = guard(Defense("median"), START, to_tree(uploads))
    assert_rows(guarded, [robust.median(uploads)] * len(uploads))


@given(stacks, st.floats(0, 0.49))
def test_the_trimmed_mean_is_the_literal_one(uploads, share):
    defense = Defense("trimmed_mean", share)
    wrong = min(math.ceil(round(share * len(uploads), 6)), (len(uploads) - 1) // 2)
    assert_rows(guard(defense, START, to_tree(uploads)), [robust.trimmed_mean(uploads, wrong)] * len(uploads))


@given(stacks, st.floats(0, 0.49))
def test_multi_krum_chooses_what_the_literal_one_does(uploads, share):
    defense = Defense("multi_krum", share)
    wrong = max(0, min(math.ceil(round(share * len(uploads), 6)), (len(uploads) - 3) // 2))
    chosen = choose_trusted(defense, START, to_tree(uploads))
    chosen = list(range(len(uploads))) if chosen is None else chosen.tolist()
    literal = robust.multi_krum([row.tolist() for row in to_rows(to_tree(uploads))], wrong)
    if chosen != literal:  # only sums that are the same but for rounding may be ordered differently
        assert len(chosen) == len(literal)
        scores = [score_krum(uploads, i, wrong) for i in range(len(uploads))]
        worst = [max(scores[i] for i in some) for some in (chosen, literal)]
        assert worst[0] == pytest.approx(worst[1], rel=1e-9, abs=1e-9)


def score_krum(uploads, i, wrong):
    squares = sorted(math.dist(uploads[i], other) ** 2 for j, other in enumerate(uploads) if j != i)
    return sum(squares[: len(uploads) - wrong - 2])


@pytest.mark.parametrize(("clients", "wrong"), [(5, 1), (7, 2), (9, 3), (11, 4)])
def test_multi_krum_leaves_out_as_many_colluders_as_it_can_tell(clients, wrong):
    """They send the same, and `byzantine` expects more of them than there can be."""
    honest = [[1.0 + 0.01 * i] * 5 for i in range(clients - wrong)]
    chosen = choose_trusted(Defense("multi_krum", 0.45), START, to_tree([[-100.0] * 5] * wrong + honest))
    assert chosen.tolist() == list(range(wrong, clients))


def test_multi_krum_of_four_leaves_nobody_out():
    assert choose_trusted(Defense("multi_krum", 0.45), START, to_tree([[float(i)] * 5 for i in range(4)])) is None


@given(stacks, st.floats(0.1, 3))
def test_clipping_is_the_literal_one(uploads, times):
    assert_rows(guard(Defense(clip=times), START, to_tree(uploads)), robust.clip(uploads, times))


def test_an_update_within_the_bound_is_not_touched_by_a_bit():
    uploads = tree.map_leaves(torch.Tensor.float, to_tree([[0.1, 0.2, 0.3, 0.4, 0.5]] * 4 + [[9.0] * 5]))
    start = tree.map_leaves(torch.Tensor.float, START)
    clipped = guard(Defense(clip=1.0), start, uploads)
    assert all(torch.equal(one[:4], other[:4]) for one, other in pair_leaves(clipped, uploads))
    assert not any(torch.equal(one[4], other[4]) for one, other in pair_leaves(clipped, uploads))


def pair_leaves(one, other):
    return zip(tree.flatten(one).values(), tree.flatten(other).values(), strict=True)


@pytest.mark.parametrize("rule", ["median", "trimmed_mean", "multi_krum"])
@given(st.lists(st.lists(st.floats(-1, 1, width=32), min_size=5, max_size=5), min_size=8, max_size=8), st.data())
def test_two_of_ten_move_nothing_beyond_what_the_others_sent(rule, honest, data):
    wild = st.lists(st.floats(-1e6, 1e6, width=32), min_size=5, max_size=5)
    uploads = to_tree([*honest, data.draw(wild), data.draw(wild)])
    weights = torch.tensor([1.0] * 8 + [1e9] * 2).double()  # they claim to have most of the rows, too
    shared, _ = aggregate(Rounds(), Defense(rule), Server(0, START), [], Sent(uploads, []), weights)
    moved = to_rows(tree.map_leaves(lambda leaf: leaf[None], shared))[0]
    sent = torch.tensor(honest, dtype=torch.float64)
    if rule == "multi_krum":  # what is chosen is at most as far from its neighbours as they are from each other
        assert moved.abs().max() <= 1 + 2 * math.sqrt(5) * 2
    else:
        assert ((moved >= sent.min(0).values - 1e-6) & (moved <= sent.max(0).values + 1e-6)).all()


@pytest.mark.parametrize("rule", RULES)
def test_uploads_that_are_all_the_same_are_the_result(rule):
    uploads = to_tree([[0.5, -1.0, 2.0, 0.25, 3.0]] * 7)
    weights = torch.arange(1, 8).double()
    shared, _ = aggregate(Rounds(), Defense(rule, clip=1.0), Server(0, START), [], Sent(uploads, []), weights)
    assert_rows(tree.map_leaves(lambda leaf: leaf[None], shared), [[0.5, -1.0, 2.0, 0.25, 3.0]])


def test_what_goes_beside_uploads_is_guarded_too():
    """Averages come from the clients whose uploads are trusted, and are clipped and combined as these are."""
    uploads = to_tree([[0.1 * i] * 5 for i in range(8)] + [[50.0] * 5] * 2)
    beside = {"h": torch.tensor([[1.0 + i / 10] for i in range(8)] + [[1e6]] * 2).double()}
    before, weights = {"h": torch.zeros(1).double()}, torch.ones(10).double()
    means = {}
    for rule in RULES:
        sent = Sent(uploads, [beside])
        _, (average,) = aggregate(Rounds(), Defense(rule), Server(0, START), [before], sent, weights)
        means[rule] = float(average["h"])
    assert means["mean"] == pytest.approx(beside["h"].mean())
    assert means["multi_krum"] == pytest.approx(1.35)
    assert means["median"] == pytest.approx(1.45)
    assert means["trimmed_mean"] == pytest.approx(sum([1.2, 1.3, 1.4, 1.5, 1.6, 1.7]) / 6)
    _, (clipped,) = aggregate(Rounds(), Defense(clip=1.0), Server(0, START), [before], sent, weights)
    assert float(clipped["h"]) < 1.5


def test_what_goes_beside_honest_uploads_is_judged_for_itself():
    uploads = to_tree([[0.1 * i] * 5 for i in range(10)])
    beside = {"h": torch.tensor([[1.0 + i / 10] for i in range(9)] + [[1e17]]).double()}
    sent, before = Sent(uploads, [beside]), {"h": torch.zeros(1).double()}
    for rule in ("multi_krum", "median", "trimmed_mean"):
        _, (average,) = aggregate(Rounds(), Defense(rule), Server(0, START), [before], sent, torch.ones(10).double())
        assert 1 <= float(average["h"]) <= 1.8


@pytest.mark.parametrize("defense", [Defense(), Defense(clip=1.0), Defense("multi_krum")], ids=["none", "clip", "krum"])
def test_claimed_rows_count_twice_the_median_at_most_where_there_is_a_defense(defense):
    uploads = to_tree([[float(i)] * 5 for i in range(5)])
    weights = torch.tensor([10.0, 20.0, 30.0, 40.0, 1e6]).double()
    believed = weights if defense == Defense() else torch.tensor([10.0, 20.0, 30.0, 40.0, 60.0]).double()
    lengths = [i * 1.0 for i in range(5)]
    moved = [min(value, 2.0) for value in lengths] if defense.clip else lengths  # the median length
    chosen = [0, 1, 2, 3, 4]
    if defense.rule == "multi_krum":
        chosen = robust.multi_krum([[value] * 5 for value in lengths], 1)
    expected = sum(float(believed[i]) * moved[i] for i in chosen) / float(believed[chosen].sum())
    shared, _ = aggregate(Rounds(), defense, Server(0, START), [], Sent(uploads, []), weights)
    assert_rows(tree.map_leaves(lambda leaf: leaf[None], shared), [[expected] * 5])


def test_scaffolds_changes_are_updates_of_zero_and_are_added_up():
    def pair(body, head):
        return {"body": {"w": torch.tensor(body)}, "head": {"w": torch.tensor(head)}}

    rounds, shared = Scaffold(), pair([1.0], [1.0]) | {"control": pair([5.0], [7.0])}
    first = find_start(rounds, shared)
    assert tree.flatten(first) == tree.flatten(pair([1.0], [1.0]) | {"control": pair([0.0], [0.0])})
    uploads = pair([[2.0]] * 3, [[3.0]] * 3) | {"control": pair([[1.0], [2.0], [90.0]], [[0.0], [4.0], [1.0]])}
    new, _ = aggregate(rounds, Defense("median"), Server(0, shared), [], Sent(uploads, []), torch.ones(3))
    assert float(new["control"]["body"]["w"]) == 5 + 3 * 2  # three clients, each with the median
    assert float(new["control"]["head"]["w"]) == 7 + 3 * 1
    flipped = scale_update(-1, first, tree.take(uploads, 0))
    assert tree.flatten(flipped) == tree.flatten(pair([0.0], [-1.0]) | {"control": pair([-1.0], [0.0])})


def test_leaves_that_are_not_numbers_of_floating_point_pass():
    uploads = {"w": torch.tensor([[1.0], [2.0], [9.0]]), "count": torch.tensor([3, 4, 5])}
    start = {"w": torch.zeros(1), "count": torch.tensor(0)}
    guarded = guard(Defense("median", clip=1.0), start, uploads)
    assert guarded["count"].tolist() == [3, 4, 5]


# ---- whole trainings


FIVE = [*CLIENTS, make_shard(9, 5, [1, 2], seed=4), make_shard(8, 5, [0], seed=5)]
FIVE_ROWS = [*ROWS, 9, 8]


def train_literally(rule, attackers=(), factor=-1.0):
    """FedAvg with all five clients. rule: lists of numbers and rows -> the list that the server takes."""
    first = leaves(tiny_params())
    model = torch.cat([leaf.flatten() for leaf in first])

    def split(model):
        body, head = model.split([leaf.numel() for leaf in first])
        return body.view(first[0].shape), head.view(first[1].shape)

    for number in range(SETTINGS.rounds):
        uploads = []
        for k in range(len(FIVE)):
            sent = oracles.fine_tune(*split(model), draw_batches(k, number, clients=FIVE), LR, DECAY)
            update = torch.cat([leaf.flatten() for leaf in sent]) - model
            uploads.append((factor * update if k in attackers else update).tolist())
        model = model + torch.tensor(rule(uploads), dtype=torch.float64)
    return split(model)


def average(uploads, places=range(5)):
    total = sum(FIVE_ROWS[k] for k in places)
    return [sum(FIVE_ROWS[k] * uploads[k][i] for k in places) / total for i in range(len(uploads[0]))]


LITERAL = {
    Defense(): average,
    Defense("median"): robust.median,
    Defense("trimmed_mean", 0.3): lambda uploads: robust.trimmed_mean(uploads, 2),
    Defense("multi_krum", 0.3): lambda uploads: average(uploads, robust.multi_krum(uploads, 1)),
    Defense(clip=0.8): lambda uploads: average(robust.clip(uploads, 0.8)),
    Defense("median", clip=0.8): lambda uploads: robust.median(robust.clip(uploads, 0.8)),
}
EVERYBODY = replace(SETTINGS, participation=1.0)


@pytest.mark.parametrize("defense", LITERAL, ids=str)
@every_engine
def test_a_whole_training_is_the_literal_one(defense, engine):
    attack = Attack(0.2, -3.0)
    (attacker,) = attack.choose(range(5), 0)
    settings = replace(EVERYBODY, defense=defense, attack=attack)
    found = leaves(train_in_doubles(compose(TINY, FedAvg()), engine(), settings, FIVE).server.shared)
    assert_near(found, train_literally(LITERAL[defense], [attacker], -3.0), 1e-6)  # the server's weights are float32
    assert any(not torch.allclose(a, b) for a, b in zip(found, train_literally(average), strict=True))


@pytest.mark.parametrize("name", fedthe.METHODS)
def test_every_method_trains_with_every_rule_under_attack(name):
    method = compose(TINY, fedthe.METHODS[name])
    clients = [make_shard(8, 5, [k % 3, (k + 1) % 3], seed=k) for k in range(5)]
    for defense in (Defense("median", clip=2.0), Defense("trimmed_mean"), Defense("multi_krum", clip=1.0)):
        settings = replace(EVERYBODY, rounds=2, local_epochs=1, defense=defense, attack=Attack(0.2, 20.0))
        reached = [train(method, clients, settings, 0, engine=engine) for engine in (Loop(), Stack())]
        for a, b in pair_leaves(*(progress.server.shared | progress.averages for progress in reached)):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_methods_that_are_trained_side_by_side_get_what_each_gets_alone():
    two_heads = compose(TINY, fedthe.METHODS["fedthe"]).training
    methods = [two_heads.core, two_heads]
    for rule in RULES:
        s = replace(EVERYBODY, rounds=2, defense=Defense(rule, clip=1.0), attack=Attack(1 / 3))
        reached = [[start(method, 3, 0) for method in methods]]
        ((plain, two),) = train_together(methods, [Run(0, CLIENTS)], s, reached, Loop())
        alone = train(two_heads, CLIENTS, s, 0)
        assert all(torch.equal(a, b) for a, b in pair_leaves(plain.server.shared, two.server.shared))
        assert all(torch.equal(a, b) for a, b in pair_leaves(alone.server.shared, two.server.shared))
        assert torch.equal(alone.averages["descriptor"], two.averages["descriptor"])


def test_attackers_are_drawn_once_among_those_who_take_part():
    attack = Attack(0.2)
    assert attack.choose(range(20), 0) == attack.choose(range(20), 0)
    assert {len(attack.choose(range(20), seed)) for seed in range(5)} == {4}
    assert len({tuple(sorted(attack.choose(range(20), seed))) for seed in range(5)}) > 1
    assert attack.choose([3, 5, 7, 9, 11], 0) < {3, 5, 7, 9, 11}
    assert Attack().choose(range(20), 0) == set()


def test_an_attack_that_cannot_be_computed_with_is_refused_as_any_such_upload():
    settings = replace(EVERYBODY, attack=Attack(1 / 3, 1e30), tolerate="skip")
    server = train(compose(TINY, FedAvg()), CLIENTS, settings, 0).server
    assert len(server.skipped) == settings.rounds
    assert "more than can be computed with; left out" in server.skipped[0]


# ---- settings


def test_records_from_before_stay_valid():
    assert "defense" not in Training().describe()
    assert "attack" not in Training().describe()
    assert Training(defense=Defense("median")).describe()["defense"]["rule"] == "median"
    assert Training(attack=Attack(0.1)).describe()["attack"] == {"share": 0.1, "factor": -1.0}


def test_settings_reach_the_training():
    config = Config(aggregation="multi_krum", byzantine=0.3, clip=2.0, attackers=0.25, attack=10.0)
    assert config.training.defense == Defense("multi_krum", 0.3, 2.0)
    assert config.training.attack == Attack(0.25, 10.0)
    assert Config().training.defense == Defense()


@pytest.mark.parametrize(
    ("defense", "attack", "sampled", "words"),
    [
        (
            Defense("multi_krum"),
            Attack(),
            4,
            "multi_krum leaves out nobody in rounds of 4 clients; it needs at least 5",
        ),
        (Defense("multi_krum", 0.0), Attack(), 20, "byzantine above 0"),
        (Defense("trimmed_mean"), Attack(), 2, "trimmed_mean leaves out nobody in rounds of 2 clients"),
        (Defense(), Attack(0.02), 20, "attackers=0.02 of 20 clients is none; set at least 0.05"),
    ],
)
def test_what_would_change_nothing_is_refused(defense, attack, sampled, words):
    fails(lambda: check_effect(defense, attack, 20, sampled), words)
    for rule, enough in (("multi_krum", 5), ("trimmed_mean", 3), ("median", 1), ("mean", 1)):
        check_effect(Defense(rule), Attack(0.05), 20, enough)


def test_a_run_in_which_a_rule_changes_nothing_is_refused(data):
    krum = {"dataset": data, "methods": ["fedavg"], "aggregation": "multi_krum", "device": "cpu"}
    fails(lambda: fedthe.run(**krum, clients=10, participation=0.3), "leaves out nobody in rounds of 3 clients")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"aggregation": "krum"}, "median"),
        ({"aggregation": "trimmed_mean", "byzantine": 0.5}, "below 0.5"),
        ({"aggregation": "multi_krum", "byzantine": float("nan")}, "byzantine"),
        ({"byzantine": 0.1}, "no effect without aggregation"),
        ({"clip": 0.0}, "clip must be a positive number"),
        ({"clip": float("inf")}, "clip"),
        ({"attackers": 1.0}, "below 1"),
        ({"attackers": -0.1}, "at least 0"),
        ({"attack": 10.0}, "no effect without attackers"),
        ({"attackers": 0.2, "attack": float("nan")}, "finite"),
    ],
)
def test_bad_settings_are_refused(given, words):
    fails(lambda: Config(**given), words)
