"""Test streams in time, judged by what their recipes say, sample by sample."""

from collections import Counter
from functools import cache
from itertools import groupby

import numpy as np
import pytest
import torch

import oracles_streams as literal
from fedthe.config import Config, make_config, read_config, read_words
from fedthe.corruptions import CORRUPTIONS, corrupt
from fedthe.data.own import hold
from fedthe.data.plan import Settings, build
from fedthe.data.pool import Dataset, Pool
from fedthe.data.shifts import CLEAN, CORRUPTED, NATURAL, ORIGINS, UNKNOWN
from fedthe.data.tests import STANDARD, TESTS
from fedthe.data.unknown import set_aside
from fedthe.engine.visit import Answered
from fedthe.experiment.work import score
from fedthe.methods.base import Answers
from fedthe.methods.checks import check_answers
from fedthe.methods.predictor import Forward
from fedthe.names import STREAM_NAMES, TEST_NAMES
from fedthe.statistics import area_under_roc
from helpers import fails, make_pool

MORE = [name for name in TESTS if name not in STANDARD]
CLIENTS = 4


def make_dataset():
    return Dataset(make_pool(np.arange(1200) % 10), {"natural": make_pool(np.arange(150) % 10, "shifted")})


@cache
def make(*tests, **changes):
    settings = Settings(CLIENTS, 1.0, unknown="class 7", tests=tests or tuple(MORE), **changes)
    return build(make_dataset(), settings)


def own_rows(federation, k):
    return federation.clients[k].test.tolist()


def ooc_rows(federation, k):
    return federation.tests["ooc"][k].rows.tolist()


def test_every_test_has_a_name_and_an_entry():
    assert list(TESTS) == ["original", "corrupted", "natural", *list(TEST_NAMES)[2:], *STREAM_NAMES]
    assert list(make().tests) == [*STANDARD, *MORE]
    assert list(build(make_dataset(), Settings(CLIENTS, 1.0)).tests) == list(STANDARD)


@pytest.mark.parametrize("name", [*STANDARD, *MORE])
def test_streams_are_well_formed(name):
    federation = make()
    trained = {row for split in federation.clients for row in (*split.train.tolist(), *split.val.tolist())}
    for k, stream in enumerate(federation.tests[name]):
        assert stream is not None
        columns = vars(stream)
        assert [values.dtype.name for values in columns.values()] == [
            "uint8",
            "int64",
            "int16",
            "uint8",
            "int8",
            "int8",
        ]
        assert len({len(values) for values in columns.values()}) == 1
        segments = stream.segment.tolist()
        assert segments == sorted(segments)
        assert set(segments) == set(range(max(segments) + 1))
        own, others = (
            set(own_rows(federation, k)),
            {r for j in range(CLIENTS) if j != k for r in own_rows(federation, j)},
        )
        met = set()
        for source, row, _, origin, kind, severity in zip(*columns.values(), strict=True):
            where = ORIGINS[origin]
            assert source == {"natural": NATURAL, "unknown": UNKNOWN}.get(where, CORRUPTED if kind >= 0 else CLEAN)
            assert (severity > 0) == (kind >= 0) == where.startswith("corrupted")
            if where not in ("natural", "unknown"):
                assert row not in trained
                assert row in (others if where.endswith("ooc") else own)
            pool = where if where in ("natural", "unknown") else "rows"
            assert (pool, row) not in met  # once, clean or corrupted
            met.add((pool, row))


@pytest.mark.parametrize("name", [name for name in MORE if name.startswith("switch")])
def test_switching_streams_are_blocks_in_turn(name):
    federation, block = make(), int(name.removeprefix("switch"))
    for k, stream in enumerate(federation.tests[name]):
        sizes = {"own": len(own_rows(federation, k)), "ooc": len(ooc_rows(federation, k))}
        wanted = literal.take_turns([("own", block), ("ooc", block)], sizes)
        assert [ORIGINS[o] for o in stream.origin] == [pool for pool, count in wanted for _ in range(count)]
        assert stream.segment.tolist() == [i for i, (_, count) in enumerate(wanted) for _ in range(count)]


def test_recurring_regimes_come_back_three_times():
    federation = make()
    for k, stream in enumerate(federation.tests["recurring"]):
        n = len(own_rows(federation, k))
        blocks = {"own": n * 16 // 100, "corrupted": n * 16 // 100, "ooc": len(ooc_rows(federation, k)) * 16 // 100}
        told = [(ORIGINS[o], len(list(of))) for o, of in groupby(stream.origin.tolist())]
        assert told == [*blocks.items()] * 3
        corrupted = stream.take(stream.source == CORRUPTED)
        usual = dict(zip(federation.test_rows.tolist(), federation.corruptions.tolist(), strict=True))
        assert [usual[row] for row in corrupted.rows.tolist()] == corrupted.kind.tolist()
        assert set(corrupted.severity.tolist()) == {5}


@pytest.mark.parametrize(("name", "of"), [("correlated", "original"), ("ooc_correlated", "ooc")])
def test_correlated_streams_hold_the_same_rows_in_class_runs(name, of):
    federation = make()
    for stream, plain in zip(federation.tests[name], federation.tests[of], strict=True):
        assert sorted(stream.rows.tolist()) == sorted(plain.rows.tolist())
        labels, before = federation.labels(stream), federation.labels(plain)
        for segment in set(stream.segment.tolist()):
            inside = labels[stream.segment == segment].tolist()
            assert len(list(groupby(inside))) == len(set(inside))  # every class of a slot in one run
        assert stream.segment.max() <= 9
        assert (np.diff(labels) == 0).mean() > 1.5 * (np.diff(before) == 0).mean()


def test_dirichlet_slots_have_the_proportions_that_were_drawn():
    federation = make()
    for k, stream in enumerate(federation.tests["correlated"]):
        labels = federation.labels(stream)
        wanted = literal.count_slots(labels, 0, "correlated", k)
        counts = [Counter(labels[stream.segment == s].tolist()) for s in range(stream.segment.max() + 1)]
        assert counts == [slot for slot in wanted if slot]


def test_gradual_severity_rises_and_falls_with_one_corruption_at_a_time():
    big = Dataset(make_pool(np.arange(2000) % 4))
    federation = build(big, Settings(2, 10.0, tests=("gradual",)))
    for k, stream in enumerate(federation.tests["gradual"]):
        assert sorted(stream.rows.tolist()) == sorted(own_rows(federation, k))
        told = [
            (kind, sev, len(list(of))) for (kind, sev), of in groupby(zip(stream.kind, stream.severity, strict=True))
        ]
        ramps = len(stream) // 90
        assert ramps == 2
        severities = [1, 2, 3, 4, 5, 4, 3, 2, 1]
        # the last severity of a ramp and the first of the next are equal, but of another corruption
        assert [severity for _, severity, _ in told] == severities * ramps
        assert len({kind for kind, _, _ in told}) == ramps
        assert all(len({kind for kind, _, _ in told[9 * r : 9 * r + 9]}) == 1 for r in range(ramps))
        counts = [count for *_, count in told]
        assert max(counts) - min(counts) <= 1
        assert stream.segment.tolist() == [i for i, count in enumerate(counts) for _ in range(count)]


def test_late_classes_come_late():
    federation = make()
    for k, stream in enumerate(federation.tests["late"]):
        assert sorted(stream.rows.tolist()) == sorted(own_rows(federation, k))
        labels = federation.labels(stream)
        first = literal.pick_early_classes(labels, 0, k)
        assert len(first) == len(set(labels.tolist())) // 2
        before, after = labels[stream.segment == 0].tolist(), labels[stream.segment == 1].tolist()
        assert set(before) <= first
        assert 0 <= len(before) - sum(label in first for label in after) <= 1  # half of their rows
        assert set(after) >= set(labels.tolist()) - first


def test_a_client_with_one_class_has_no_late_classes_and_it_is_said():
    one = np.zeros((60, 3), np.float32), np.zeros(60, int)
    two = np.ones((60, 3), np.float32), np.arange(60) % 2
    federation = build(hold([one, two], None, {}, "mine"), Settings(2, partition="given", tests=("late",)))
    assert federation.tests["late"][0] is None
    assert federation.tests["late"][1] is not None
    assert "late: no such test for client 0, for it has test rows of one class only" in federation.notes
    settings = Settings(2, partition="given", tests=("late",))
    alike = hold([one, one], ["a", "b"], {}, "alike")
    message = fails(lambda: build(alike, settings), "for every client has test rows of one class only; leave it out")
    assert "shorter" not in message


def test_the_open_set_has_known_and_unknown_samples_and_nobody_trains_on_these():
    whole, federation = make_dataset(), make()
    assert federation.pool.classes == tuple(f"class {c}" for c in range(10) if c != 7)
    assert len(federation.pool) == 1080
    assert (whole.pool.labels == 7).sum() == len(federation.dataset.unknown) == 120
    gone = {image.tobytes() for image in whole.pool.x[whole.pool.labels == 7]}
    assert not gone & {image.tobytes() for image in federation.pool.x}
    assert (federation.dataset.natural["natural"].labels < 9).all()
    by_pixels = {image.tobytes(): label for image, label in zip(whole.pool.x, whole.pool.labels, strict=True)}
    for k, stream in enumerate(federation.tests["open_set"]):
        labels, images = federation.labels(stream), federation.inputs(stream)
        assert (labels == -1).sum() == (labels >= 0).sum() == len(own_rows(federation, k))
        for label, image in zip(labels, images, strict=True):
            before = by_pixels[image.tobytes()]
            assert before == (7 if label < 0 else label + (label >= 7))
        assert (np.diff(stream.origin.astype(int)) != 0).sum() > len(stream) / 4  # mixed


def test_an_unknown_class_is_kept_by_its_name():
    one, other = (build(make_dataset(), Settings(CLIENTS, 1.0, unknown=given)) for given in ("class 7", 7))
    assert one.settings.unknown == other.settings.unknown == "class 7"
    assert one.manifest == other.manifest
    assert one.content_hash == build(make_dataset(), Settings(CLIENTS, 1.0, unknown="7")).content_hash
    assert build(one.dataset, one.settings).manifest == one.manifest  # again, without the class
    for bad in (3.0, True, ["3"]):
        fails(lambda bad=bad: Settings(CLIENTS, 1.0, unknown=bad), "unknown must be a class, by its name or number")
    fails(lambda: build(make_dataset(), Settings(CLIENTS, 1.0, unknown=-1)), "unknown=-1 is no class of made")
    padded = build(make_dataset(), Settings(CLIENTS, 1.0, unknown="0000000000007"))
    assert padded.content_hash == one.content_hash
    for large in ("1" * 12, "7" * 5000):
        fails(lambda large=large: build(make_dataset(), Settings(CLIENTS, 1.0, unknown=large)), "is no class of made")


def test_the_name_of_an_unknown_class_wins_over_a_number():
    pool = Pool("digits", np.zeros((60, 8, 8, 1), np.uint8), np.arange(60) % 3, ("2", "1", "0"))
    assert set_aside(Dataset(pool), "2").pool.classes == ("1", "0")


def test_holdings_lose_the_unknown_class_too():
    draws = np.random.default_rng(0)
    clients = [(draws.normal(size=(40, 3)).astype(np.float32), np.arange(40) % 4) for _ in range(3)]
    night = [(draws.normal(size=(8, 3)).astype(np.float32), np.arange(8) % 4), None, None]
    dataset = hold(clients, None, {"night": night}, "mine")
    without = set_aside(dataset, "2")
    for (x, y), each in zip(clients, without.clients, strict=True):
        assert (without.pool.x[each.rows] == x[y != 2]).all()
        assert without.pool.labels[each.rows].tolist() == [label - (label > 2) for label in y.tolist() if label != 2]
    (x, y), rows = night[0], without.clients[0].tests["night"]
    assert (without.natural["night"].x[rows] == x[y != 2]).all()
    assert set_aside(without, "2") is without
    fails(lambda: set_aside(without, "1"), "2 is set aside already")
    fails(lambda: set_aside(without, None), "2 is set aside already", "leave it out with a federation")
    federation = build(dataset, Settings(3, partition="given", unknown="2", tests=("open_set", "switch10")))
    assert len(federation.tests["open_set"][0]) == 2 * len(federation.clients[0].test)


def test_pixels_of_other_kinds_and_severities():
    federation = make("gradual", "recurring")
    stream = federation.tests["gradual"][1]
    images = federation.inputs(stream)
    for i in (0, len(stream) // 2, len(stream) - 1):
        row, kind, severity = stream.rows[i : i + 1], CORRUPTIONS[stream.kind[i]], int(stream.severity[i])
        (wanted,) = corrupt(torch.from_numpy(federation.pool.x[row]), kind, severity, torch.from_numpy(row), 0).numpy()
        assert (images[i] == wanted).all()
    part = stream.take(np.array([5, 3]))
    assert (federation.inputs(part) == images[[5, 3]]).all()
    other = stream.corrupt(3, 2)  # not among the tests
    assert (federation.inputs(other.first(2))[0] != images[0]).any()
    recurring = federation.tests["recurring"][0]
    usual = federation.inputs(recurring)[recurring.source == CORRUPTED]
    rows = recurring.rows[recurring.source == CORRUPTED]
    assert (usual == federation.corrupted[np.searchsorted(federation.test_rows, rows)]).all()


def test_further_copies_come_from_the_cache(monkeypatch):
    images = make("gradual").inputs(make("gradual").tests["gradual"][0])
    monkeypatch.setattr("fedthe.data.copies.corrupt_mixed", lambda *_: pytest.fail("computed again"))
    again = build(make_dataset(), Settings(CLIENTS, 1.0, unknown="class 7", tests=("gradual",)))
    assert (again.inputs(again.tests["gradual"][0]) == images).all()


def test_streams_are_deterministic_differ_between_seeds_and_are_in_the_manifest():
    again = build(make_dataset(), make().settings)
    assert again.manifest == make().manifest
    other = make(seed=1)
    for name in MORE:
        assert other.tests[name][0].rows.tolist() != make().tests[name][0].rows.tolist()
    hashes = {make(name).manifest_hash for name in MORE} | {make().manifest_hash, other.manifest_hash}
    assert len(hashes) == len(MORE) + 2
    texts = ("own 5, ooc 5", "ooc 5, own 5", "own 5, ooc 5, ...", "own 5, ooc 4")
    own = {build(make_dataset(), Settings(CLIENTS, 1.0, streams={"mine": text})).manifest_hash for text in texts}
    renamed = build(make_dataset(), Settings(CLIENTS, 1.0, streams={"yours": texts[0]}))
    assert len(own | {renamed.manifest_hash}) == 5
    assert len({make("gradual", "late").training_hash, make().training_hash}) == 1  # nothing is trained anew


def test_standard_tests_are_the_same_beside_others():
    plain = build(make_dataset(), Settings(CLIENTS, 1.0))
    with_more = build(make_dataset(), Settings(CLIENTS, 1.0, tests=("switch10", "late")))
    ignored = build(make_dataset(), Settings(CLIENTS, 1.0, tests=("original",), streams={"mine": "own 5"}))
    for mine, theirs in zip(plain.manifest["clients"], with_more.manifest["clients"], strict=True):
        assert theirs["tests"].items() >= mine["tests"].items()
    assert plain.content_hash == ignored.content_hash != with_more.content_hash


def test_pieces_of_ones_own():
    settings = Settings(
        CLIENTS, 1.0, streams={"mine": "own 10, natural 3, corrupted 20%, ooc 4, own", "turns": "own 7, ooc 2, ..."}
    )
    federation = build(make_dataset(), settings)
    for k, stream in enumerate(federation.tests["mine"]):
        n = len(own_rows(federation, k))
        told = [(ORIGINS[o], len(list(of))) for o, of in groupby(stream.origin.tolist())]
        left = n - 10 - n // 5
        assert told == [("own", 10), ("natural", 3), ("corrupted", n // 5), ("ooc", 4), ("own", left)]
        sizes = {"own": n, "ooc": len(ooc_rows(federation, k))}
        turns = literal.take_turns([("own", 7), ("ooc", 2)], sizes)
        assert [count for _, count in turns] == np.bincount(federation.tests["turns"][k].segment).tolist()


def test_a_row_of_a_shift_is_met_once_whichever_name_it_is_drawn_by():
    draws = np.random.default_rng(0)

    def make_rows(count):
        return draws.normal(size=(count, 3)).astype(np.float32), np.arange(count) % 2

    shifts = {name: [make_rows(40), make_rows(40)] for name in ("night", "fog")}
    dataset = hold([make_rows(50), make_rows(50)], None, shifts, "mine")

    def draw(text):
        return build(dataset, Settings(2, partition="given", streams={"mine": text})).tests["mine"]

    fails(lambda: draw("natural 80, night 1"), "no client has enough test rows")
    for text in ("natural 30, night 5, own 5, fog 5, natural", "night 9, natural 9, fog 9, ..."):
        for stream in draw(text):
            rows = list(zip(stream.source.tolist(), stream.rows.tolist(), strict=True))
            assert len(set(rows)) == len(rows)
    for stream in draw("natural 30, night 5, own 5, fog 5, natural"):
        assert len(stream) == 80 + 5  # all of both shifts


def test_blocks_are_drawn_from_all_of_a_pool():
    """Rows that a client holds in the order of their classes come in random order."""
    x, y = np.zeros((200, 2), np.float32), np.repeat(np.arange(4), 50)
    parts = {"train": (x, y), "val": (x, y), "test": (x, y)}
    dataset = hold([parts, parts], None, {}, "sorted")
    federation = build(dataset, Settings(2, partition="given", tests=("switch50",)))
    stream = federation.tests["switch50"][0]
    assert len(set(federation.labels(stream)[:50].tolist())) == 4


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tests": ("swich10",)}, "did you mean switch10?"),
        ({"tests": ("open_set",)}, "unknown='class 9'"),
        ({"unknown": "trucks"}, "unknown=trucks is no class of made; "),
        ({"unknown": "10"}, "unknown=10 is no class"),
        ({"streams": {"mine": "own 5, blue 5"}}, "asks for 'blue', which is no pool"),
        ({"streams": {"mine": "own 5, unknown 5"}}, "needs samples of a class that no client holds"),
        ({"streams": {"mine": "own 500"}}, "no client has enough test rows for the test mine ('own 500'"),
        ({"streams": {"mine": "own, corrupted"}}, "a row is met only once"),
        ({"streams": {"mine": "own 60%, corrupted 60%"}}, "no client has enough"),
        ({"streams": {"mine": "own 0"}}, "at least 1 sample"),
        ({"streams": {"mine": "own 101%"}}, "at most 100 %"),
        ({"streams": {"mine": "own five"}}, "'own five' is no piece of a stream"),
        ({"streams": {"mine": "..."}}, "is no piece"),
        ({"streams": {"mine": "own 5, ..., ooc 5"}}, "'...' is no piece"),
        ({"streams": {"mine": "own, ..."}}, "needs a number"),
        ({"streams": {"mine": 5}}, "must be text"),
        ({"streams": {"late": "own 5"}}, "has a meaning of its own"),
        ({"streams": {"natural": "own 5"}}, "has a meaning of its own"),
        ({"streams": {"own": "ooc 5"}}, "has a meaning of its own"),
        ({"streams": None}, "streams must be a dict by name"),
        ({"streams": ["own 10"]}, "streams must be a dict by name"),
        ({"tests": "switch10"}, "tests must be a list of names"),
        ({"tests": 5}, "tests must be a list of names"),
        ({"streams": {"a b": "own 5"}}, "must be a word"),
    ],
)
def test_bad_streams_are_refused_in_a_sentence(change, says):
    fails(lambda: build(make_dataset(), Settings(CLIENTS, 1.0, **change)), says)


def test_streams_that_need_pictures_or_a_shift_are_refused_without_them():
    rows = [(np.zeros((20, 3), np.float32), np.arange(20) % 2) for _ in range(2)]
    dataset = hold(rows, None, {}, "steps")
    for name in ("gradual", "recurring"):
        settings = Settings(2, partition="given", tests=(name,))
        fails(
            lambda settings=settings: build(dataset, settings), f"the test {name} corrupts pictures, and steps has none"
        )
    settings = Settings(2, partition="given", streams={"mine": "natural 5"})
    fails(lambda: build(dataset, settings), "needs a natural shift, and steps has none")
    pool = Pool("few", np.zeros((9, 8, 8, 1), np.uint8), np.arange(9) % 2, ("a", "b"))
    fails(lambda: set_aside(Dataset(pool), "a"), "leaves fewer than two classes")


def test_streams_in_config_files_and_words(tmp_path):
    file = tmp_path / "my.toml"
    file.write_text('tests = ["switch50", "commute"]\nunknown = 3\n[streams]\ncommute = "own 100, ooc 50"\n')
    config = read_config(file, ["streams.more=own 5, ooc 5, ..."])
    assert config.streams == {"commute": "own 100, ooc 50", "more": "own 5, ooc 5, ..."}
    assert config.unknown == "3"
    assert make_config(config.as_dict()) == config
    assert config.settings(0).tests == ("switch50", "commute")
    assert Config().settings(0) == Settings()
    fails(lambda: make_config(read_words(["streams.mine=own five"])), "streams.mine: 'own five' is no piece")
    fails(lambda: make_config(read_words(["streams=5"])), "streams must be a table")
    fails(lambda: make_config({"streams": {"mine": ["own"]}}), "streams.mine must be text")


def test_open_set_scores_count_known_samples_and_rank_the_unknown():
    draws = np.random.default_rng(0)
    labels = np.where(np.arange(200) % 2, draws.integers(0, 5, 200), -1)
    logits = draws.normal(size=(200, 5)) + 2 * (labels[:, None] == np.arange(5))
    logits[:20] = logits[20:40]  # ties
    scores = score(Answered(logits, {}, 1.0), labels, (0, "open_set"))
    known = labels >= 0
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    assert scores.accuracy == (logits.argmax(1) == labels)[known].mean()
    assert scores.nll == pytest.approx(-np.log(p[known, labels[known]]).mean())
    assert np.isnan(scores.log_truth[~known]).all()
    assert scores.right.sum() == scores.right[known].sum()
    pairs = [(a > b) + 0.5 * (a == b) for a in p.max(1)[known] for b in p.max(1)[~known]]
    assert scores.auroc == pytest.approx(np.mean(pairs), abs=1e-3)
    assert area_under_roc(np.array([2.0, 3.0]), np.array([1.0, 2.0])) == 0.875
    assert score(Answered(logits[known], {}, 1.0), labels[known], (0, "x")).auroc is None


@pytest.mark.parametrize("column", ["segment", "origin", "kind", "severity"])
def test_columns_of_streams_are_not_a_predictors_to_give(column):
    answers = Answers(torch.zeros(2, 3), {column: torch.zeros(2)})
    fails(lambda: check_answers(Forward(), {}, (answers, {}), 2, 3), f"info['{column}']", "choose another")
