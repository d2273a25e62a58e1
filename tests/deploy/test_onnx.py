"""The ONNX file of a client gives what torch gives, without torch; and whatever is not right is refused."""

import subprocess
import sys
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from fedthe import METHODS, runtime, tree, wrap_module
from fedthe.engine.evaluate import begin_one, make_samples
from fedthe.methods import STUDIES, compose
from fedthe.methods.head_ensemble import Search
from fedthe.nets.cct import CCT4
from fedthe.nets.cnn import CNN
from fedthe.nets.resnet_gn import ResNet20GN
from fedthe.types import Shard
from helpers import fails
from torch_modules import CLASSES, MLP, Reader, ResNet18, draw_features, draw_tokens, group_norm, seeded

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
from fedthe.deploy.onnx import export_onnx, quantize_onnx

NAMES = ("dark", "grey", "bright")
PARITY = 1e-5
N = 9


def draw_pictures(n=N, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (n, 16, 16, 3)).astype(np.uint8))


NETS = {
    "cnn": (lambda: CNN(CLASSES, size=16), draw_pictures),
    "deeper_head": (lambda: CNN(CLASSES, size=16, head_layers=2), draw_pictures),
    "resnet20_gn": (lambda: ResNet20GN(CLASSES, size=16), draw_pictures),
    "cct4": (lambda: CCT4(CLASSES, size=16), draw_pictures),
    "resnet18": (lambda: wrap_module(seeded(ResNet18, norm=group_norm, width=4)), draw_pictures),
    "mlp": (lambda: wrap_module(seeded(MLP)), draw_features),
    "reader": (lambda: wrap_module(seeded(Reader)), draw_tokens),
}
ON_CNN = ("fedavg", "fedavg_ft", "fedrod", "fedthe", "fedthe_regime", "fedthe_regime_lda", "regime_mirror")
CASES = [(name, "cnn") for name in ON_CNN]
CASES += [("fedthe", "deeper_head"), ("fedthe", "reader"), ("fedthe", "mlp")]
CASES += [(name, net) for net in ("resnet20_gn", "cct4", "resnet18") for name in ("fedthe", "fedthe_regime")]


def make_client(name, net_name, **changes):
    """A method, what a client deploys, its state before a stream, and samples: random numbers, trained nowhere."""
    net, x = NETS[net_name][0](), NETS[net_name][1](N)
    method = compose(net, (METHODS | STUDIES)[name])
    if changes:
        method = replace(method, predictor=replace(method.predictor, **changes))
    draws = torch.Generator().manual_seed(0)

    def draw(leaf):
        return torch.randn(leaf.shape, generator=draws, dtype=leaf.dtype) / 4

    d = net.feature_dim
    mine = net.init(0)
    mine |= {"head": tree.map_leaves(draw, mine["head"]), "personal": tree.map_leaves(draw, mine["head"])}
    mine |= {"descriptor": draw(torch.zeros(d)).abs(), "own_descriptor": draw(torch.zeros(d)).abs()}
    mine["everybody"] = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    wide = torch.zeros(CLASSES, d, dtype=torch.float64)
    share = torch.tensor(0.3, dtype=torch.float64)
    mine["discriminant"] = {"weight": draw(wide), "bias": draw(wide[:, 0]), "share": share}
    labels, real = torch.arange(len(x)) % CLASSES, torch.ones(len(x), dtype=torch.bool)
    shard = Shard(x, labels, real, torch.tensor([5.0, 3.0, 0.0]), x, labels, real)
    return method, mine, begin_one(method, mine, shard), x


def answer_in_torch(method, mine, state, x):
    with torch.no_grad():
        answers, after = method.answer(mine, state, make_samples(method, x, (0,)))
    weight = answers.info["e"].numpy() if "e" in answers.info else None
    return answers.logits.double().softmax(-1).numpy(), weight, {k: v.numpy() for k, v in tree.flatten(after).items()}


def export(path, name, net_name, **changes):
    method, mine, state, x = client = make_client(name, net_name, **changes)
    export_onnx(method, mine, state, path, classes=NAMES, sample=x[0].numpy(), name=name, about={"seed": 1})
    return client


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """By method and network: a client, and its file."""
    folder = tmp_path_factory.mktemp("onnx")

    @cache
    def get(name, net_name):
        path = folder / f"{name}-{net_name}.onnx"
        return export(path, name, net_name), path

    return get


@pytest.mark.parametrize(("name", "net_name"), CASES)
def test_answers_are_those_of_torch(exported, name, net_name):
    client, path = exported(name, net_name)
    probabilities, weight, after = answer_in_torch(*client)
    stream = runtime.load(path)
    given, given_weight = stream.predict_arrays(client[3].numpy())
    assert given.dtype == np.float32
    np.testing.assert_allclose(given, probabilities, atol=PARITY)
    if weight is None:
        assert given_weight is None
    else:
        assert given_weight.dtype == np.float32
        np.testing.assert_allclose(given_weight, weight, atol=PARITY)
    assert stream.state().keys() == after.keys()
    for leaf, expected in after.items():
        assert stream.state()[leaf].dtype == expected.dtype
        np.testing.assert_allclose(stream.state()[leaf], expected, atol=PARITY)


@pytest.mark.parametrize("name", ["fedthe", "fedthe_regime"])
def test_one_call_is_n_calls_is_chunks(exported, name):
    client, path = exported(name, "cnn")
    x = client[3].numpy()
    whole, single = runtime.load(path), runtime.load(path)
    chunks = single.stream()
    given, weights = whole.predict_arrays(x)
    answers = [single.predict(image) for image in x]
    answers_of_chunks = [answer for part in (x[:2], x[2:3], x[3:]) for answer in chunks.predict_batch(part)]
    for alike in (answers, answers_of_chunks):
        np.testing.assert_allclose([answer.probabilities for answer in alike], given, atol=PARITY)
        np.testing.assert_allclose([answer.weight for answer in alike], weights, atol=PARITY)
    for stream in (single, chunks):
        for leaf, value in whole.state().items():
            np.testing.assert_allclose(stream.state()[leaf], value, atol=PARITY)
    assert [answer.index for answer in answers] == given.argmax(-1).tolist()
    assert [answer.label for answer in answers] == [NAMES[i] for i in given.argmax(-1)]


SEARCHES = [
    {"weighting": "em", "history": False},
    {"weighting": "fa"},
    {"weighting": "half", "alpha": 0.3, "beta": 0.6},
    *({"search": Search(steps=steps)} for steps in (0, 1, 2, 5)),
    {"search": Search(lr=0.01)},
]


@pytest.mark.parametrize("changes", SEARCHES, ids=str)
def test_every_search_is_that_of_torch(tmp_path, changes):
    method, mine, _, _ = make_client("fedthe", "mlp", **changes)
    x = draw_features(150)  # more than a block
    mine["head"], mine["personal"] = (tree.map_leaves(lambda w: 8 * w, mine[part]) for part in ("head", "personal"))
    state = method.predictor.start(method, mine, None)
    export_onnx(method, mine, state, tmp_path / "m.onnx", classes=NAMES, sample=x[0].numpy())
    stream = runtime.load(tmp_path / "m.onnx")
    probabilities, weight, _ = answer_in_torch(method, mine, state, x)
    given, given_weight = stream.predict_arrays(x.numpy())
    np.testing.assert_allclose(given, probabilities, atol=PARITY)
    np.testing.assert_allclose(given_weight, weight, atol=PARITY)
    single = stream.stream()
    np.testing.assert_allclose([single.predict(each).weight for each in x[:40].numpy()], weight[:40], atol=PARITY)


@pytest.mark.parametrize("regimes", [{}, {"recent": 0.0}, {"own": (0.1, 0.9), "start": (0.5, 0.5), "leave": 0.2}])
def test_every_filter_is_that_of_torch(tmp_path, regimes):
    settings = replace(METHODS["fedthe_regime"][2].regimes, **regimes)
    client = export(tmp_path / "m.onnx", "fedthe_regime", "mlp", regimes=settings, federation=True)
    probabilities, weight, after = answer_in_torch(*client)
    stream = runtime.load(tmp_path / "m.onnx")
    given, given_weight = stream.predict_arrays(client[3].numpy())
    np.testing.assert_allclose(given, probabilities, atol=PARITY)
    np.testing.assert_allclose(given_weight, weight, atol=PARITY)
    for leaf, value in after.items():
        np.testing.assert_allclose(stream.state()[leaf], value, atol=PARITY)


def test_a_stream_is_its_own(exported):
    client, path = exported("fedthe", "cnn")
    x = client[3].numpy()
    stream = runtime.load(path)
    assert np.isnan(stream.state()["history"]).all()
    first = stream.predict(x[0])
    kept = stream.state()
    second = stream.predict(x[1])
    stream.restore(kept)
    assert stream.predict(x[1]).weight == second.weight
    assert stream.stream().predict(x[0]).weight == first.weight
    stream.reset()
    assert stream.predict(x[0]).weight == first.weight
    stream.restore(stream.stream().state())  # of a stream that has not begun
    assert stream.predict(x[0]).weight == first.weight
    kept["history"][:] = 7  # a copy: nobody else has it
    assert stream.predict(x[1]).weight == second.weight
    facts = stream.facts
    assert (facts.method, facts.classes, facts.shape, facts.about) == ("fedthe", NAMES, (16, 16, 3), {"seed": 1})


def test_samples_that_do_not_fit_are_refused_and_leave_no_trace(exported):
    client, path = exported("fedthe", "mlp")
    x, stream = client[3].numpy(), runtime.load(path)
    stream.predict_batch(x[:2])
    before = stream.state()
    not_a_number, huge = x[:3].copy(), x[:3].copy()
    not_a_number[2, 1], huge[2] = np.nan, 3e38
    fails(lambda: stream.predict_batch(not_a_number), "NaN")
    fails(lambda: stream.predict(not_a_number[2]), "NaN")
    fails(lambda: stream.predict(x[0].astype(np.float64)), "float32", "float64")
    fails(lambda: stream.predict(x), "[12]", "[9, 12]")
    fails(lambda: stream.predict_batch(x[0]), "[n, 12]", "[12]")
    fails(lambda: stream.predict_batch(x[:0]), "at least one")
    fails(lambda: stream.predict(x[0].tolist()), "NumPy", "list")
    assert all((stream.state()[name] == leaf).all() for name, leaf in before.items())
    fails(lambda: stream.restore({}), "history")
    fails(lambda: stream.restore({"history": np.zeros(3)}), "[8]", "[3]")
    fails(lambda: stream.restore({"history": np.full(8, np.inf)}), "not finite")
    assert all((stream.state()[name] == leaf).all() for name, leaf in before.items())


def test_an_answer_that_is_not_finite_is_refused(tmp_path):
    method, mine, state, x = make_client("fedthe", "mlp")
    mine["head"] = tree.map_leaves(lambda leaf: torch.full_like(leaf, 3e38), mine["head"])
    export_onnx(method, mine, state, tmp_path / "m.onnx", classes=NAMES, sample=x[0].numpy())
    stream = runtime.load(tmp_path / "m.onnx")
    fails(lambda: stream.predict(x[0].numpy()), "not finite")
    assert np.isnan(stream.state()["history"]).all()


def test_unknown_tokens_are_refused(exported):
    client, path = exported("fedthe", "reader")
    fails(lambda: runtime.load(path).predict(client[3][0].numpy() + 1000), "cannot answer")


@pytest.mark.parametrize(
    ("name", "changes", "word"),
    [
        ("t3a", {}, "T3A"),
        ("knn_per", {}, "KNN"),
        ("fedthe_plus", {}, "HeadEnsemble"),
        ("regime_memo", {}, "RegimeFilter"),
        ("fedthe", {"batch": 4}, "batch=4"),
    ],
)
def test_other_predictors_are_refused(tmp_path, name, changes, word):
    method = compose(CNN(CLASSES, size=16), METHODS[name])
    method = replace(method, predictor=replace(method.predictor, **changes))
    path = tmp_path / "m.onnx"
    fails(lambda: export_onnx(method, {}, {}, path, classes=NAMES, sample=np.zeros(1)), word, "with torch")
    assert not list(tmp_path.iterdir())


def test_what_an_export_is_given_must_fit(tmp_path):
    method, mine, state, x = make_client("fedavg", "mlp")
    given = {"sample": x[0].numpy(), "classes": NAMES}
    path = tmp_path / "m.onnx"
    fails(lambda: export_onnx(method, mine, state, path, **given | {"classes": NAMES[:2]}), "3 classes", "2 names")
    fails(lambda: export_onnx(method, mine, state, path, **given, about={"x": object()}), "JSON")
    fails(lambda: export_onnx(method, mine, state, path, **given | {"sample": np.zeros(5, np.float32)}), "MLP", "[5]")
    assert not list(tmp_path.iterdir())


def test_damage_is_noticed(exported, tmp_path):
    _, path = exported("fedthe", "mlp")
    content, damaged = path.read_bytes(), tmp_path / "damaged.onnx"
    for place in range(0, len(content), len(content) // 40):
        damaged.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        fails(lambda: runtime.load(damaged), "damaged.onnx")
    for cut in (0, 1, 80, len(content) // 2, len(content) - 1):
        damaged.write_bytes(content[:cut])
        fails(lambda: runtime.load(damaged), "seal")
    damaged.write_bytes(content + b"\n")
    fails(lambda: runtime.load(damaged), "seal")
    damaged.write_bytes(runtime.seal(b"no model"))
    fails(lambda: runtime.load(damaged), "onnxruntime")
    fails(lambda: runtime.load(tmp_path), "folder")
    fails(lambda: runtime.load(tmp_path / "missing.onnx"), "does not exist")
    fails(lambda: runtime.load(path, threads=0), "threads")


def test_a_later_format_is_refused(exported, tmp_path, monkeypatch):
    _, path = exported("fedthe", "mlp")
    monkeypatch.setattr(runtime, "FORMAT", 2)
    fails(lambda: runtime.load(path), "format is 1")


@pytest.mark.parametrize("name", ["fedavg", "fedthe", "fedthe_regime"])
def test_int8_keeps_the_interface_and_nearly_the_answers(exported, tmp_path, name):
    client, path = exported(name, "cnn")
    x, out = client[3].numpy(), tmp_path / "int8.onnx"
    quantize_onnx(path, out, x)
    stream, exact = runtime.load(out), runtime.load(path)
    assert stream.facts.quantized
    assert replace(stream.facts, quantized=False, state={}) == replace(exact.facts, state={})
    assert out.stat().st_size < path.stat().st_size / 2
    given, expected = stream.predict_arrays(x)[0], exact.predict_arrays(x)[0]
    assert not np.array_equal(given, expected)
    np.testing.assert_allclose(given, expected, atol=0.1)
    fails(lambda: quantize_onnx(out, tmp_path / "again.onnx", x), "already")
    fails(lambda: quantize_onnx(path, tmp_path / "again.onnx", []), "samples")
    fails(lambda: quantize_onnx(path, tmp_path / "again.onnx", [x[0, 1:]]), "[16, 16, 3]")
    assert [each.name for each in tmp_path.iterdir()] == ["int8.onnx"]


WITHOUT_TORCH = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "onnx", "scipy", "onnxscript"):
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Block())
import numpy as np
from fedthe import runtime

stream = runtime.load(sys.argv[1])
answers = [stream.predict(image) for image in np.load(sys.argv[2])]
assert not {"torch", "onnx", "scipy"} & sys.modules.keys()
print(*(answer.weight for answer in answers))
"""


def test_the_runtime_needs_no_torch(exported, tmp_path):
    client, path = exported("fedthe", "cnn")
    np.save(tmp_path / "x.npy", client[3].numpy())
    command = [sys.executable, "-W", "error", "-c", WITHOUT_TORCH, str(path), str(tmp_path / "x.npy")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose([float(w) for w in done.stdout.split()], answer_in_torch(*client)[1], atol=PARITY)
