"""Weights of a file are the start of every seed, and a training depends on them."""

import os
import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import fedthe
from fedthe import tree
from fedthe.config import make_config
from fedthe.errors import InputError
from fedthe.methods.compose import describe
from fedthe.nets import CNN, ResNet20GN
from fedthe.nets.make import make_net
from fedthe.nets.started import start_from_file
from fedthe.nets.wrap import wrap_module
from fedthe.store import content_hash
from torch_modules import MLP, Reader, ResNet18, draw_features, draw_tokens, seeded


@pytest.fixture
def path(tmp_path):
    return tmp_path / "weights.safetensors"


def save(path, state, **changes):
    """A state_dict, with tensors replaced by others, or removed (None)."""
    state = {name.replace("__", "."): leaf for name, leaf in (dict(state) | changes).items() if leaf is not None}
    save_file({name: leaf.contiguous() for name, leaf in state.items()}, path)
    return path


def start(net, path):
    """Without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return start_from_file(net, path)


def same(a, b):
    a, b = tree.flatten(a), tree.flatten(b)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("wrapped", [MLP, seeded(MLP)], ids=["function", "module"])
def test_a_wrapped_module_starts_with_a_state_dict(path, wrapped):
    trained, x = seeded(MLP, seed=5), draw_features()
    net = start(wrap_module(wrapped), save(path, trained.state_dict()))
    for seed in range(2):
        torch.testing.assert_close(net.logits(net.init(seed), x), trained(x))
    assert same(tree.unflatten({name: start.draw((0, 0)) for name, start in net.starts().items()}), net.init(0))
    net.init(0)["head"]["out"].zero_()
    assert net.init(0)["head"]["out"].abs().sum() > 0  # nobody's changes are seen


def test_a_network_of_the_package_starts_with_its_leaves(path):
    trained = ResNet20GN(3, size=16).init(5)
    net = start(ResNet20GN(3, size=16), save(path, tree.flatten(trained)))
    assert same(net.init(0), trained)
    assert net.feature_dim == 64
    x = torch.zeros(2, 3, 16, 16)
    assert torch.equal(net.logits(trained, x), ResNet20GN(3, size=16).logits(trained, x))


def test_a_training_depends_on_the_weights_and_not_on_the_path(path, tmp_path):
    (tmp_path / "b").mkdir()
    states = [seeded(MLP, seed=seed).state_dict() for seed in (5, 5, 6)]
    paths = [save(tmp_path / name, state) for name, state in zip(("a", "b/c", "d"), states, strict=True)]
    one, two, other = (start(wrap_module(MLP), each) for each in paths)
    assert one == two
    assert hash(one) == hash(two)
    assert content_hash(describe(one)) == content_hash(describe(two))
    assert len({content_hash(describe(each)) for each in (one, other, one.inner)}) == 3


@pytest.mark.parametrize("kind", ["classes", "missing"])
def test_a_last_layer_for_other_classes_is_not_taken(path, kind):
    state = seeded(MLP, seed=5, classes=7).state_dict()
    if kind == "missing":
        state = {name: leaf for name, leaf in state.items() if not name.startswith("fc.")}
    save(path, state)
    says = "is for 7 classes, not 3" if kind == "classes" else "has none"
    with pytest.warns(UserWarning, match=f"its last layer {says}, so the last layer starts anew"):
        net = start_from_file(wrap_module(MLP), path)
    first, second = net.init(0), net.init(1)
    assert same(first["body"], second["body"])
    assert torch.equal(first["body"]["layers"]["1"]["weight"], state["layers.1.weight"])
    assert same(first["head"], wrap_module(MLP).init(0)["head"])
    assert not same(first["head"], second["head"])


def test_buffers_and_frozen_parameters_are_taken_too(path):
    trained, x = seeded(lambda: Reader(fused=True), seed=5), draw_tokens()
    trained.positions += 1
    fresh = seeded(lambda: Reader(fused=True))
    fresh.embedding.requires_grad_(False)
    before = wrap_module(fresh)
    net = start(before, save(path, trained.state_dict()))
    torch.testing.assert_close(net.logits(net.init(0), x), trained(x))
    assert net.inner.architecture != before.architecture
    assert not torch.equal(before.module.positions, net.inner.module.positions)


def test_statistics_of_batch_norms_that_are_no_more_are_passed_over(path):
    net = start(wrap_module(ResNet18, normalise="group"), save(path, seeded(ResNet18, seed=5).state_dict()))
    assert torch.equal(net.init(0)["body"]["conv1"]["weight"], seeded(ResNet18, seed=5).conv1.weight)


def test_half_precision_becomes_single(path):
    state = {name: leaf.half() for name, leaf in seeded(MLP).state_dict().items()}
    assert start(wrap_module(MLP), save(path, state)).init(0)["head"]["out"].dtype == torch.float32


STATE = seeded(MLP).state_dict()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layers.1.weight": None}, r"lacks layers\.1\.weight; it has fc\.bias, fc\.weight"),
        ({"extra": torch.zeros(2)}, "has extra, which the network does not"),
        (
            {"layers.1.weight": torch.zeros(8, 5)},
            r"layers\.1\.weight has the shape \[8, 5\], but the network's is \[8, 12\]",
        ),
        ({"fc.weight": torch.zeros(3, 9)}, r"fc\.weight has the shape \[3, 9\], but the network's is \[3, 8\]"),
        ({"fc.bias": torch.zeros(3, dtype=torch.int64)}, r"fc\.bias must hold finite floating-point numbers"),
        ({"fc.bias": torch.full((3,), float("nan"))}, r"fc\.bias must hold finite floating-point numbers"),
    ],
)
def test_other_weights_are_refused(path, changes, says):
    with pytest.raises(InputError, match=says):
        start(wrap_module(MLP), save(path, STATE, **changes))


@pytest.mark.parametrize("kind", ["missing", "folder", "fifo", "empty", "pickle", "truncated", "huge"])
def test_other_files_are_refused(path, kind):
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "pickle":
        torch.save(STATE, path)
    elif kind == "truncated":
        path.write_bytes(save(path, STATE).read_bytes()[:-3])
    elif kind == "huge":  # a header that claims more than there is
        path.write_bytes((2**40).to_bytes(8, "little") + b"{}")
    with pytest.raises(InputError, match=r"weights\.safetensors"):
        start(wrap_module(MLP), path)


def test_a_run_starts_from_a_file(data, tmp_path, path):
    small = {"dataset": data, "size": 16, "clients": 2, "rounds": 1, "local_epochs": 1, "methods": ["fedavg"]}
    small |= {"samples": 4, "tests": ["original"], "crop": 0, "out": str(tmp_path / "run")}
    save(path, tree.flatten(CNN(3, size=16).init(5)))
    drawn, loaded = fedthe.run(**small), fedthe.run(**small, init=str(path))
    assert drawn.trainings.keys().isdisjoint(loaded.trainings)
    assert fedthe.run(**small, init=str(path)).reused == 1
    assert make_net(make_config({"init": str(path)}), 3, (3, 16, 16)).init(3)["head"]["out"].tolist() == (
        CNN(3, size=16).init(5)["head"]["out"].tolist()
    )
    with pytest.raises(InputError, match="does not exist"):
        fedthe.run(**small, init=str(tmp_path / "no"))
    assert np.isfinite([row.accuracy for row in loaded.rows]).all()
