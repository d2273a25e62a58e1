"""FedTHE and FedTHE+ as a whole, judged by rounds, deployment and test time written out literally."""

import numpy as np
import pytest
import torch

import oracles
from fedthe.data.plan import Settings, build
from fedthe.data.pool import Dataset, Pool
from fedthe.engine.evaluate import make_samples
from fedthe.engine.fit import LoopFit, Optimizer
from fedthe.engine.server import sample_clients
from fedthe.engine.shards import Shards
from fedthe.engine.train import deploy, train
from fedthe.engine.visit import Training
from fedthe.methods import METHODS, compose
from fedthe.methods.base import Samples
from fedthe.methods.head_ensemble import describe_heads
from fedthe.nets.cnn import CNN
from fedthe.types import scale
from helpers import make_pool

NET = CNN(3, size=16)
FEDTHE, FEDTHE_PLUS = (compose(NET, METHODS[name]) for name in ("fedthe", "fedthe_plus"))
TRAINING = Training(rounds=3, participation=0.67, local_epochs=2, batch=16, crop=2, optimizer=Optimizer(lr=0.05))
CLIENT = 1


@pytest.fixture(scope="module")
def world():
    """Three clients of unequal size, trained for three rounds by the engine and by hand."""
    settings = Settings(3, 1.0, 0, "unbalanced")
    noise = make_pool(np.arange(200) % 3, size=16)
    bright = (noise.x // 3 + 80 * noise.labels[:, None, None, None]).astype(np.uint8)  # classes one can tell apart
    federation = build(Dataset(Pool("bright", bright, noise.labels, noise.classes)), settings)
    shards = Shards(federation)
    assert len({len(shard.labels) for shard in shards}) == 3

    def batches(phase, number, k, epochs):
        t = TRAINING
        fit = LoopFit(NET, shards[k], t.optimizer, epochs, t.batch, t.flip, t.crop, (0, phase, number), k)
        return [batch for epoch in range(epochs) for batch in fit.batches(fit.shard, epoch)]

    def personalize(body, personal, number, k):
        own = batches("personal", number, k, 1)
        return oracles.fedthe_personalize(body, personal, scale(shards[k].x), own, 0.05, 5e-4)

    params = NET.init(0)
    body, head, descriptor = params["body"], params["head"]["out"], torch.zeros(64)
    personal = [head] * 3
    for number in range(3):
        uploads = []
        for k in sample_clients(3, 0.67, 0, number):
            personal[k], own = personalize(body, personal[k], number, k)
            local = batches("local", number, k, 2)
            trained = oracles.fedthe_local(body, head, shards[k].labels, 3, local, 0.05, 5e-4)
            uploads.append((len(shards[k].labels), *trained, own))
        rows = sum(n for n, *_ in uploads)
        body = {name: sum(n * b[name] for n, b, _, _ in uploads) / rows for name in body}
        head = sum(n * w for n, _, w, _ in uploads) / rows
        descriptor = sum(n * own for n, _, _, own in uploads) / rows
    deployed, own = personalize(body, personal[CLIENT], 3, CLIENT)
    by_hand = {"body": body, "head": head, "descriptor": descriptor, "personal": deployed, "own": own}
    return federation, shards, train(FEDTHE, shards, TRAINING, 0), by_hand


def test_training_equals_the_rounds_written_out(world):
    _, _, progress, by_hand = world
    for name, value in by_hand["body"].items():
        assert (progress.server.shared["body"][name] - value).abs().max() < 1e-6, name
    assert (progress.server.shared["head"]["out"] - by_hand["head"]).abs().max() < 1e-6
    assert (progress.averages["descriptor"] - by_hand["descriptor"]).abs().max() < 1e-5


def test_deployment_is_one_more_personalization_of_the_last_model(world):
    _, shards, progress, by_hand = world
    mine = deploy(FEDTHE, shards, TRAINING, 0, progress)[CLIENT]
    assert (mine["personal"]["out"] - by_hand["personal"]).abs().max() < 1e-6
    assert (mine["own_descriptor"] - by_hand["own"]).abs().max() < 1e-5


@pytest.mark.parametrize("method", [FEDTHE, FEDTHE_PLUS], ids=["fedthe", "fedthe_plus"])
def test_test_time_equals_the_algorithm_written_out(world, method):
    federation, shards, progress, by_hand = world
    mine = deploy(method, shards, TRAINING, 0, progress)[CLIENT]
    images = torch.from_numpy(federation.inputs(federation.tests["mixture"][CLIENT])[:10])
    samples = make_samples(method, images, (0, "mixture", CLIENT))
    answers, _ = method.answer(mine, method.predictor.start(method, mine, shards[CLIENT]), samples)
    seen = samples.views(torch.arange(10))
    assert seen.shape[:3] == (10, *method.predictor.augments)
    parts = (by_hand[name] for name in ("body", "head", "personal", "descriptor", "own"))
    logits, weights = oracles.fedthe_plus_stream(*parts, scale(images), seen)
    assert (answers.info["e"] - weights).abs().max() < 1e-4
    assert (answers.logits - logits).abs().max() < 1e-4
    assert (weights - 0.5).abs().min() > 0.1  # e counts,
    assert weights.std() > 0.001  # and it is not one number


def without_views(x):
    return Samples(x, lambda positions: x.new_empty(len(positions), 0, 0, *x.shape[1:]))


def test_a_broken_sample_spoils_no_answer_before_it(world):
    federation, shards, progress, _ = world
    mine = deploy(FEDTHE, shards, TRAINING, 0, progress)[CLIENT]
    x = scale(torch.from_numpy(federation.inputs(federation.tests["mixture"][CLIENT])[:10]))
    broken = x.clone()
    broken[6] = float("nan")

    def ask(x):
        return FEDTHE.answer(mine, FEDTHE.predictor.start(FEDTHE, mine, shards[CLIENT]), without_views(x))[0]

    clean, spoilt = ask(x), ask(broken)
    assert torch.equal(spoilt.logits[:6], clean.logits[:6])
    assert torch.equal(spoilt.info["e"][:6], clean.info["e"][:6])
    assert spoilt.logits[6].isnan().all()


def test_answering_keeps_the_type_of_the_state(world):
    """float64, so that a stream of float32 may be cut anywhere."""
    federation, shards, progress, _ = world
    mine = deploy(FEDTHE, shards, TRAINING, 0, progress)[CLIENT]
    x = scale(torch.from_numpy(federation.inputs(federation.tests["mixture"][CLIENT])[:3]))
    state = FEDTHE.predictor.start(FEDTHE, mine, shards[CLIENT])
    answers, after = FEDTHE.answer(mine, state, without_views(x))
    assert state["history"].dtype == after["history"].dtype == torch.float64
    assert answers.logits.dtype == answers.info["e"].dtype == torch.float32


def test_what_both_heads_give_to_the_answer_is_a_literal_softmax():
    of_both, of_global, of_personal = torch.randn(3, 7, 5, generator=torch.Generator().manual_seed(0)).mul(4).unbind()
    kept = describe_heads(torch.full((7,), 0.3), of_both, of_global, of_personal)
    for i in range(7):
        answer = max(range(5), key=lambda c, i=i: float(of_both[i, c]))
        for name, logits in (("global", of_global), ("personal", of_personal)):
            powers = [np.exp(float(each)) for each in logits[i]]
            assert float(kept[f"{name}_probability"][i]) == pytest.approx(powers[answer] / sum(powers), rel=1e-5)
            assert int(kept[name][i]) == powers.index(max(powers))
