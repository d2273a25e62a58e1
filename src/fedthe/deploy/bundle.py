"""A bundle: a folder with all that a deployed client needs, or all that a new client needs to join. No pickle is in it.

bundle.json          what it is: the method and its settings, classes, input, where it comes from, a hash of each part
NAME.safetensors     its tensors, as PARTS names them
card.md              the same for people
signature.txt        where it was signed: Ed25519, of bundle.json
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from .. import foreign, store, tree
from ..data.folder import Square
from ..engine.evaluate import make_samples
from ..errors import Damaged, Failed, InputError, code_of_a_method
from ..foreign import show_path
from ..methods.base import Method
from ..methods.compose import describe
from ..methods.restore import restore_method
from ..nets.started import Started
from ..text import clean, flatten
from ..tree import Tree
from . import signing

FORMAT = 1
FACTS, CARD, SIGNATURE = "bundle.json", "card.md", "signature.txt"
LARGEST = 2**24  # bytes of bundle.json
Kind = Literal["client", "global"]
PARTS: dict[Kind, tuple[str, ...]] = {
    # what a client deploys, its predictor's state before the first sample, and what its monitor compares a stream with
    "client": ("model", "state", "monitor"),
    # what the server has, what all clients deploy beside their own, and what each keeps before its first round
    "global": ("shared", "averages", "beside", "start"),
}
SIGN = "ed25519 "
DTYPES = ("uint8", "float32", "int64")  # pictures, features, tokens


@dataclass(frozen=True)
class Input:
    """What a model takes: samples of this dtype and shape; pictures are uint8 [h, w, c]."""

    dtype: str
    shape: tuple[int, ...]
    square: Square = "crop"  # how a picture of another shape is fitted

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES or self.square not in get_args(Square):
            raise InputError(f"samples are {' or '.join(DTYPES)}, not {clean(str(self.dtype))}.")
        if not self.shape or not all(isinstance(side, int) and side > 0 for side in self.shape):
            raise InputError(f"samples cannot have the shape {clean(str(list(self.shape)))}.")

    @property
    def is_picture(self) -> bool:
        return self.dtype == "uint8"

    def zeros(self, count: int = 1) -> Tensor:
        return torch.zeros((count, *self.shape), dtype=getattr(torch, self.dtype))


@dataclass(frozen=True)
class Bundle:
    """What a bundle holds. `parts` are trees of tensors, named as in PARTS."""

    kind: Kind
    name: str  # of the method
    method: Method
    classes: tuple[str, ...]
    input: Input
    seed: int
    client: int | None
    parts: Mapping[str, Tree]
    about: Mapping[str, Any] = field(default_factory=dict)  # where it comes from; plain data
    id: str = ""  # the SHA-256 of bundle.json, once it is written


def write_bundle(bundle: Bundle, path: Path, card: str, key: Path | str | None = None) -> str:
    """Write it whole, or not at all; return its id. key: the file of a private key to sign it with."""
    check_place(path)
    leaves = {name: tree.flatten(bundle.parts[name]) for name in PARTS[bundle.kind]}
    facts = {
        "id": "bundle",
        "format": FORMAT,
        "kind": bundle.kind,
        "name": bundle.name,
        "method": describe(strip(bundle.method)),
        "classes": list(bundle.classes),
        "input": {"dtype": bundle.input.dtype, "shape": list(bundle.input.shape), "square": bundle.input.square},
        "seed": bundle.seed,
        "client": bundle.client,
        "about": dict(bundle.about),
        "leaves": {name: list(flat) for name, flat in leaves.items()},  # in their order
    }
    with store.whole_folder(path) as folder:
        for name, flat in leaves.items():
            (folder / f"{name}.safetensors").write_bytes(to_safetensors(flat))
        (folder / CARD).write_text(card, encoding="utf-8")
        files = [*(f"{name}.safetensors" for name in leaves), CARD]
        store.write_sealed(folder / FACTS, facts | {"files": {name: store.file_hash(folder / name) for name in files}})
        content = (folder / FACTS).read_bytes()
        if key is not None:
            signature = base64.b64encode(signing.sign(content, key)).decode()
            (folder / SIGNATURE).write_text(f"{SIGN}{signature}\n", encoding="ascii")
    return hashlib.sha256(content).hexdigest()


def strip(method: Method) -> Method:
    """Without the weights that training started from: a deployed network has its own."""
    return replace(method, net=method.net.inner) if isinstance(method.net, Started) else method


def check_place(path: Path) -> None:
    """Refuse, before any work, to replace what is no bundle."""
    if path.exists() and not (path / FACTS).exists() and not (path.is_dir() and not any(path.iterdir())):
        raise InputError(f"{show_path(path)} exists and is no bundle; name another folder.")
    store.check_folder(path.absolute().parent)


def read_bundle(path: Path | str, *, verify: Path | str | None = None, net: Any = None) -> Bundle:
    """What `write_bundle` wrote, checked.

    verify: the file of a public key that must have signed it. net: the network, where that is a wrapped module.
    """
    path = store.expand(Path(path))
    content = _read_part(path, FACTS, LARGEST)
    if verify is not None:
        _check_signature(path, content, verify)
    facts = _read_facts(path, content)
    with foreign.explain(f"{show_path(path / FACTS)} is not what fedthe writes", "export it again"):
        kind, files = facts["kind"], facts["files"]
        named = {name: (f"{name}.safetensors", facts["leaves"][name]) for name in PARTS[kind]}
        parts = {name: _read_tensors(path, file, files[file], leaves) for name, (file, leaves) in named.items()}
        method = restore_method(facts["method"], net)
        takes = facts["input"]
        bundle = Bundle(
            kind=kind,
            name=str(facts["name"]),
            method=method,
            classes=tuple(map(str, facts["classes"])),
            input=Input(takes["dtype"], tuple(takes["shape"]), takes["square"]),
            seed=int(facts["seed"]),
            client=facts["client"],
            parts=parts,
            about=facts["about"],
            id=hashlib.sha256(content).hexdigest(),
        )
    _check_model(path, bundle)
    return bundle


def _read_facts(path: Path, content: bytes) -> dict[str, Any]:
    file = path / FACTS
    with foreign.explain(f"{show_path(file)} is damaged", "export it again"):
        value = json.loads(content)
    found = value.get("format") if isinstance(value, dict) else None
    if isinstance(found, int) and found > FORMAT:
        raise InputError(f"{show_path(path)} has format {found}, and this version reads {FORMAT}; update fedthe.")
    return store.unseal(file, value)


def _read_part(path: Path, name: str, limit: int | None = None) -> bytes:
    try:
        if limit is not None:
            return foreign.read_file(path / name, limit)
        with foreign.open_file(path / name) as file:
            foreign.check_room(show_path(path / name), file.seek(0, 2), "use a machine with more memory")
            file.seek(0)
            return file.read()
    except FileNotFoundError:
        what = "does not exist" if not path.exists() else f"has no {name}"
        raise InputError(f"{show_path(path)} {what}; `fedthe export` writes bundles.") from None
    except OSError as error:
        raise InputError(f"{show_path(path / name)} cannot be read ({error.strerror}).") from None


def _check_signature(path: Path, content: bytes, key: Path | str) -> None:
    signing.read_public_key(key)  # refuses a bad key before a missing signature
    if not (path / SIGNATURE).exists():
        raise InputError(f"{show_path(path)} is not signed; do not trust it, or leave out the key.")
    text = _read_part(path, SIGNATURE, 1000).decode("ascii", errors="replace").strip()
    try:
        signature = base64.b64decode(text.removeprefix(SIGN), validate=True)
    except ValueError:
        signature = b""
    if not signing.verify(content, signature, key):
        raise Damaged(f"{show_path(path)} is not signed by the owner of {show_path(key)}; do not trust it.")


def to_safetensors(flat: Mapping[str, Tensor]) -> bytes:
    from safetensors.torch import save

    # copies: a view of a larger tensor would be refused
    return save({name: leaf.detach().cpu().contiguous().clone() for name, leaf in flat.items()})


def _read_tensors(path: Path, file: str, expected: str, leaves: Sequence[str]) -> Tree:
    from safetensors.torch import load

    content = _read_part(path, file)
    if hashlib.sha256(content).hexdigest() != expected:
        raise Damaged(f"{show_path(path / file)} was changed or cut off after it was written; export it again.")
    with foreign.explain(f"{show_path(path / file)} is not a readable safetensors file", "export it again"):
        found = load(content)
        # copies, since alignment in the file would change the last bits of products
        return tree.unflatten({name: found[name].clone() for name in leaves})


def _check_model(path: Path, bundle: Bundle) -> None:
    """Refuse tensors that do not fit the method: it answers one sample, and the answer is thrown away."""
    where, net = show_path(path), bundle.method.net
    if net.classes != len(bundle.classes):
        raise InputError(f"{where} names {len(bundle.classes)} classes, but its network tells {net.classes} apart.")
    model = bundle.parts["model"] if bundle.kind == "client" else bundle.parts["shared"] | bundle.parts["averages"]
    flat = tree.flatten(model)
    for name, start in net.starts().items():
        if name in flat and flat[name].shape != start.shape:
            shapes = f"{list(flat[name].shape)}, but the network's is {list(start.shape)}"
            raise InputError(f"{where}: {clean(name)} has the shape {shapes}.")
    for name, leaf in flat.items():
        if leaf.is_floating_point() and not leaf.isfinite().all():
            raise InputError(f"{where}: {clean(name)} holds numbers that are not finite.")
    if bundle.kind == "client":
        samples = make_samples(bundle.method, bundle.input.zeros(), (bundle.seed, "check"))
        with refusing(f"{where}: its tensors do not fit {clean(bundle.name)}"), torch.no_grad():
            bundle.method.answer(model, tree.map_leaves(torch.clone, bundle.parts["state"]), samples)


@contextmanager
def refusing(problem: str) -> Iterator[None]:
    """Turn a failure of a method's code into one sentence."""
    try:
        with code_of_a_method():
            yield
    except Failed as error:
        raise InputError(f"{problem} ({flatten(error, 200)}).") from error


def take_input(x: np.ndarray, square: Square | None) -> Input:
    """What a model takes that was trained on samples x [n, ...]."""
    return Input(str(x.dtype), tuple(x.shape[1:]), square or "crop")
