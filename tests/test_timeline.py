"""Numbers of streams in time, against literal versions, by hand and by scikit-learn."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import oracles_timeline as oracle
from fedthe import timeline
from fedthe.statistics import area_under_roc
from fedthe.timeline import Track

PHASES = ("own", "ooc", "corrupted")
DRAWN = {"mixed": PHASES, "open": ("own", "unknown")}  # from what the samples of a block are drawn


def make_track(rng, blocks, phases=None, share=0.6):
    """Blocks of these lengths; phases in turn, or mixed within a block where "mixed" is asked for.

    In a block that is "open", about half of the samples are of an unknown class.
    """
    segment = np.repeat(np.arange(len(blocks)), blocks)
    phases = phases or [PHASES[i % 2] for i in range(len(blocks))]
    phase = np.concatenate(
        [rng.choice(DRAWN.get(name, (name,)), n) for n, name in zip(blocks, phases, strict=True)]
    ).astype(str)
    return Track(rng.random(len(segment)) < share, segment, phase)


def as_lists(track):
    return track.right.tolist(), track.segment.tolist(), track.phase.tolist()


@st.composite
def tracks(draw, most=6):
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    count = draw(st.integers(1, most))
    made = []
    for _ in range(count):
        blocks = draw(st.lists(st.integers(1, 30), min_size=1, max_size=6))
        phases = [draw(st.sampled_from([*PHASES, *DRAWN, "unknown"])) for _ in blocks]
        made.append(make_track(rng, blocks, phases, draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))))
    assume(all((track.phase != "unknown").any() for track in made))
    return made


@given(tracks(), st.integers(1, 20))
def test_accuracy_over_time(made, window):
    found = timeline.average(timeline.stack([timeline.smooth(track, window) for track in made]))
    wanted = oracle.over_time([as_lists(track) for track in made], window)
    assert found == pytest.approx([np.nan if each is None else each for each in wanted], nan_ok=True)


def test_a_window_ends_at_the_edges_of_a_segment():
    right, segment = np.array([1, 1, 0, 0, 0, 1], bool), np.array([0, 0, 0, 1, 1, 1])
    found = timeline.smooth(Track(right, segment, np.full(6, "own")), 3)
    assert found == pytest.approx([1, 2 / 3, 1 / 2, 0, 1 / 3, 1 / 2])


@given(tracks(1), st.integers(1, 60))
def test_worst_window(made, size):
    (track,) = made
    assert timeline.find_worst_window(track.right, size) == oracle.worst_window(track.right.tolist(), size)


@given(tracks(1))
def test_forgetting(made):
    (track,) = made
    wanted = oracle.forgetting(*as_lists(track))
    found = timeline.find_forgetting(track)
    assert found is None if wanted is None else found == pytest.approx(wanted)


@given(tracks(), st.sampled_from([*PHASES, "mixed"]), st.integers(1, 5), st.sampled_from([0, 0.05, 0.2]))
def test_recovery(made, phase, window, tolerance):
    wanted = oracle.recovery(
        [as_lists(track) for track in made], phase, window, Fraction(tolerance).limit_denominator()
    )
    rows = timeline.stack([timeline.align(track, phase) for track in made])
    found = timeline.find_recovery(timeline.average(rows), window, tolerance)
    if wanted is None:
        assert found is None
        return
    samples, steady, lost = wanted
    assert found.samples.tolist() == [np.inf if samples is None else samples]
    assert found.steady == pytest.approx([steady])
    assert found.lost == pytest.approx([lost])


def test_the_time_to_recover_of_a_method_that_takes_seven_samples():
    """Wrong for the first seven samples of each block but the first, then right: known to the sample."""
    blocks = [40] * 5
    segment = np.repeat(np.arange(5), blocks)
    right = (np.arange(200) % 40 >= 7) | (segment == 0)
    phase = np.where(segment % 2, "ooc", "own")
    track = Track(right, segment, phase)
    for name in ("own", "ooc"):
        found = timeline.find_recovery(timeline.align(track, name), window=1)
        assert (found.samples, found.steady, found.lost) == ([7], [1], [7])
    assert timeline.find_forgetting(track) == pytest.approx(7 / 40)
    assert timeline.score_phases(track) == {"own": pytest.approx(106 / 120), "ooc": pytest.approx(66 / 80)}
    assert [phase for phase, _ in timeline.score_segments(track)] == ["own", "ooc", "own", "ooc", "own"]
    assert [share for _, share in timeline.score_segments(track)] == pytest.approx([1, *[33 / 40] * 4])
    never = Track(np.arange(200) % 40 >= 30, segment, phase)
    assert timeline.find_recovery(timeline.align(never, "ooc")).samples == [np.inf]


def test_averaging_clients_finds_the_time_to_recover_in_noise():
    """From 0.2 to 0.8 at the twelfth sample, in 100 clients of eight switches."""
    rng = np.random.default_rng(0)
    segment = np.repeat(np.arange(9), 50)
    share = np.where(np.arange(450) % 50 < 12, 0.2, 0.8)
    made = [Track(rng.random(450) < share, segment, np.where(segment % 2, "ooc", "own")) for _ in range(100)]
    found = timeline.find_recovery(timeline.average(timeline.stack([timeline.align(track, "ooc") for track in made])))
    assert found.samples[0] in (11, 12)  # a window of five reaches 0.75 when at most half a sample of it is early
    assert found.steady[0] == pytest.approx(0.8, abs=0.01)
    assert found.lost[0] == pytest.approx(12 * 0.6, abs=0.5)


@given(tracks(1))
def test_the_accuracy_of_phases_and_of_mixed_segments(made):
    (track,) = made
    found = timeline.score_phases(track)
    wanted = {name: oracle.accuracy_of(*as_lists(track), name) for name in (*PHASES, "mixed")}
    assert found == {name: pytest.approx(each) for name, each in wanted.items() if each is not None}


def test_samples_of_unknown_classes_keep_their_place_and_count_for_nothing():
    right = np.array([1, 1, 1, 0, 0, 0, 1, 0], bool)
    phase = np.array(["own"] * 3 + ["unknown"] * 2 + ["own", "own", "unknown"])
    track = Track(right, np.array([0, 0, 0, 1, 1, 2, 2, 2]), phase)
    assert track.segments == [(0, 3, "own"), (3, 5, "unknown"), (5, 8, "own")]
    nan = np.nan
    assert timeline.smooth(track, 1) == pytest.approx([1, 1, 1, nan, nan, 0, 1, nan], nan_ok=True)
    assert timeline.score_phases(track) == {"own": 4 / 5}
    assert timeline.find_forgetting(track) == 1 / 2  # they are another phase
    assert timeline.align(track, "own").tolist() == [0, 1]


def test_several_curves_are_measured_like_each_alone():
    rng = np.random.default_rng(1)
    rows = rng.random((6, 24))
    rows[2, 20:] = rows[4, 9:] = np.nan
    weights = rng.dirichlet(np.ones(6), 5)
    curves = timeline.average(rows, weights)
    together = timeline.find_recovery(curves)
    for i, weight in enumerate(weights):
        mean = [sum(w * x for w, x in zip(weight, column, strict=True) if x == x) for column in rows.T]
        there = [sum(w for w, x in zip(weight, column, strict=True) if x == x) for column in rows.T]
        assert curves[i] == pytest.approx(np.array(mean) / there)
        alone = timeline.find_recovery(curves[i])
        assert (alone.samples, alone.steady, alone.lost) == (together.samples[i], together.steady[i], together.lost[i])


def test_bands_are_the_segments_that_clients_have_in_common():
    rng = np.random.default_rng(0)
    made = [make_track(rng, blocks) for blocks in ([3, 4, 2], [3, 4, 2], [4, 4, 1, 1])]
    assert timeline.find_bands(made) == [(0, 3, "own"), (3, 7, "ooc"), (7, 9, "own"), (9, 10, "ooc")]
    apart = [make_track(rng, [n, 12 - n], ["own", "own"]) for n in (2, 3, 5, 8)]  # as classes that appear late
    assert timeline.find_bands(apart) == [(0, 12, "own")]
    assert timeline.find_bands([make_track(rng, [2, 3], ["mixed", "own"])])[1] == (2, 5, "own")


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0]), st.booleans()), min_size=2, max_size=60)
)
def test_rejection_by_literal_pairs_and_by_scikit_learn(drawn):
    from sklearn.metrics import roc_auc_score, roc_curve

    confidence, known = (np.array(each) for each in zip(*drawn, strict=True))
    assume(known.any() and not known.all())
    inside, outside = confidence[known], confidence[~known]
    auroc, passing = area_under_roc(inside, outside), timeline.count_passing(inside, outside)
    assert auroc == pytest.approx(oracle.auroc(inside.tolist(), outside.tolist()))
    assert auroc == pytest.approx(roc_auc_score(known, confidence))
    assert passing == pytest.approx(oracle.false_positives(inside.tolist(), outside.tolist()))
    fpr, tpr, _ = roc_curve(known, confidence, drop_intermediate=False)
    assert passing == pytest.approx(fpr[np.argmax(tpr >= 0.95 - 1e-12)])


def test_a_band_begins_where_half_of_the_clients_switch():
    switch, stay = np.repeat(["own", "ooc"], [3, 4]), np.repeat(["own"], 7)
    made = [Track(np.ones(7, bool), np.repeat([0, 1], [3, 4]), switch), Track(np.ones(7, bool), np.zeros(7, int), stay)]
    assert [first for first, *_ in timeline.find_bands(made)] == [0, 3]
