"""From a run to bundles: of its clients, and of clients that join later."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import fedthe
from fedthe import rng, tree
from fedthe.deploy.bundle import read_bundle
from fedthe.deploy.export import bundle_client, bundle_global, export, export_all, open_run
from fedthe.deploy.join import estimate_counts, join, make_shard, personalize, read_rows
from fedthe.deploy.online import Online, load_bundle
from fedthe.engine.train import deploy_some, deploy_unlabeled
from helpers import fails

CLASSES = ("dark", "grey", "bright")


def make_rows(count, seed=0):
    """Pictures of three classes that differ in brightness."""
    labels = np.arange(count) % 3
    noise = np.random.default_rng(seed).integers(0, 90, (count, 16, 16, 3))
    return (noise + 70 * labels[:, None, None, None]).astype(np.uint8), labels


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of four clients, of which one joins after training."""
    folder = tmp_path_factory.mktemp("run")
    images, labels = make_rows(240)
    np.savez(folder / "tiny.npz", images=images, labels=labels, classes=np.array(CLASSES))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDTHE_HOME", str(folder / "home"))
        fedthe.run(
            dataset=f"npz:{folder / 'tiny.npz'}",
            methods=["fedavg", "fedthe", "fedthe_regime", "fedper", "knn_per"],
            clients=4,
            dirichlet=1.0,
            unseen=0.25,
            rounds=2,
            local_epochs=1,
            batch=8,
            crop=1,
            lr=0.05,
            tests=["original", "ooc"],
            out=str(folder / "run"),
        )
    return folder / "run"


@pytest.mark.parametrize("method", ["fedavg", "fedthe", "fedthe_regime", "knn_per"])
def test_a_bundle_answers_as_the_run_did(run, method, tmp_path):
    place = export(run, tmp_path / "b", method=method, client=1)
    samples = fedthe.read_results(run).samples(method)
    online, work = load_bundle(place), open_run(run, method).work
    for test in ("original", "ooc"):
        x = work.federation.inputs(work.federation.tests[test][1])
        here = (samples["test"] == test) & (samples["client"] == 1)
        answers = online.stream(test).predict_batch(x)
        assert [each.index for each in answers] == samples["answer"][here].tolist()
        np.testing.assert_allclose([each.probability for each in answers], samples["probability"][here], atol=1e-5)


def test_a_bundle_tells_where_it_comes_from(run, tmp_path):
    bundle = read_bundle(export(run, tmp_path / "b", method="fedthe", client=2))
    work = open_run(run, "fedthe").work
    assert bundle.about["manifest"] == work.federation.manifest_hash
    assert bundle.about["counts"] == work.run.shards[2].counts.tolist()
    assert bundle.about["rounds"] == 2
    assert bundle.classes == CLASSES
    shard = work.run.shards[2]
    order = rng.shuffled(rng.key(0, "validation"), len(shard.val_x))
    answers = Online(bundle, "validation").predict_batch(shard.val_x.numpy()[order])
    right = np.mean([each.index for each in answers] == shard.val_labels.numpy()[order])
    assert bundle.about["validation_accuracy"] == pytest.approx(100 * right)
    assert bundle.about["validation_rows"] == len(shard.val_x)


def test_all_clients_at_once(run, tmp_path):
    found = open_run(run, "fedper")
    places = export_all(found, tmp_path / "all")
    # a client of FedPer cannot join later: only rounds train its head
    assert [place.name for place in places] == [f"client-{k}" for k in found.work.run.trained]
    for k, place in zip(found.work.run.trained, places, strict=True):
        bundle = read_bundle(place)
        assert bundle.client == k
        assert torch.equal(bundle.parts["model"]["head"]["out"], bundle_client(found, k).parts["model"]["head"]["out"])


def test_what_a_run_does_not_have_is_refused(run, tmp_path):
    to = tmp_path / "b"
    fails(lambda: export(run, to, client=0), "several methods", "fedthe_regime")
    fails(lambda: export(run, to, method="fedteh", client=0), "fedthe")
    fails(lambda: export(run, to, method="fedthe", client=9), "no client 9")
    fails(lambda: export(run, to, method="fedthe", client=0, seed=3), "no seed 3")
    fails(lambda: export(tmp_path, to, method="fedthe", client=0), "holds no run")
    fails(lambda: export(run, to, method="fedper"), "no client can join later")
    (tmp_path / "file").write_text("mine")
    fails(lambda: export(run, tmp_path / "file", method="fedthe", client=0), "is no bundle")
    assert not to.exists()


def test_a_training_that_is_gone_or_other_data_is_noticed(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    for file in (copy / "trainings").glob("*.safetensors"):
        file.unlink()
    fails(lambda: export(copy, tmp_path / "b", method="fedthe", client=0), "no finished training")
    images, labels = make_rows(240, seed=1)
    np.savez(run.parent / "other.npz", images=images, labels=labels[::-1], classes=np.array(CLASSES))
    results = fedthe.read_results(run)
    moved = replace(results, config=replace(results.config, dataset=f"npz:{run.parent / 'other.npz'}"))
    fails(lambda: export(moved, tmp_path / "b", method="fedthe", client=0), "not what the run was trained on")


def test_a_run_on_objects_is_exported_with_them(tmp_path):
    x, y = make_rows(90)
    federation = fedthe.Federation.from_clients([(x[:45], y[:45]), (x[45:], y[45:])], classes=CLASSES)

    def make():
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))

    net = fedthe.wrap_module(make, head="3")
    results = fedthe.run(
        methods=["fedthe"], federation=federation, net=net, rounds=1, local_epochs=1, batch=8, crop=0,
        tests=["original"], out=str(tmp_path / "run"),
    )  # fmt: skip
    fails(lambda: export(results, tmp_path / "b", client=0), "federation=")
    place = export(results, tmp_path / "b", client=0, federation=federation, net=net)
    fails(lambda: load_bundle(place), "give the network")
    answers = load_bundle(place, net=net).stream("original").predict_batch(x[:2])
    assert len(answers) == 2


@pytest.fixture(scope="module")
def shared(run, tmp_path_factory):
    return export(run, tmp_path_factory.mktemp("global") / "g", method="fedthe_regime")


def test_a_client_that_joins_is_what_the_engine_deploys(run):
    """Clients that were held out of training: with labels and without."""
    for name in ("fedthe", "fedthe_regime", "fedavg", "knn_per"):
        found = open_run(run, name)
        work, (k,) = found.work, found.work.run.unseen
        bundle, shard = bundle_global(found), work.run.shards[k]
        expected = deploy_some(found.method, work.run, work.config.training, found.progress, work.engine, [k])
        made = join(bundle, shard, True, work.config.personal_epochs, client=k)
        check_equal(made.parts["model"], tree.take(expected, 0))
        unlabeled = deploy_unlabeled(found.method, work.run, found.progress, [k])
        if unlabeled is None:
            assert name == "knn_per"
            fails(lambda b=bundle, s=shard, k=k: join(b, s, False, 1, client=k), "needs labels")
        else:
            check_equal(join(bundle, shard, False, 1, client=k).parts["model"], tree.take(unlabeled, 0))


def check_equal(one, other):
    one, other = tree.flatten(one), tree.flatten(other)
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=1e-6, msg=name)


def test_the_mix_of_classes_is_estimated_without_labels(run):
    """From rows of one class, by a head that tells classes apart; a head without balanced softmax tells nothing."""
    found = open_run(run, "fedthe_regime")
    bundle = bundle_global(found)
    x, labels = make_rows(300, seed=5)
    for wanted in (0, 2):
        shard = make_shard(x[labels == wanted], None, 3, 0)
        mine = join(bundle, shard, False, 1).parts["model"]
        counts = estimate_counts(bundle, mine, shard)
        assert float(counts.sum()) == pytest.approx(1000)
        assert counts.argmax() == wanted
        assert join(bundle, shard, False, 1).about["counts"] == counts.tolist()
    plain = bundle_global(open_run(run, "fedavg"))
    assert not estimate_counts(plain, plain.parts["shared"], shard).any()


def test_rows_of_a_new_client_in_every_form(shared, tmp_path):
    x, y = make_rows(60, seed=2)
    for i, (pixels, label) in enumerate(zip(x, y, strict=True)):
        (tmp_path / "rows" / CLASSES[label]).mkdir(parents=True, exist_ok=True)
        (tmp_path / "plain").mkdir(exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / "rows" / CLASSES[label] / f"{i:03}.png")
        Image.fromarray(pixels).save(tmp_path / "plain" / f"{i:03}.png")
    np.savez(tmp_path / "rows.npz", images=x, labels=y)
    np.savez(tmp_path / "named.npz", images=x, labels=(y + 1) % 3, classes=np.array(["bright", "dark", "grey"]))
    np.savez(tmp_path / "plain.npz", images=x)
    takes, classes = read_bundle(shared).input, CLASSES
    order = np.argsort([CLASSES[label] for label in y], kind="stable")
    found, labels = read_rows(tmp_path / "rows", takes, classes)
    np.testing.assert_array_equal(found, x[order])
    np.testing.assert_array_equal(labels, y[order])
    for data in (tmp_path / "rows.npz", tmp_path / "named.npz", (x, y), (torch.from_numpy(x), torch.from_numpy(y))):
        found, labels = read_rows(data, takes, classes)
        np.testing.assert_array_equal(found, x)
        np.testing.assert_array_equal(labels, y)
    for data in (tmp_path / "plain", tmp_path / "plain.npz", x):
        found, labels = read_rows(data, takes, classes)
        np.testing.assert_array_equal(found, x)
        assert labels is None


def test_bad_rows_of_a_new_client_are_refused(shared, tmp_path):
    x, y = make_rows(12)
    (tmp_path / "rows" / "purple").mkdir(parents=True)
    Image.fromarray(x[0]).save(tmp_path / "rows" / "purple" / "a.png")
    (tmp_path / "empty").mkdir()
    np.savez(tmp_path / "bad.npz", images=x, labels=y + 1)
    np.savez(tmp_path / "none.npz", other=x)
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04 broken")
    to = tmp_path / "b"
    for data, word in [
        (tmp_path / "rows", "purple"),
        (tmp_path / "empty", "no images"),
        (tmp_path / "absent", "no folder"),
        (tmp_path / "absent.npz", "does not exist"),
        (tmp_path / "bad.npz", "has label 3; labels must be 0 to 2"),
        (tmp_path / "none.npz", "images or x"),
        (tmp_path / "broken.npz", "npz"),
        (x[:0], "the rows are"),
        (x.astype(float), "the rows are"),
        ((x, y[:3]), "labels"),
        ((x, y - 1), "labels"),
        ((x, y.astype(float)), "labels"),
    ]:
        fails(lambda data=data: personalize(shared, data, to), word)
    fails(lambda: personalize(shared, (x, y), to, epochs=0), "epochs")
    assert not to.exists()


def test_a_joined_client_is_good_at_its_own_classes(shared, tmp_path):
    """Two classes of three; the test is of rows that it did not have."""
    x, y = make_rows(240, seed=3)
    mine, new = np.flatnonzero(y[:150] != 1), 150 + np.flatnonzero(y[150:] != 1)
    online = load_bundle(personalize(shared, (x[mine], y[mine]), tmp_path / "b"))
    right = np.mean([each.index for each in online.predict_batch(x[new])] == y[new])
    assert right > 0.9
    card = (tmp_path / "b" / "card.md").read_text()
    assert "a client that joined after training" in card
    fails(lambda: personalize(tmp_path / "b", (x, y), tmp_path / "c"), "of one client")
    fails(lambda: load_bundle(shared), "fedthe personalize")


def test_the_commands(run, tmp_path, fedthe, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = fedthe("export", run, "--method", "fedthe", "--client", 1, "-o", "b").out
    assert "the bundle is b" in said
    assert "fedthe predict b" in said
    x, y = make_rows(30, seed=4)
    for i in range(3):
        Image.fromarray(x[i]).save(f"{i}.png")
    np.savez("rows.npz", images=x, labels=y)
    expected = load_bundle("b").predict_batch(x[:3])
    first = json.loads(fedthe("predict", "b", "0.png", "1.png", "--state", "s", "--json").out)
    then = json.loads(fedthe("predict", "b", "2.png", "--state", "s", "--json").out)
    assert [each["label"] for each in first + then] == [each.label for each in expected]
    np.testing.assert_allclose([each["probabilities"] for each in first + then],
                               [each.probabilities for each in expected], atol=1e-6)  # fmt: skip
    shown = fedthe("predict", "b", "2.png", "--state", "s").out
    assert "4 samples of this stream so far" in shown
    assert "rows.npz[29]" in fedthe("predict", "b", "rows.npz").out
    for place in ("folder", "empty", "outer/inner"):
        Path(place).mkdir(parents=True)
    for i in range(3):
        Path(f"folder/{i}.png").write_bytes(Path(f"{i}.png").read_bytes())
    whole = json.loads(fedthe("predict", "b", "folder", "--json").out)
    assert [each["sample"] for each in whole] == [f"folder/{i}.png" for i in range(3)]
    assert [each["probabilities"] for each in whole] == [each.probabilities.tolist() for each in expected]
    assert "2 bundles" not in fedthe("export", run, "--method", "fedthe", "--all", "-o", "all").out
    fedthe("export", run, "--method", "fedthe", "--global", "-o", "g")
    assert "the bundle is mine" in fedthe("personalize", "g", "--data", "rows.npz", "-o", "mine", "--epochs", 2).out
    fedthe("export", run, "--method", "fedthe", "--client", 1, "--format", "onnx", "-o", "m.onnx")
    from fedthe.runtime import load

    for got, wanted in zip(load(Path("m.onnx")).predict_batch(x[:3]), expected, strict=True):
        np.testing.assert_allclose(got.probabilities, wanted.probabilities, atol=1e-5)
        assert got.label == wanted.label
    for words, sentence in [
        (("export", run, "--method", "fedthe", "--all", "--format", "onnx"), "of one client"),
        (("export", run, "--method", "knn_per", "--client", 0, "--format", "onnx", "-o", "k.onnx"), "KNN"),
        (("export", run, "--method", "fedthe"), "--client NUMBER, --all, or --global"),
        (("export", run, "--method", "fedthe", "--client", 0, "--all"), "--client NUMBER, --all, or --global"),
        (("predict", "b", "absent.png"), "absent.png does not exist"),
        (("predict", "b", "empty"), "empty has no images"),
        (("predict", "b", "outer"), "outer/inner is a folder within a folder"),
        (("predict", "b", "rows.npz", "0.png"), "one npz file"),
        (("predict", "g", "0.png"), "fedthe personalize"),
        (("predict", "mine", "0.png", "--state", "s"), "another bundle"),
        (("personalize", "b", "--data", "rows.npz", "-o", "c"), "of one client"),
    ]:
        error = fedthe(*words, exits=2).err
        assert sentence in error
        assert len(error.strip().splitlines()) == 1
