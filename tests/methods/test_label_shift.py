"""Label-shift methods, judged by literal versions, by hand-worked numbers and by what they must find."""

import math
from functools import cache

import numpy as np
import pytest
import torch

import oracles_label_shift as oracles
from fedthe import tree
from fedthe.data import load_dataset
from fedthe.data.plan import Settings, build
from fedthe.data.pool import Dataset, Pool
from fedthe.engine.fit import Optimizer
from fedthe.engine.loop import Loop
from fedthe.engine.shards import Shards
from fedthe.engine.stack import Stack
from fedthe.engine.train import deploy_some, train
from fedthe.engine.visit import Question, Run, Training
from fedthe.errors import InputError
from fedthe.methods import compose
from fedthe.methods.base import FedAvg, Samples
from fedthe.methods.bbse import BBSE, confusion, prior_by_bbse
from fedthe.methods.em import EM, prior_by_em
from fedthe.methods.fmapls import FMAPLS, update_prior
from fedthe.methods.label_shift import adjust, describe_prior, smooth_prior
from fedthe.methods.logit_adjust import LogitAdjust
from fedthe.methods.two_heads import TwoHeads, heads
from fedthe.nets import CNN
from fedthe.types import scale

torch.set_num_threads(1)

NET = CNN(10, size=16)
CLIENTS, SAMPLES = 3, 40
SETTINGS = Training(rounds=6, local_epochs=2, batch=32, crop=0, flip=False, optimizer=Optimizer(lr=0.05, momentum=0.9))
PREDICTORS = {
    "logit_adjust": LogitAdjust(tau=0.8, smoothing=0.2),
    "em": EM(buffer=15, steps=7),
    "bbse": BBSE(pseudo=5.0, ridge=0.05, shrinkage=4.0),
    "bbse, soft": BBSE(soft=True),
    "fmapls": FMAPLS(),
    "fmapls, free": FMAPLS(strength=3.0, anchor=0.0, rate=0.9, smoothing=0.01),
}
every_predictor = pytest.mark.parametrize("predictor", PREDICTORS.values(), ids=PREDICTORS)


@cache
def federation():
    """900 glyphs, each client with few classes."""
    pool = load_dataset("glyphs", size=16).pool
    few = Pool("few glyphs", pool.x[:900], pool.labels[:900], pool.classes)
    return build(Dataset(few), Settings(clients=CLIENTS, dirichlet=0.1))


@cache
def deployed():
    """FedTHE's training of a client, states [clients, ...]."""
    method, shards = method_of(EM()), Shards(federation())
    progress = train(method.training, shards, SETTINGS, seed=0)
    return shards, deploy_some(method, Run(0, shards), SETTINGS, progress, Loop(), range(CLIENTS))


def exact(values):
    return torch.tensor(values, dtype=torch.float64)


def method_of(predictor):
    return compose(NET, (FedAvg(balanced=True), TwoHeads(), predictor))


def client(k):
    shards, states = deployed()
    return shards[k], tree.take(states, k)


def pixels_of(k, test="mixture"):
    stream = federation().tests[test][k]
    return federation().inputs(stream.take(np.arange(min(len(stream), SAMPLES))))


def answer(predictor, k, chunk=SAMPLES, test="mixture", shard=None):
    """The answers to a stream in chunks, and its global logits."""
    method, (own, mine) = method_of(predictor), client(k)
    x, logits, info = scale(torch.from_numpy(pixels_of(k, test))), [], []
    with torch.no_grad():
        state = predictor.start(method, mine, shard or own)
        for part in x.split(chunk):
            answers, state = predictor.answer(method, mine, state, Samples(part, lambda positions: positions))
            logits.append(answers.logits)
            info.append(answers.info.get("effective_classes", torch.empty(0)))
        return torch.cat(logits), torch.cat(info), heads(NET, mine, x)[1]


def expect(predictor, z, shard, mine):
    """The priors of the literal version, for the global head's logits z."""
    if isinstance(predictor, LogitAdjust):
        own = oracles.own_prior(shard.counts, predictor.smoothing)
        return [[p**predictor.tau for p in own]] * len(z)
    if isinstance(predictor, EM):
        return oracles.em_priors(z, predictor.buffer, predictor.steps)
    if isinstance(predictor, BBSE):
        with torch.no_grad():
            of_val = heads(NET, mine, scale(shard.val_x))[1].tolist()
        table = oracles.confusion(of_val, shard.val_labels.tolist(), predictor.soft, predictor.shrinkage)
        source = oracles.own_prior(shard.counts, 1 / 16)
        return oracles.bbse_priors(z, table, source, predictor.soft, predictor.ridge, predictor.pseudo)
    own = oracles.own_prior(shard.counts, predictor.smoothing)
    return oracles.fmapls_priors(z, own, predictor.strength, predictor.anchor, predictor.rate)


@every_predictor
@pytest.mark.parametrize("k", range(CLIENTS))
def test_a_real_stream_is_answered_as_by_the_literal_version(predictor, k):
    found, classes, z = answer(predictor, k)
    priors = expect(predictor, z.tolist(), *client(k))
    expected = [oracles.reweigh(oracles.softmax(row), prior) for row, prior in zip(z.tolist(), priors, strict=True)]
    np.testing.assert_allclose(found.double().softmax(-1).numpy(), expected, atol=1e-5)
    if len(classes):
        entropies = [-sum(p * math.log(p) for p in prior if p > 0) for prior in priors]
        np.testing.assert_allclose(classes.numpy(), np.exp(entropies), rtol=1e-5)


@every_predictor
def test_chunks_and_the_stack_answer_as_the_whole_stream(predictor):
    whole, classes, _ = answer(predictor, 0)
    for chunk in (1, 7, 16):  # a buffer of 15 is filled within a chunk, and beyond
        logits, again, _ = answer(predictor, 0, chunk)
        torch.testing.assert_close(logits, whole, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(again, classes, rtol=1e-5, atol=1e-5)
    shards, states = deployed()
    asked = [Question(k, pixels_of(k), (0, "mixture", k)) for k in range(CLIENTS)]
    engines = [engine.answer(method_of(predictor), states, list(shards), asked) for engine in (Loop(), Stack("cpu"))]
    for a, b in zip(*engines, strict=True):
        np.testing.assert_allclose(a.logits, b.logits, rtol=1e-4, atol=1e-4)


def test_padding_among_the_validation_rows_does_not_count():
    shard, _ = client(1)
    noise = torch.randint(0, 256, shard.val_x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    padded = shard._replace(
        val_x=torch.cat([shard.val_x, noise]),
        val_labels=torch.cat([shard.val_labels, torch.zeros_like(shard.val_labels)]),
        val_real=torch.cat([shard.val_real, torch.zeros_like(shard.val_real)]),
    )
    torch.testing.assert_close(answer(BBSE(), 1, shard=padded)[0], answer(BBSE(), 1)[0])


def test_a_client_without_validation_rows_gets_answers():
    shard, _ = client(1)
    bare = shard._replace(val_x=shard.val_x[:0], val_labels=shard.val_labels[:0], val_real=shard.val_real[:0])
    assert torch.isfinite(answer(BBSE(), 1, shard=bare)[0]).all()


def test_the_own_prior_helps_on_the_own_stream():
    right = {"global": [], "logit_adjust": [], "fmapls": [], "bbse": []}
    for k in range(CLIENTS):
        labels = federation().labels(federation().tests["original"][k])[:SAMPLES]
        for name, predictor in (("logit_adjust", LogitAdjust()), ("fmapls", FMAPLS()), ("bbse", BBSE())):
            logits, _, z = answer(predictor, k, test="original")
            right[name].append((logits.argmax(-1).numpy() == labels).mean())
        right["global"].append((z.argmax(-1).numpy() == labels).mean())
    plain = np.mean(right.pop("global"))
    assert all(np.mean(accuracy) > plain + 0.05 for accuracy in right.values()), (plain, right)


# Priors


def test_smoothing_and_adjusting_by_hand():
    prior = smooth_prior(torch.tensor([5.0, 0.0, 2.0]), 0.3)  # 5/7, 0, 2/7 and a third of each, 7 : 3
    torch.testing.assert_close(prior, exact([0.6, 0.1, 0.3]))
    torch.testing.assert_close(smooth_prior(torch.zeros(4), 0.1), exact([0.25] * 4))  # a client without rows
    logits = torch.tensor([[0.2, 0.5, 0.3]]).log()
    # 0.2 * 0.6 : 0.5 * 0.1 : 0.3 * 0.3 = 12 : 5 : 9
    torch.testing.assert_close(adjust(logits, prior).softmax(-1), torch.tensor([[12.0, 5.0, 9.0]]) / 26)
    nothing = adjust(logits, exact([1.0, 0.0, 0.0]))
    assert torch.isfinite(nothing).all()
    assert nothing.dtype == logits.dtype
    spread = describe_prior(exact([[1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0.25] * 4]))["effective_classes"]
    torch.testing.assert_close(spread, torch.tensor([1.0, 2.0, 4.0]))


def draw_posteriors(prior, n, spread=1.0, seed=0):
    """Labels from the prior, a point near the corner of each, and the exact posteriors of points under equal priors."""
    generator = np.random.default_rng(seed)
    labels = generator.choice(len(prior), n, p=prior)
    points = np.eye(len(prior))[labels] + spread * generator.normal(size=(n, len(prior)))
    log_likelihood = -((points[:, None] - np.eye(len(prior))) ** 2).sum(-1) / (2 * spread**2)
    return torch.from_numpy(log_likelihood).softmax(-1), labels


# EM


def test_a_step_of_em_by_hand():
    posteriors = exact([[0.8, 0.2], [0.6, 0.4]])
    torch.testing.assert_close(prior_by_em(posteriors, 0), exact([0.5, 0.5]))
    torch.testing.assert_close(prior_by_em(posteriors, 1), exact([0.7, 0.3]))
    # then 0.56 / (0.56 + 0.06) and 0.42 / (0.42 + 0.12)
    first = (0.56 / 0.62 + 0.42 / 0.54) / 2
    torch.testing.assert_close(prior_by_em(posteriors, 2), exact([first, 1 - first]))
    padded = torch.cat([posteriors.new_zeros(3, 2), posteriors])
    torch.testing.assert_close(prior_by_em(padded, 5), prior_by_em(posteriors, 5))


@pytest.mark.parametrize("prior", [(0.6, 0.3, 0.1, 0.0), (0.25, 0.25, 0.25, 0.25), (0.97, 0.01, 0.01, 0.01)])
def test_em_finds_the_prior_of_calibrated_posteriors(prior):
    posteriors, labels = draw_posteriors(prior, 4000)
    share = np.bincount(labels, minlength=4) / len(labels)
    naive = posteriors.mean(0).numpy()
    found = prior_by_em(posteriors, 300).numpy()
    np.testing.assert_allclose(found, share, atol=0.04)  # the points overlap much: half of them look like another class
    assert np.abs(found - share).max() < np.abs(naive - share).max() / 3 or np.ptp(prior) == 0


def test_each_step_of_em_raises_the_likelihood():
    posteriors, _ = draw_posteriors((0.6, 0.3, 0.1, 0.0), 200)
    likelihoods = [float((posteriors @ prior_by_em(posteriors, steps)).log().sum()) for steps in range(12)]
    assert likelihoods == sorted(likelihoods)
    assert likelihoods[-1] > likelihoods[0] + 1


def test_a_stream_of_one_class_leads_to_that_class():
    posteriors = exact([0.25, 0.45, 0.3]).expand(50, 3)
    assert prior_by_em(posteriors, 100)[1] > 0.999
    state = start_at([1 / 3, 1 / 3, 1 / 3])
    for posterior in posteriors.repeat(20, 1):
        state = update_prior(state, posterior, strength=5.0, anchor=0.0, rate=0.6)
    assert state["prior"][1] > 0.99


def test_em_forgets_what_left_the_buffer():
    predictor, method = EM(buffer=10, steps=30), method_of(EM(buffer=10, steps=30))
    shard, mine = client(0)
    x = scale(torch.from_numpy(pixels_of(0)))
    samples = [Samples(part, lambda positions: positions) for part in (x, x[-10:])]
    with torch.no_grad():
        (long, _), (short, _) = (
            predictor.answer(method, mine, predictor.start(method, mine, shard), s) for s in samples
        )
    torch.testing.assert_close(long.logits[-1], short.logits[-1])


# BBSE


def test_a_confusion_matrix_by_hand():
    """Three rows of class 0, one of them taken for class 1; one of class 1, right; none of class 2; one of padding."""
    votes = torch.eye(3).double()[[0, 0, 1, 1, 2]]
    labels = torch.eye(3).double()[[0, 0, 0, 1, 2]]
    labels[-1] = 0
    right, wrong = 0.8, 0.1  # (3 + 1) / (4 + 1), and half of the rest
    expected = exact(
        [
            [(2 + 2 * right) / 5, 2 * wrong / 3, wrong],
            [(1 + 2 * wrong) / 5, (1 + 2 * right) / 3, wrong],
            [2 * wrong / 5, 2 * wrong / 3, right],
        ]
    )
    torch.testing.assert_close(confusion(votes, labels, 2.0), expected)
    torch.testing.assert_close(expected.sum(0), torch.ones(3).double())


@pytest.mark.parametrize("prior", [(0.6, 0.3, 0.1), (1.0, 0.0, 0.0), (0.2, 0.2, 0.6)])
def test_bbse_finds_the_prior_through_a_known_confusion_matrix(prior):
    table = exact([[0.7, 0.2, 0.1], [0.2, 0.5, 0.3], [0.1, 0.3, 0.6]])
    prior = exact(prior)
    votes, seen = (table @ prior * 50)[None], exact([50.0])
    for source in (exact([1 / 3, 1 / 3, 1 / 3]), exact([0.1, 0.1, 0.8])):
        torch.testing.assert_close(prior_by_bbse(votes, seen, table, source)[0], prior, atol=1e-9, rtol=0)
        half = prior_by_bbse(votes, seen, table, source, pseudo=50.0)[0]
        torch.testing.assert_close(half, (prior + source) / 2, atol=1e-9, rtol=0)
        torch.testing.assert_close(prior_by_bbse(votes, seen, table, source, ridge=1e9)[0], source, atol=1e-6, rtol=0)


def test_negative_shares_become_nothing():
    table = exact([[0.8, 0.3], [0.2, 0.7]])
    votes, seen = exact([[9.0, 1.0]]), exact([10.0])  # (1.2, -0.2)
    found = prior_by_bbse(votes, seen, table, exact([0.5, 0.5]))
    torch.testing.assert_close(found, exact([[1.0, 0.0]]))


# FMAPLS


def start_at(own):
    own = exact(own)
    return {"own": own, "prior": own, "share": own, "seen": torch.zeros(()).double()}


def test_the_first_two_samples_by_hand():
    state = update_prior(start_at([0.5, 0.5]), exact([0.9, 0.1]), strength=3.0, anchor=0.5, rate=1.0)
    # one sample with responsibilities 0.9, 0.1, and three of the Dirichlet distribution, half each
    torch.testing.assert_close(state["prior"], exact([2.4 / 4, 1.6 / 4]))
    state = update_prior(state, exact([0.5, 0.5]), strength=3.0, anchor=0.5, rate=1.0)
    # the second counts 0.6, 0.4, so the share is 0.75, 0.25; alpha - 1 is 3 times 0.55, 0.45
    torch.testing.assert_close(state["prior"], exact([(1.5 + 1.65) / 5, (0.5 + 1.35) / 5]))


@pytest.mark.parametrize("prior", [(0.6, 0.3, 0.1, 0.0), (0.1, 0.1, 0.1, 0.7)])
def test_online_em_finds_the_prior_whatever_it_starts_from(prior):
    posteriors, labels = draw_posteriors(prior, 4000, spread=0.5)
    state = start_at([0.05, 0.05, 0.85, 0.05])
    for posterior in posteriors:
        state = update_prior(state, posterior, strength=10.0, anchor=0.0, rate=0.8)
    np.testing.assert_allclose(state["prior"].numpy(), np.bincount(labels, minlength=4) / len(labels), atol=0.05)


def test_a_strong_anchor_holds_and_a_weak_one_lets_go():
    posteriors, _ = draw_posteriors((0.0, 1.0), 300, spread=0.3)
    ends = []
    for strength in (0.0, 10.0, 1e9):
        state = start_at([0.9, 0.1])
        for posterior in posteriors:
            state = update_prior(state, posterior, strength, anchor=1.0, rate=0.6)
        ends.append(float(state["prior"][0]))
    assert ends[0] < 0.02 < ends[1] < 0.5 < ends[2]
    assert ends[2] == pytest.approx(0.9, abs=1e-6)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LogitAdjust(tau=-1.0), "tau"),
        (lambda: LogitAdjust(smoothing=0.0), "smoothing"),
        (lambda: LogitAdjust(tau=math.nan), "tau"),
        (lambda: EM(buffer=0), "buffer"),
        (lambda: EM(steps=-1), "steps"),
        (lambda: BBSE(ridge=0.0), "ridge"),
        (lambda: BBSE(shrinkage=math.nan), "shrinkage"),
        (lambda: BBSE(pseudo=-1.0), "pseudo"),
        (lambda: FMAPLS(strength=math.inf), "strength"),
        (lambda: FMAPLS(anchor=1.5), "anchor"),
        (lambda: FMAPLS(rate=0.5), "rate"),
        (lambda: FMAPLS(smoothing=-1.0), "smoothing"),
    ],
)
def test_bad_hyperparameters_are_refused(make, words):
    with pytest.raises(InputError, match=words):
        make()
