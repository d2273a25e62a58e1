"""The draws: right by published vectors, the same in NumPy and torch, and independent of what surrounds them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedthe import rng

# Known answers published with Random123 (its kat_vectors file): counter, key, output.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_published_answers(counter, key, expected):
    for make in (lambda word: np.array([word]), lambda word: torch.tensor([word])):
        drawn = rng.philox(tuple(make(word) for word in counter), key)
        assert tuple(int(word[0]) for word in drawn) == expected


@given(st.integers(0, 2**62), st.integers(1, 40))
def test_numpy_and_torch_draw_the_same(item, count):
    key = rng.key(7, "both")
    items = np.array([item, 3])
    assert (rng.words(key, items, count) == rng.words(key, torch.from_numpy(items), count).numpy()).all()
    assert (rng.uniform(key, items, count) == rng.uniform(key, torch.from_numpy(items), count).numpy()).all()
    close = rng.normal(key, items, count) - rng.normal(key, torch.from_numpy(items), count).numpy()
    assert np.abs(close).max() < 1e-4


def test_an_item_does_not_depend_on_its_neighbours_or_on_how_many_are_drawn():
    key = rng.key(0, "alone")
    together = rng.words(key, np.arange(100), 50)
    for item in (0, 17, 99):
        assert (rng.words(key, np.array([item]), 13)[0] == together[item, :13]).all()


def test_keys_tell_their_paths_apart():
    paths = [(0, "a"), (0, "a", 0), ("0", "a"), (0, "a/b"), (0, "a", "b"), (1, "a")]
    assert len({rng.key(*path) for path in paths}) == len(paths)


def test_distributions():
    key, items = rng.key(1, "shape"), np.arange(200)
    u = rng.uniform(key, items, 500).ravel()
    assert 0 < u.min() < u.max() < 1
    assert stats.kstest(u, "uniform").pvalue > 0.01
    assert stats.kstest(rng.normal(key, items, 500).ravel(), "norm").pvalue > 0.01
    whole = rng.integers(key, items, 500, -2, 5).ravel()
    assert stats.chisquare(np.bincount(whole + 2, minlength=7)).pvalue > 0.01
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.01


@pytest.mark.parametrize("word", [0, 2**32 - 1])
def test_the_largest_and_smallest_words_give_uniforms_inside_and_finite_normals(word, monkeypatch):
    monkeypatch.setattr(rng, "words", lambda key, items, count: 0 * items[:, None] + word)
    for items in (np.zeros(1, dtype=np.int64), torch.zeros(1, dtype=torch.int64)):
        assert 0 < rng.uniform((0, 0), items, 1).item() < 1
        assert np.isfinite(rng.normal((0, 0), items, 1).item())


def test_keys_go_by_value_not_by_the_type_of_integer():
    assert rng.key(3, "a") == rng.key(np.int64(3), "a") == rng.key(np.uint8(3), "a")


@given(st.integers(0, 300), st.integers(0, 1000))
def test_shuffled_is_a_permutation(n, seed):
    assert sorted(rng.shuffled(rng.key(seed), n)) == list(range(n))


@given(st.integers(1, 400), st.floats(0, 1), st.integers(0, 1000))
def test_choose_gives_different_members(n, part, seed):
    count = int(part * n)
    chosen = rng.choose(rng.key(seed), n, count)
    assert len(set(chosen.tolist())) == count == len(chosen)
    assert count == 0 or 0 <= chosen.min() <= chosen.max() < n


def test_choose_is_uniform_when_few_are_chosen():
    chosen = np.concatenate([rng.choose(rng.key(seed), 40, 5) for seed in range(2000)])
    assert stats.chisquare(np.bincount(chosen, minlength=40)).pvalue > 0.01
