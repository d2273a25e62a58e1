"""Who holds what: properties over many seeds, literal versions, and golden hashes."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedthe.data import partition as part
from fedthe.data.partition import partition
from fedthe.data.shifts import apportion, draw_out_of_client, split_natural
from fedthe.errors import InputError
from helpers import make_pool

LABELS = np.arange(2000) % 10
KINDS = ("balanced", "unbalanced")


def held(splits):
    return np.concatenate([split.rows for split in splits])


@pytest.mark.parametrize("kind", KINDS)
@given(clients=st.integers(2, 35), dirichlet=st.sampled_from([0.1, 0.5, 1.0, 10.0]), seed=st.integers(0, 10**6))
def test_no_row_is_in_two_splits(kind, clients, dirichlet, seed):
    splits = partition(LABELS, clients, dirichlet, seed, kind)
    rows = held(splits)
    assert len(splits) == clients
    assert len(np.unique(rows)) == len(rows)
    assert len(rows) > len(LABELS) - clients
    for split in splits:
        n = len(split.rows)
        assert len(split.val) == len(split.test) == n // 5 >= 1
        assert len(split.train) == n - 2 * (n // 5)


@given(clients=st.integers(2, 35), seed=st.integers(0, 10**6))
def test_balanced_clients_are_of_one_size_and_unbalanced_ones_hold_every_row(clients, seed):
    assert len({len(split.rows) for split in partition(LABELS, clients, 0.3, seed, "balanced")}) == 1
    assert len(held(partition(LABELS, clients, 0.3, seed, "unbalanced"))) == len(LABELS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_small_dirichlet_value_means_few_classes_and_a_large_one_means_all_alike(kind):
    def largest_share(dirichlet):
        splits = partition(LABELS, 10, dirichlet, 3, kind)
        return np.mean([np.bincount(LABELS[s.rows]).max() / len(s.rows) for s in splits])

    shares = [largest_share(value) for value in (0.1, 1.0, 100.0)]
    assert shares[0] > 0.4 > shares[1] > 0.15 > shares[2] >= 0.1


def test_dirichlet_shares_have_the_right_moments():
    """Every member's mean 1/m and variance (1/m)(1-1/m)/(m a + 1) of a symmetric Dirichlet(a) over m members."""
    for a, m in ((0.1, 5), (1.0, 10), (10.0, 4)):
        shares = np.concatenate([part.draw_shares(10, m, a, (seed, 5), 0) for seed in range(400)])
        assert np.allclose(shares.sum(1), 1)
        assert shares.mean(axis=0) == pytest.approx(np.full(m, 1 / m), rel=0.15)
        assert shares.var(axis=0).mean() == pytest.approx((1 / m) * (1 - 1 / m) / (m * a + 1), rel=0.1)


def test_drawn_counts_equal_a_literal_dealing():
    """Deal card by card: class by class, a member's cut is where the running share of the open hands ends."""
    totals, members, key = np.array([200, 170, 5, 0, 180]), 7, (11, 12)
    for capped in (True, False):
        counts = part._draw_counts(totals, members, 0.5, key, least=0, capped=capped)
        present = [c for c, total in enumerate(totals) if total]
        shares = dict(zip(present, part.draw_shares(len(present), members, 0.5, key, 0), strict=True))
        hands = [[] for _ in range(members)]
        for c in present:
            total, mean = totals[c], totals.sum() / members
            weights = [s if (not capped or len(hand) < mean) else 0.0 for s, hand in zip(shares[c], hands, strict=True)]
            whole, running, cards = sum(weights), 0.0, list(range(total))
            start = 0
            for j, weight in enumerate(weights):
                running += weight
                end = total if j == members - 1 else int(running / whole * total + 0.5)
                hands[j] += [(c, card) for card in cards[start:end]]
                start = end
        for j, hand in enumerate(hands):
            assert [Counter(c for c, _ in hand)[c] for c in range(len(totals))] == counts[:, j].tolist()


def test_the_split_is_frozen_per_client_and_seeds_differ():
    once = partition(LABELS, 8, 0.1, 0, "balanced")
    again = partition(LABELS, 8, 0.1, 0, "balanced")
    other = partition(LABELS, 8, 0.1, 1, "balanced")
    assert all((a.train == b.train).all() and (a.test == b.test).all() for a, b in zip(once, again, strict=True))
    assert any((a.test != b.test).any() for a, b in zip(once, other, strict=True))


@pytest.mark.parametrize(
    ("labels", "clients", "dirichlet", "kind", "says"),
    [
        (LABELS, 1, 0.1, "balanced", "at least 2 clients"),
        (LABELS, 401, 0.1, "balanced", "use at most 400 clients"),
        (LABELS, 10, 0.0, "balanced", "positive"),
        (LABELS, 10, float("nan"), "balanced", "positive"),
        (LABELS, 10, float("inf"), "balanced", "positive"),
        (LABELS, 10, -1.0, "balanced", "positive"),
        (LABELS, 10, 1e-320, "unbalanced", "from 1e-6"),
        (LABELS, 10, 1e308, "unbalanced", "to 1e9"),
        (LABELS, 10**30, 0.1, "balanced", "use at most 400 clients"),
        (np.arange(100_000), 20_000, 0.1, "unbalanced", "use at most 100 clients"),
        (np.arange(100_000), 20_000, 0.1, "balanced", "use at most 100 clients"),
        (LABELS, 10, 1e-4, "unbalanced", "raise dirichlet"),
        (np.zeros(100, dtype=np.int64), 10, 0.01, "balanced", "raise dirichlet"),
    ],
)
def test_what_cannot_be_dealt_is_refused_and_never_hangs(labels, clients, dirichlet, kind, says, monkeypatch):
    monkeypatch.setattr(part, "REDRAWS", 200)
    with pytest.raises(InputError, match=says):
        partition(labels, clients, dirichlet, 0, kind)


@pytest.mark.parametrize("clients", [11, 21, 31, 15])
def test_no_client_is_left_with_every_class_because_of_the_grouping(clients):
    splits = partition(np.arange(10_000) % 10, clients, 0.1, 0, "balanced")
    assert all(np.bincount(np.arange(10_000)[s.rows] % 10).max() > 0.2 * len(s.rows) for s in splits)


def test_many_classes_and_a_stray_label_are_refused_or_dealt_in_bounded_time():
    with pytest.raises(InputError, match="raise dirichlet or lower the number of clients\\."):
        partition(np.arange(20_000) % 3000, 20, 0.001, 0, "balanced")
    stray = np.r_[np.arange(299) % 3, 99_999]
    assert len(held(partition(stray, 4, 1.0, 0, "balanced"))) == 300


@pytest.mark.parametrize("dirichlet", [1e3, 1e6, 1e9])
def test_a_huge_dirichlet_value_means_that_all_clients_are_alike(dirichlet):
    for split in partition(LABELS, 10, dirichlet, 0, "unbalanced"):
        assert np.ptp(np.bincount(LABELS[split.rows], minlength=10)) <= 6


def test_dealing_equals_a_search_for_each_class():
    rows, counts = np.random.default_rng(0).permutation(2000)[:900], None
    labels = LABELS * 3  # of 30 classes, 20 are absent
    totals = np.bincount(labels[rows], minlength=30)
    counts = np.stack([totals // 3, totals // 4, totals - totals // 3 - totals // 4], 1)
    hands = [[] for _ in range(3)]
    for c in range(30):
        of_class = [row for row in rows if labels[row] == c]
        for hand, count in zip(hands, counts[c], strict=True):
            hand += of_class[:count]
            del of_class[:count]
    assert [hand.tolist() for hand in part._deal(rows, labels, counts)] == hands


def test_ten_thousand_clients_are_dealt():
    splits = partition(np.arange(50_000) % 10, 10_000, 0.1, 0, "balanced")
    assert {len(split.rows) for split in splits} == {5}
    ooc = draw_out_of_client(splits, 0)
    assert all(len(rows) == 1 for rows in ooc)


@given(st.integers(0, 10**6))
def test_out_of_client_rows_are_others_test_rows_and_none_twice(seed):
    splits = partition(LABELS, 7, 0.3, seed, "unbalanced")
    everyones = set(np.concatenate([split.test for split in splits]).tolist())
    for split, rows in zip(splits, draw_out_of_client(splits, seed), strict=True):
        assert len(set(rows.tolist())) == len(rows)
        assert len(rows) == min(len(split.test), len(everyones) - len(split.test))
        assert set(rows.tolist()) <= everyones - set(split.test.tolist())


@given(st.integers(0, 500), st.lists(st.integers(0, 60), min_size=1, max_size=12).filter(any))
def test_apportion_equals_the_largest_remainder_rule_in_exact_fractions(total, weights):
    quotas = [Fraction(total * w, sum(weights)) for w in weights]
    shares = [int(q) for q in quotas]
    by_remainder = sorted(range(len(weights)), key=lambda i: (-(quotas[i] - shares[i]), i))
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    assert apportion(total, np.array(weights)).tolist() == shares


def test_natural_rows_follow_each_clients_class_mix():
    pool = make_pool(np.repeat(np.arange(5), 60), "shift")
    counts = np.array([[30, 0, 0, 0, 0], [10, 20, 0, 30, 0], [20, 40, 0, 30, 0], [0, 0, 0, 0, 9]])
    dealt = split_natural(pool.labels, counts, 0, "natural")
    rows = np.concatenate(dealt)
    assert len(np.unique(rows)) == len(rows)
    mixes = np.stack([np.bincount(pool.labels[r], minlength=5) for r in dealt])
    # 60 rows a class: 30:10:20, 20:40, nobody holds class 2, 30:30, all to the last client
    assert mixes.tolist() == [[30, 0, 0, 0, 0], [10, 20, 0, 30, 0], [20, 40, 0, 30, 0], [0, 0, 0, 0, 60]]
