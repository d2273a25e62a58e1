"""FedTHE's test time as its authors' code runs it. What their code trains is in test_training.py."""

import pytest
import torch

import oracles
from fedthe.methods import METHODS, compose
from fedthe.methods.authors import AUTHORS, BALANCED, BatchedEnsemble
from fedthe.methods.base import Samples
from fedthe.methods.memo import Memo
from fedthe.methods.two_heads import TwoHeads, heads
from tiny_net import TINY, draw, make_shard, tiny_params

FEDTHE = compose(TINY, AUTHORS["authors_fedthe"])


@pytest.fixture
def mine():
    """What a client deploys: two heads that disagree, and the mean features of some other samples."""
    params, other = draw(tiny_params(), 1, 0.5), TINY.features(tiny_params(1)["body"], inputs(20, 1))
    personal = {"out": draw(params["head"], 2, 1.0)["out"]}
    return params | {"personal": personal, "descriptor": other[:10].mean(0), "own_descriptor": other[10:].mean(0)}


def inputs(count, seed=0):
    return torch.randn(count, 1, 5, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def answer(method, mine, x):
    """e of all samples, window by window as an engine cuts the stream."""
    state, weights = method.predictor.start(method, mine, make_shard(size=5)), []
    for part in x.split(method.predictor.window or len(x)):
        answers, state = method.answer(mine, state, Samples(part, lambda positions: None))
        weights.append(answers.info["e"])
    return torch.cat(weights)


def answer_literally(mine, x, rows, **settings):
    h, of_global, of_personal = heads(TINY, mine, x)
    descriptors = mine["descriptor"], mine["own_descriptor"]
    return oracles.head_ensemble_in_batches(h, of_global, of_personal, *descriptors, rows, **settings)


@pytest.mark.parametrize("count", [1, 32, 33, 70])
def test_fedthe_as_the_authors_run_it(mine, count):
    x = inputs(count)
    weights, steps = answer_literally(mine, x, 32)
    torch.testing.assert_close(answer(FEDTHE, mine, x), weights, rtol=1e-9, atol=1e-9)
    assert set(steps) == {20}
    if count > 1:  # a sample alone is its own history in both
        assert (weights - answer(compose(TINY, METHODS["fedthe"]), mine, x)).abs().max() > 1e-4


def test_the_search_ends_for_a_whole_batch(mine):
    stop = 0.03  # large enough to end some searches early
    x = inputs(40)
    weights, steps = answer_literally(mine, x, 8, stop=stop)
    assert min(steps) < 20
    assert len(set(steps)) > 1
    stopped = compose(TINY, (BALANCED, TwoHeads(), BatchedEnsemble(rows=8, stop=stop)))
    torch.testing.assert_close(answer(stopped, mine, x), weights, rtol=1e-9, atol=1e-9)
    to_the_end = compose(TINY, (BALANCED, TwoHeads(), BatchedEnsemble(rows=8)))
    assert (answer(to_the_end, mine, x) - weights).abs().max() > 0.01


def test_results_were_measured_with_these_settings():
    assert (FEDTHE.predictor.alpha, FEDTHE.predictor.beta, FEDTHE.predictor.rows, FEDTHE.predictor.stop) == (
        *(0.1, 0.1),
        *(32, 1e-5),
    )
    assert compose(TINY, AUTHORS["authors_memo_g"]).predictor == Memo(steps=2, lr=0.01)
    assert compose(TINY, AUTHORS["authors_ditto"]).personal.lam == 0
    assert compose(TINY, AUTHORS["authors_knn_per"]).predictor.scale == 64
