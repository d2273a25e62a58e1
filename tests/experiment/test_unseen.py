"""Clients that join after training: they leave no trace in it, and those without labels use none."""

import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

import fedthe
from fedthe import tree
from fedthe.cli.run import _print_results
from fedthe.config import make_config
from fedthe.data.plan import Settings, build
from fedthe.data.pool import Dataset, Pool
from fedthe.engine import train as rounds
from fedthe.engine.loop import Loop
from fedthe.engine.shards import Shards, hide_labels
from fedthe.engine.stack import Stack
from fedthe.engine.train import can_join, deploy_some, deploy_unlabeled, start, train_together
from fedthe.engine.visit import Question, Run
from fedthe.experiment.samples import read_samples
from fedthe.methods import METHODS, compose
from fedthe.methods.two_heads import mean_feature
from fedthe.names import name_method
from fedthe.report.data import Page
from fedthe.report.formats import lay_out_groups, write_latex, write_markdown
from fedthe.report.gather import show_results
from fedthe.report.page import render
from helpers import ROOT, fails
from trained_methods import NET, SETTINGS, make_federation, net_for

UNSEEN = 1
FEDTHE = compose(NET, METHODS["fedthe"])
ENGINES = {"loop": Loop(threads=1), "stack": Stack()}


def make_shards():
    return list(Shards(make_federation()))


def train(method, shards, engine, unseen=(UNSEEN,)):
    run = Run(0, shards, unseen=unseen)
    begun = start(method, len(shards), 0)
    ((reached,),) = train_together([method], [run], SETTINGS, [[begun]], engine)
    assert not isinstance(reached, Exception), reached
    return run, reached


def spoil(shard):
    """Other pixels and other labels."""
    return shard._replace(x=255 - shard.x, labels=(shard.labels + 1) % 3, val_x=255 - shard.val_x)


def equal(a, b):
    a, b = tree.flatten(a), tree.flatten(b)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["fedthe", "scaffold"])
def test_rows_of_unseen_clients_never_reach_the_shared_model(name, engine):
    method, shards = compose(NET, METHODS[name]), make_shards()
    spoiled = [spoil(shard) if k == UNSEEN else shard for k, shard in enumerate(shards)]
    (_, one), (_, other) = (train(method, each, ENGINES[engine]) for each in (shards, spoiled))
    assert equal(one.server.shared, other.server.shared)
    assert equal(one.averages, other.averages)
    assert one.server.losses == other.server.losses
    assert all(equal(one.clients[k], other.clients[k]) for k in range(len(shards)))
    _, seen = train(method, shards, ENGINES[engine], unseen=())
    assert not equal(seen.server.shared, one.server.shared)


def test_joining_with_labels_is_deploying_a_client_that_was_never_sampled(monkeypatch):
    shards = make_shards()
    run, unseen = train(FEDTHE, shards, Loop(threads=1))
    monkeypatch.setattr(rounds, "sample_clients", lambda *_: [0, 2])
    plain, never = train(FEDTHE, shards, Loop(threads=1), unseen=())
    deployed = [
        deploy_some(FEDTHE, of, SETTINGS, progress, Loop(threads=1), [UNSEEN])
        for of, progress in ((run, unseen), (plain, never))
    ]
    assert equal(*deployed)
    head = deployed[0]["personal"]["out"][0]
    assert not torch.equal(head, start(FEDTHE, 3, 0).clients[UNSEEN]["personal"]["personal"]["out"])  # personalized


def test_joining_without_labels_uses_none():
    shards = make_shards()
    run, reached = train(FEDTHE, shards, Loop(threads=1))
    made = deploy_unlabeled(FEDTHE, run, reached, [UNSEEN])
    shard, shared = shards[UNSEEN], reached.server.shared
    assert torch.equal(made["personal"]["out"][0], shared["head"]["out"])
    assert torch.equal(made["own_descriptor"][0], mean_feature(NET, shared["body"], shard))
    assert torch.equal(made["descriptor"][0], reached.averages["descriptor"])
    others = [shard._replace(labels=(shard.labels + 1) % 3, counts=shard.counts.roll(1)) for shard in shards]
    assert equal(made, deploy_unlabeled(FEDTHE, Run(0, others, unseen=(UNSEEN,)), reached, [UNSEEN]))


def test_hidden_labels_are_not_there():
    shard = make_shards()[0]
    hidden = hide_labels(shard)
    assert not any(getattr(hidden, name).any() for name in ("labels", "real", "counts", "val_labels", "val_real"))
    assert [part.shape for part in hidden] == [part.shape for part in shard]
    assert [part.dtype for part in hidden] == [part.dtype for part in shard]
    assert shard.real.all()


@pytest.mark.parametrize("name", METHODS)
def test_every_method_joins_without_labels_or_says_that_it_needs_them(name):
    method, shards = compose(net_for(name), METHODS[name]), make_shards()
    progress = start(method, len(shards), 0)
    deployed = deploy_unlabeled(method, Run(0, shards, unseen=(UNSEEN,)), progress, [UNSEEN])
    if deployed is None:
        assert method.predictor.needs_labels or type(method.personal).__name__ != "Personal"
        return
    asked = [Question(0, shards[UNSEEN].val_x[:3].numpy(), (0, "check", UNSEEN))]
    hidden = [hide_labels(shards[UNSEEN])]
    one, other = (engine.answer(method, deployed, hidden, asked)[0] for engine in ENGINES.values())
    assert one.finite
    assert np.allclose(one.logits, other.logits, atol=1e-3)


def test_which_methods_need_labels():
    """The lists on the page on the benchmark."""
    shards, left_out, kept = make_shards(), [], []
    for name in METHODS:
        method = compose(net_for(name), METHODS[name])
        run, progress = Run(0, shards, unseen=(UNSEEN,)), start(method, len(shards), 0)
        if not can_join(method):
            kept.append(name)
        elif deploy_unlabeled(method, run, progress, [UNSEEN]) is None:
            left_out.append(name)
    trained = ["apfl", "fedrep", "ditto", "fedrod", "pfedme", "ttt", "ttt_ft"]
    assert sorted(left_out) == sorted([*trained, "knn_per", "bbse", "logit_adjust"])
    assert kept == ["fedper", "lg_fedavg"]
    page = (ROOT / "docs" / "benchmark.md").read_text(encoding="utf-8")
    joined, unlabeled = page.split("- **joined**")[1].split("\n\n")[0].split("- **unlabeled**")
    for name in kept:
        assert name_method(name) in joined
    for name in left_out:
        assert re.search(rf"{re.escape(name_method(name))}[,; ]", unlabeled.split("left out:")[1], re.IGNORECASE), name
        assert name_method(name) not in joined


def test_atp_deploys_the_same_with_labels_and_without():
    method = compose(NET, METHODS["atp"])
    run, progress = train(method, make_shards(), ENGINES["loop"])
    made = deploy_unlabeled(method, run, progress, [UNSEEN])
    labelled = deploy_some(method, run, SETTINGS, progress, ENGINES["loop"], [UNSEEN])
    for name in ("body", "head", "rates"):  # all that its predictor reads
        assert equal(made[name], labelled[name])
    assert any(leaf.any() for leaf in tree.flatten(made["rates"]).values())


@pytest.mark.parametrize("name", METHODS)
def test_who_joins_after_training_deploys_nothing_that_only_rounds_train(name):
    """With labels: no leaf of the network that a client deploys is as it was before the first round."""
    method, shards = compose(net_for(name), METHODS[name]), make_shards()
    begun = start(method, len(shards), 0)
    kept = {name: leaf for part in begun.clients[UNSEEN].values() for name, leaf in tree.flatten(part).items()}
    made = deploy_some(method, Run(0, shards, unseen=(UNSEEN,)), SETTINGS, begun, Loop(threads=1), [UNSEEN])
    used = tree.flatten(made).items()
    network = tree.flatten(method.net.zeros())
    stays = [name for name, leaf in used if name in network and name in kept and torch.equal(leaf[0], kept[name])]
    assert can_join(method) == (not stays)


@cache
def make_dataset():
    labels = np.arange(300) % 3
    noise = np.random.default_rng(0).integers(0, 90, (300, 16, 16, 3))
    return Dataset(Pool("made", (noise + 70 * labels[:, None, None, None]).astype(np.uint8), labels, tuple("abc")))


def test_unseen_clients_are_drawn_by_the_seed_and_hold_what_they_held():
    plain = build(make_dataset(), Settings(10, 1.0))
    some = build(make_dataset(), Settings(10, 1.0, unseen=0.25))
    assert len(some.unseen) == 2
    assert some.unseen == tuple(sorted(some.unseen))
    assert build(make_dataset(), Settings(10, 1.0, unseen=0.001)).unseen[0] in range(10)
    drawn = {build(make_dataset(), Settings(10, 1.0, seed, unseen=0.25)).unseen for seed in range(5)}
    assert len(drawn) > 1
    for part in ("clients", "corruptions", "pool"):
        assert plain.manifest[part] == some.manifest[part]
    assert plain.unseen == ()
    assert plain.training_hash != some.training_hash
    assert plain.manifest_hash != some.manifest_hash
    for bad in (1.0, -0.1, 0.99, float("nan")):
        fails(lambda bad=bad: Settings(10, 1.0, unseen=bad), "unseen")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unseen")
    pool = make_dataset().pool
    np.savez(folder / "tiny.npz", images=pool.x, labels=pool.labels)
    return fedthe.run(
        dataset=f"npz:{folder / 'tiny.npz'}",
        methods=["fedavg", "fedthe", "ditto", "fedper"],
        tests=["original", "switch10", "open_set", "mine"],
        streams={"mine": "own 3, ooc 2, ..."},
        unknown="2",
        seeds=[0, 1],
        out=folder / "run",
        engine="loop",
        clients=4,
        dirichlet=1.0,
        unseen=0.5,
        rounds=1,
        local_epochs=1,
        lr=0.05,
    )


def test_results_tell_the_groups_apart(results):
    assert results.groups == ["trained", "joined", "unlabeled"]
    for seed in (0, 1):
        unseen = set(build(set_of(results), results.config.settings(seed)).unseen)
        assert {row.client for row in results.rows if row.seed == seed} == set(range(4)) - unseen
        for name in ("joined", "unlabeled"):
            assert {row.client for row in results.group(name).rows if row.seed == seed} == unseen
    assert results.group("trained").table() == results.table()
    assert list(results.group("joined").table()) == ["fedavg", "fedthe", "ditto"]
    assert list(results.group("unlabeled").table()) == ["fedavg", "fedthe"]
    assert results.group("unlabeled").table()["fedavg"] == results.group("joined").table()["fedavg"]  # it has no labels
    assert "ditto: needs labels, so clients that join without them do not have it" in results.notes
    why = "only rounds train what a client keeps, so clients that join after training do not have it"
    assert f"fedper: {why}" in results.notes
    assert "fedper" in results.table()
    assert any(note.startswith("unseen: clients that join after training") for note in results.notes)
    fails(lambda: results.group("late"), "there is no group 'late'")


def list_unseen(results, seed):
    return ", ".join(map(str, build(set_of(results), results.config.settings(seed)).unseen))


@pytest.mark.parametrize("name", ["trained", "joined", "unlabeled"])
def test_tables_and_reports_say_whose_they_are(results, name):
    of, unseen = results.group(name), [list_unseen(results, seed) for seed in (0, 1)]
    text, page = repr(of), of.report(results.folder / f"{name}.html").read_text(encoding="utf-8")
    page = page.partition('<script id="data"')[0]
    did = {"trained": "took part in training", "joined": "joined after training, with their labels"}
    for said in (text, page):
        assert f"which {did.get(name, 'joined after training, without labels')}" in said
    assert ("run, unlabeled clients" in text, "run, unlabeled clients" in page) == (name == "unlabeled",) * 2
    assert (f"(seed 0: {unseen[0]}; seed 1: {unseen[1]}), which" in text) == (name != "trained")
    assert "2 of 4 clients, 2 seeds" in text
    assert "tables are of the others" not in page
    assert "missing, damaged" not in page
    assert "ditto: needs labels, so clients that join without them do not have it" in page
    assert ("Ditto" in page) == (name != "unlabeled")
    assert ('id="curves"' in page, ".group(" in page.partition('id="provenance"')[2]) == (
        (True, False) if name == "trained" else (False, True)
    )


def test_a_report_has_a_table_of_each_group(results):
    shown = show_results(results)
    joined, unlabeled = lay_out_groups(shown)
    for block, name in ((joined, "joined"), (unlabeled, "unlabeled")):
        scores = results.group(name).scores()
        assert [method for method, _ in block.rows] == [name_method(method) for method in scores]
        for (_, row), (method, of) in zip(block.rows, scores.items(), strict=True):
            mean, std = of["switch10"]
            assert row[list(block.head).index("switch10")].text == f"{mean:.1f} ± {std:.1f}"
            assert row[-1].text == f"{np.mean([each for each, _ in of.values()]):.1f}", method
    page = render(Page("A page", [shown]))
    assert page.count("<caption><span>Accuracy (%) of 2 of 4 clients (seed") == 2
    for text in (write_markdown(Page("A page", [shown])), write_latex(Page("A page", [shown]))):
        assert text.count("joined after training, without labels") == 1
    assert not show_results(results.group("joined")).groups


@pytest.mark.parametrize("width", [60, 120])
def test_the_terminal_shows_how_well_the_unknown_class_is_told_apart(results, capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    _print_results(results)
    said = capsys.readouterr().out
    assert "…" not in said
    assert "AUROC (%): how well" in said
    assert said.count("joined after training, without labels") == 1
    for name in results.groups:
        for of in results.group(name).rejection().values():
            assert f" {of['open_set']:.1f} " in said
    assert "AUROC" not in repr(replace(results, rows=tuple(r for r in results.rows if r.test != "open_set")))


def test_a_note_says_that_samples_cut_a_stream(results):
    some = {"tests": ["original", "switch10"], "methods": ["fedavg"], "seeds": [0]}
    cut = fedthe.run(make_config(results.config.as_dict() | some), samples=8, out=results.folder.parent / "cut")
    note = "samples=8 ends it before its last segment for 4 of 4 clients; raise it to see the rest"
    assert [each for each in cut.notes if "samples=" in each] == [f"switch10: {note}"]
    assert not any("last segment" in note for note in results.notes)


def set_of(results):
    return fedthe.load_dataset(results.config.dataset)


def test_groups_are_read_from_disk_with_their_samples(results):
    again = fedthe.read_results(results.folder)
    assert again.groups == results.groups
    for name in results.groups:
        of = again.group(name)
        assert of.rows == results.group(name).rows
        samples = of.samples("fedavg", test="switch10", seed=0)
        rows = [row for row in of.rows if (row.method, row.test, row.seed) == ("fedavg", "switch10", 0)]
        assert sorted(set(np.asarray(samples["client"]).tolist())) == sorted({row.client for row in rows})
        assert int(np.asarray(samples["right"]).sum()) == sum(row.right for row in rows)
    assert again.report(results.folder / "again.html").exists()


def test_samples_have_their_segments_origins_and_unknown_labels(results):
    federation = build(set_of(results), results.config.settings(0))
    for (method, seed), kept in read_samples(results).items():
        for row in (row for row in results.rows if (row.method, row.seed) == (method, seed) and seed == 0):
            stream = federation.tests[row.test][row.client]
            for column in ("segment", "origin", "kind", "severity"):
                assert kept[f"{row.place}/{column}"].tolist() == getattr(stream, column).tolist()
            labels = kept[f"{row.place}/label"]
            assert row.samples == (labels >= 0).sum()
            assert row.unknown == (labels < 0).sum() == (len(stream) // 2 if row.test == "open_set" else 0)
            assert np.isnan(kept[f"{row.place}/truth"]).tolist() == (labels < 0).tolist()
            p = kept[f"{row.place}/probability"]
            assert (row.auroc is None) == (row.unknown == 0)
            if row.unknown:
                pairs = [(a > b) + 0.5 * (a == b) for a in p[labels >= 0] for b in p[labels < 0]]
                assert row.auroc == pytest.approx(100 * np.mean(pairs), abs=1)
    assert results.rejection().keys() == results.table().keys()
    assert all(list(row) == ["open_set"] and 0 <= row["open_set"] <= 100 for row in results.rejection().values())
    errors = results.calibration()
    assert set(errors["fedthe"]) == {"original", "switch10", "open_set", "mine"}


@pytest.mark.parametrize("group", ["trained", "joined", "unlabeled"])
def test_engines_agree_on_switching_streams(results, stacked, group):
    one, other = (of.group(group).samples("fedthe", seed=0) for of in (results, stacked))
    inside = np.isin(np.asarray(one["test"]), ["switch10", "mine"])
    for column in ("e", "probability", "segment", "client"):
        assert np.allclose(np.asarray(one[column])[inside], np.asarray(other[column]), atol=1e-3)


@pytest.fixture(scope="module")
def stacked(results):
    some = {"tests": ["switch10", "mine"], "methods": ["fedthe"], "seeds": [0]}
    config = make_config(results.config.as_dict() | some)
    return fedthe.run(config, engine="stack", out=results.folder.parent / "stacked")
