from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedthe import tree
from fedthe.errors import InputError

settings.register_profile("tree", deadline=None, max_examples=60)
settings.load_profile("tree")

names = st.text("abcxyz_0123456789", min_size=1, max_size=4)
shapes = st.lists(st.integers(0, 3), max_size=3)


@st.composite
def leaves(draw):
    shape = draw(shapes)
    seed = draw(st.integers(0, 2**32))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


branches = st.dictionaries(names, leaves(), min_size=1, max_size=3)
trees = st.recursive(branches, lambda inner: st.dictionaries(names, inner | leaves(), min_size=1, max_size=3))


def same(left, right) -> bool:
    left, right = tree.flatten(left), tree.flatten(right)
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def close(left, right) -> bool:
    left, right = tree.flatten(left), tree.flatten(right)
    return left.keys() == right.keys() and all(torch.allclose(left[k], right[k], rtol=1e-12, atol=1e-12) for k in left)


def alike(one, seed: int):
    """A tree of the same shape with other numbers."""
    draws = torch.Generator().manual_seed(seed)
    return tree.map_leaves(lambda leaf: torch.randn(leaf.shape, generator=draws, dtype=leaf.dtype), one)


@given(trees)
def test_unflatten_undoes_flatten(one):
    back = tree.unflatten(tree.flatten(one))
    assert same(back, one)
    assert list(tree.flatten(back)) == list(tree.flatten(one))


@given(trees, st.integers(1, 4))
def test_take_undoes_stack(one, n):
    rows = [alike(one, seed) for seed in range(n)]
    stacked = tree.stack(rows)
    assert all(same(tree.take(stacked, i), rows[i]) for i in range(n))
    assert same(tree.take(stacked, slice(0, n)), stacked)
    assert same(tree.take(stacked, torch.tensor([n - 1])), tree.stack([rows[-1]]))


@given(trees, st.lists(st.floats(0.01, 100), min_size=1, max_size=5))
def test_the_mean_of_equal_trees_is_that_tree(one, weights):
    assert close(tree.weighted_mean([one] * len(weights), weights), one)


@given(trees, st.permutations(range(4)), st.lists(st.floats(0.01, 100), min_size=4, max_size=4))
def test_the_mean_does_not_depend_on_the_order(one, order, weights):
    rows = [alike(one, seed) for seed in range(4)]
    mixed = tree.weighted_mean([rows[i] for i in order], [weights[i] for i in order])
    assert close(tree.weighted_mean(rows, weights), mixed)


@given(trees, st.floats(0.01, 100))
def test_the_mean_ignores_scale_and_rows_of_no_weight(one, scale):
    rows = [alike(one, seed) for seed in range(3)]
    want = tree.weighted_mean(rows[:2], [1, 3])
    assert close(tree.weighted_mean(rows, [scale, 3 * scale, 0]), want)
    assert close(tree.weighted_mean(tree.stack(rows[:2]), torch.tensor([scale, 3 * scale], dtype=torch.float64)), want)


@given(trees)
def test_map_and_count(one):
    doubled = tree.map_leaves(torch.add, one, one)
    assert same(doubled, tree.map_leaves(lambda leaf: 2 * leaf, one))
    assert tree.count(one) == sum(leaf.numel() for leaf in tree.flatten(one).values())


def test_hand_worked_mean_keeps_dtype():
    rows = [{"a": {"b": torch.tensor([0.0, 2.0])}}, {"a": {"b": torch.tensor([4.0, 2.0])}}]
    mean = tree.weighted_mean(rows, [1, 3])["a"]["b"]
    assert torch.equal(mean, torch.tensor([3.0, 2.0]))
    assert mean.dtype == torch.float32


def test_the_mean_works_under_vmap():
    stacks = {"a": torch.arange(12.0).view(2, 3, 2)}
    weights = torch.tensor([[1.0, 1, 2], [0, 0, 1]])
    lifted = torch.func.vmap(tree.weighted_mean)(stacks, weights)
    assert same(lifted, tree.stack([tree.weighted_mean(tree.take(stacks, i), weights[i]) for i in range(2)]))


def test_keys_may_stand_in_any_order_and_the_first_tree_gives_it():
    x, y = torch.zeros(1), torch.ones(1)
    assert list(tree.map_leaves(torch.add, {"a": x, "b": y}, {"b": x, "a": y})) == ["a", "b"]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda x: tree.map_leaves(torch.add, {"a": x}, {"b": x}), "same keys.*'a', 'b'"),
        (lambda x: tree.map_leaves(torch.add, {"a": x}, {"a": {"b": x}}), "a is a leaf"),
        (lambda x: tree.stack([{"a": x}, {"a": x, "b": x}]), "same keys"),
        (lambda x: tree.stack([]), "at least one tree"),
        (lambda x: tree.flatten({"a.b": x}), "dot"),
        (lambda x: tree.unflatten({"a": x, "a.b": x}), "leaf"),
        (lambda x: tree.unflatten({"a.b": x, "a": x}), "branch"),
        (lambda x: tree.weighted_mean([{"a": x}], [0.0]), "weights"),
        (lambda x: tree.weighted_mean([{"a": x}], [-1.0]), "weights"),
        (lambda x: tree.weighted_mean([{"a": x}], [float("nan")]), "weights"),
        (lambda x: tree.weighted_mean([{"a": x}], [1.0, 1.0]), "1 trees but 2 weights"),
        (lambda x: tree.weighted_mean([], []), "at least one tree"),
    ],
)
def test_refusals(call, says):
    with pytest.raises(InputError, match=says):
        call(torch.zeros(2))
