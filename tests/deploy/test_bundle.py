"""A bundle holds all that it needs, and what is not as it was written is refused in one sentence."""

import json
import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pytest
import torch

from deployed import make_bundle, make_card
from fedthe import store, tree
from fedthe.deploy.bundle import FACTS, read_bundle, write_bundle
from fedthe.deploy.online import Online, load_bundle
from fedthe.methods import METHODS
from fedthe.nets.wrap import wrap_module
from helpers import fails
from trained_methods import ON_NORMS, make_federation, net_for


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A bundle of FedTHE, which tests copy."""
    path = tmp_path_factory.mktemp("bundles") / "fedthe"
    write_bundle(make_bundle("fedthe"), path, make_card("fedthe"))
    return path


@pytest.fixture
def bundle(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "bundle")


@pytest.mark.parametrize("name", METHODS)
def test_every_method_comes_back(name, tmp_path):
    made = make_bundle(name)
    id = write_bundle(made, tmp_path / "b", make_card(name))
    found = read_bundle(tmp_path / "b", net=net_for(name) if name in ON_NORMS else None)  # that net is in no registry
    assert found.id == id != ""
    assert replace(found, id="", parts={}) == replace(made, parts={})
    for part, leaves in made.parts.items():
        expected, again = tree.flatten(leaves), tree.flatten(found.parts[part])
        assert list(expected) == list(again)
        for leaf, same in zip(expected.values(), again.values(), strict=True):
            assert leaf.dtype == same.dtype
            assert torch.equal(leaf.nan_to_num(nan=-7.5), same.nan_to_num(nan=-7.5))
    x = make_federation().pool.x[:2]
    np.testing.assert_array_equal(
        Online(found).predict_batch(x)[1].probabilities, Online(made).predict_batch(x)[1].probabilities
    )


def test_a_card_tells_people(bundle):
    card = (bundle / "card.md").read_text(encoding="utf-8")
    about = make_bundle("fedthe").about
    assert f"{about['validation_accuracy']:.1f} % on {about['validation_rows']} rows" in card
    for words in ("FedTHE", "client 0", "dark", "uint8 [16, 16, 3]", "load_bundle"):
        assert words in card


def test_nothing_is_a_pickle(bundle):
    assert sorted(path.name for path in bundle.iterdir()) == [
        "bundle.json",
        "card.md",
        *("model.safetensors", "monitor.safetensors", "state.safetensors"),
    ]
    json.loads((bundle / FACTS).read_bytes())


@pytest.mark.parametrize("name", ["model.safetensors", "state.safetensors", "monitor.safetensors", FACTS])
def test_damage_is_noticed(bundle, name):
    content = (bundle / name).read_bytes()
    for damaged in (
        content[: len(content) // 2],
        content[:-3],
        b"",
        content[:-9] + b"x" + content[-8:],
        content + b" x",
    ):
        (bundle / name).write_bytes(damaged)
        fails(lambda: load_bundle(bundle), name)
    (bundle / name).unlink()
    fails(lambda: load_bundle(bundle), f"has no {name}")


def test_a_part_of_another_bundle_is_noticed(bundle, tmp_path):
    write_bundle(make_bundle("fedthe", 1), tmp_path / "other", make_card("fedthe"))
    shutil.copy(tmp_path / "other" / "model.safetensors", bundle / "model.safetensors")
    fails(lambda: load_bundle(bundle), "model.safetensors was changed")


def edit(bundle, **changes):
    """Another content with a valid seal, as a newer version or a bad one might write it."""
    facts = json.loads((bundle / FACTS).read_bytes())
    facts.pop("seal")
    store.write_sealed(bundle / FACTS, facts | changes)


def test_a_newer_format_says_so(bundle):
    edit(bundle, format=2)
    fails(lambda: load_bundle(bundle), "format 2", "update fedthe")


def test_a_changed_value_breaks_the_seal(bundle):
    facts = json.loads((bundle / FACTS).read_bytes())
    store.write_json(bundle / FACTS, facts | {"classes": ["a", "b", "c"]})
    fails(lambda: load_bundle(bundle), "changed after it was written")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"classes": ["a"]}, "1 classes"),
        ({"kind": "cake"}, "not what fedthe writes"),
        ({"method": {"is": "os.system"}}, "there is no os.system"),
        ({"leaves": {"model": ["x"], "state": [], "monitor": []}}, "safetensors"),
        ({"input": {"dtype": "uint8", "shape": [16, 16, 1], "square": "crop"}}, "do not fit"),
        ({"input": {"dtype": "evil", "shape": [4], "square": "crop"}}, ""),
        ({"seed": "many"}, "not what fedthe writes"),
        ({"files": {}}, "not what fedthe writes"),
    ],
)
def test_nonsense_with_a_valid_seal_is_refused(bundle, changes, word):
    edit(bundle, **changes)
    fails(lambda: load_bundle(bundle), word)


def test_tensors_that_do_not_fit_are_refused(tmp_path):
    made = make_bundle("fedthe")
    flat = tree.flatten(made.parts["model"])
    wrong = {
        "has the shape": {"body.conv1": torch.zeros(3, 3)},
        "not finite": {"body.conv1": torch.full_like(flat["body.conv1"], torch.nan)},
        "do not fit": {"own_descriptor": torch.zeros(7)},
    }
    for word, change in wrong.items():
        parts = {**made.parts, "model": tree.unflatten(flat | change)}
        write_bundle(replace(made, parts=parts), tmp_path / "b", "")
        fails(lambda: load_bundle(tmp_path / "b"), word)
    missing = tree.unflatten({name: leaf for name, leaf in flat.items() if name != "personal.out"})
    write_bundle(replace(made, parts={**made.parts, "model": missing}), tmp_path / "b", "")
    fails(lambda: load_bundle(tmp_path / "b"), "do not fit fedthe")


def test_a_wrapped_module_is_given_again(tmp_path):
    def make():
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))

    net = wrap_module(make, head="3")
    made = make_bundle("fedavg")
    bundle = replace(made, method=replace(made.method, net=net), parts={**made.parts, "model": net.init(0)})
    write_bundle(bundle, tmp_path / "b", "")
    fails(lambda: load_bundle(tmp_path / "b"), "give the network")
    pixels = make_federation().pool.x[0]
    again = load_bundle(tmp_path / "b", net=wrap_module(make, head="3"))
    np.testing.assert_array_equal(again.predict(pixels).probabilities, Online(bundle).predict(pixels).probabilities)


def test_only_bundles_are_replaced(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("keep")
    fails(lambda: write_bundle(make_bundle("fedavg"), tmp_path / "notes", ""), "is no bundle")
    assert (tmp_path / "notes" / "mine.txt").read_text() == "keep"
    (tmp_path / "empty").mkdir()
    for _ in range(2):
        write_bundle(make_bundle("fedavg"), tmp_path / "empty", "")
    assert load_bundle(tmp_path / "empty").bundle.name == "fedavg"


def test_other_things_are_no_bundle(tmp_path):
    fails(lambda: load_bundle(tmp_path / "nothing"), "does not exist", "fedthe export")
    fails(lambda: load_bundle(tmp_path), "has no bundle.json")
    (tmp_path / FACTS).write_text("[]")
    fails(lambda: load_bundle(tmp_path), "bundle.json")


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Ed25519 keys as OpenSSH and OpenSSL write them: private and public files of two owners."""
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    folder, found = tmp_path_factory.mktemp("keys"), {}
    for owner, format, public in (
        ("ssh", s.PrivateFormat.OpenSSH, (s.Encoding.OpenSSH, s.PublicFormat.OpenSSH)),
        ("pem", s.PrivateFormat.PKCS8, (s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo)),
    ):
        key = Ed25519PrivateKey.generate()
        private = key.private_bytes(s.Encoding.PEM, format, s.NoEncryption())
        (folder / owner).write_bytes(private)
        (folder / f"{owner}.pub").write_bytes(key.public_key().public_bytes(*public))
        found[owner] = folder / owner, folder / f"{owner}.pub"
        locked = key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.BestAvailableEncryption(b"secret"))
        (folder / "locked").write_bytes(locked)
    return found


@pytest.mark.parametrize("owner", ["ssh", "pem"])
def test_a_signature_is_verified(keys, owner, tmp_path):
    private, public = keys[owner]
    other = keys["pem" if owner == "ssh" else "ssh"][1]
    write_bundle(make_bundle("fedavg"), tmp_path / "b", "", private)
    assert load_bundle(tmp_path / "b", verify=public).bundle.name == "fedavg"
    assert load_bundle(tmp_path / "b").bundle.name == "fedavg"
    fails(lambda: load_bundle(tmp_path / "b", verify=other), "is not signed by", "do not trust")
    edit(tmp_path / "b", seed=1)  # the seal is valid, the signature is not
    assert load_bundle(tmp_path / "b").bundle.seed == 1
    fails(lambda: load_bundle(tmp_path / "b", verify=public), "is not signed by")
    (tmp_path / "b" / "signature.txt").write_text("ed25519 nonsense!")
    fails(lambda: load_bundle(tmp_path / "b", verify=public), "is not signed by")
    (tmp_path / "b" / "signature.txt").unlink()
    fails(lambda: load_bundle(tmp_path / "b", verify=public), "is not signed")


def test_bad_keys_are_refused_before_anything_is_written(keys, tmp_path):
    private, public = keys["ssh"]
    (tmp_path / "none").write_text("no key")
    for key, word in ((tmp_path / "absent", "cannot be read"), (tmp_path / "none", "ssh-keygen"), (public, "private")):
        fails(lambda key=key: write_bundle(make_bundle("fedavg"), tmp_path / "b", "", key), word)
    fails(lambda: write_bundle(make_bundle("fedavg"), tmp_path / "b", "", private.with_name("locked")), "passphrase")
    assert not (tmp_path / "b").exists()
    write_bundle(make_bundle("fedavg"), tmp_path / "b", "", private)
    fails(lambda: load_bundle(tmp_path / "b", verify=private), "public key")


def test_a_key_of_ssh_keygen_signs(tmp_path):
    if shutil.which("ssh-keygen") is None:
        pytest.skip("there is no ssh-keygen")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key"], check=True)
    write_bundle(make_bundle("fedavg"), tmp_path / "b", "", tmp_path / "key")
    assert load_bundle(tmp_path / "b", verify=tmp_path / "key.pub").bundle.name == "fedavg"
