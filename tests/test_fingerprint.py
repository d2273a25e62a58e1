"""Edited code is another method: nothing that came of the old code is taken for what the new one gives."""

import importlib
import sys
import textwrap
from dataclasses import dataclass

import pytest

from fedthe.fingerprint import _is_library, fingerprint
from fedthe.methods import METHODS, STUDIES, compose
from fedthe.methods.base import FedAvg, Method, Rounds
from fedthe.nets.cnn import CNN

NET = CNN(3, size=16)
SCRIPT = """
from dataclasses import dataclass
import torch
from fedthe.methods.base import Answers, Method, Predictor
{more}
SIGN = 1.0
UNUSED = 5
def helper(x):
    return SIGN * x
@dataclass(frozen=True)
class Mine(Predictor):
    scale: float = 1.0
    def answer(self, method, mine, state, samples):
        # {comment}
        return Answers(helper(method.logits(mine, samples.x)) * {factor}), state
    answer_given = Predictor.answer_given
"""


def load(name, factor="1.0", more="", comment="", change=("", "")):
    """The classes of a script, as `python script.py` or a notebook has them."""
    space = {"__name__": name}
    exec(compile(SCRIPT.format(factor=factor, more=more, comment=comment).replace(*change), "script.py", "exec"), space)
    return space["Mine"]


def mark(**how):
    return fingerprint(compose(NET, load("__main__", **how)))


def test_the_packages_own_methods_have_none():
    for recipe in (METHODS | STUDIES).values():
        assert fingerprint(compose(NET, recipe)) is None


def test_the_same_code_is_the_same_whoever_compiled_it():
    assert mark() == mark()
    assert mark() == mark(comment="another comment")


@pytest.mark.parametrize(
    "change",
    [
        ("* 1.0)", "* 2.0)"),
        ("return SIGN * x", "return SIGN * x + 0"),
        ("SIGN = 1.0", "SIGN = 2.0"),
        ("answer_given = Predictor.answer_given", ""),
        ("helper(method", "abs(method"),
    ],
)
def test_a_change_of_what_runs_is_seen(change):
    source = SCRIPT.format(factor="1.0", more="", comment="")
    assert change[0] in source or change[0] == "* 1.0)"
    assert mark() != mark(change=change if change[0] in source else ("* 1.0", "* 2.0"))


def test_what_a_script_does_not_refer_to_is_not_seen():
    assert mark() == mark(change=("UNUSED = 5", "UNUSED = 6"))


def test_a_module_counts_as_a_whole_and_so_does_what_it_imports(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    for number, other in ((5, 1), (6, 1), (6, 2), (6, 2)):
        (tmp_path / "others_help.py").write_text(f"def more(x):\n    return x * {other}\n")
        source = SCRIPT.format(factor="1.0", more="import others_help", comment="").replace(
            "return SIGN * x", "return others_help.more(SIGN * x)"
        )
        (tmp_path / "my_plugin.py").write_text(source.replace("UNUSED = 5", f"UNUSED = {number}"))
        for name in ("my_plugin", "others_help"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
        try:
            module = importlib.import_module("my_plugin")
        finally:
            sys.dont_write_bytecode = before
        seen.append(fingerprint(compose(NET, module.Mine)))
    assert len(set(seen)) == 3
    assert seen[2] == seen[3]


def test_a_patched_class_of_the_package_is_not_the_packages_own(monkeypatch):
    monkeypatch.setattr(FedAvg, "local", lambda self, fit, shared, mine, shard: shared)
    assert fingerprint(Method(NET)) is not None


def test_a_base_a_part_and_a_closure_count():
    def make(number):
        @dataclass(frozen=True)
        class Base(Rounds):
            def local(self, fit, shared, mine, shard):
                return fit(self.loss, shared) if number else shared

        @dataclass(frozen=True)
        class Derived(Base):
            pass

        return compose(NET, Derived)

    assert fingerprint(make(1)) == fingerprint(make(1))
    assert fingerprint(make(1)) != fingerprint(make(2))


EDITED = """
from dataclasses import dataclass
import sys
import torch
torch.set_num_threads(1)
import fedthe
from fedthe.methods.base import Answers, Method, Predictor

@dataclass(frozen=True)
class Sign(Predictor):
    def answer(self, method, mine, state, samples):
        return Answers({sign}method.logits(mine, samples.x)), state

fedthe.METHODS["mine"] = Sign
results = fedthe.run(dataset=sys.argv[1], methods=["mine", "fedavg"], clients=3, dirichlet=1.0, rounds=2,
                     local_epochs=1, samples=8, lr=0.1, out=sys.argv[2])
print(results.reused, [row.right for row in results.rows if row.method == "mine"])
"""


def test_an_edited_method_does_not_get_the_old_answers(data, tmp_path):
    import subprocess

    def run(sign):
        (tmp_path / "script.py").write_text(textwrap.dedent(EDITED).format(sign=sign))
        command = [sys.executable, "script.py", data, str(tmp_path / "run")]
        said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert said.returncode == 0, said.stderr
        reused, rows = said.stdout.split(" ", 1)
        return int(reused), rows

    first = run("")
    assert first[0] == 0
    assert run("") == (2, first[1])
    edited = run("-")
    assert edited[0] == 1  # FedAvg's answer
    assert edited[1] != first[1]
    assert run("") == (2, first[1])  # and back: the old answer is still there


def test_the_word_on_answers_from_disk(data, tmp_path, fedthe):
    path = tmp_path / "mine.toml"
    path.write_text(
        f'dataset = "{data}"\nclients = 3\nrounds = 1\nlocal_epochs = 1\nsamples = 2\nmethods = ["fedavg"]\n'
    )
    said = fedthe("run", path, f"out={tmp_path / 'run'}")
    assert "read from disk" not in said.out
    said = fedthe("run", path, f"out={tmp_path / 'run'}", "methods=fedavg,memo_g")
    assert "1 of 2 results were read from disk" in said.out


HELPED = """
import functools, types, collections
from dataclasses import dataclass
import numpy as np
import torch
{imports}
from fedthe.methods.base import Answers, Predictor
class Holder:
    def __init__(self, value):
        self.value = value
    def get(self, x):
        return x * self.value
def plain(x, by=1.0):
    return x * by
@functools.lru_cache
def remembered(x):
    return x * 1.0
HELD, SPACE, SPAN, QUEUE = Holder(1.0), types.SimpleNamespace(v=1.0), range(3), collections.deque([1.0])
PART, ACT, DTYPE = functools.partial(plain, by=1.0), torch.tanh, torch.float32
KIND = np.dtype("uint8")
LAYER = torch.nn.Linear(1, 1, bias=False)
with torch.no_grad():
    LAYER.weight.fill_(1.0)
BOUND = Holder(1.0).get
LOOP = {{}}
LOOP["self"] = LOOP
HALF = torch.ones(2, dtype=torch.bfloat16)
class Rude:
    def __getattr__(self, name):
        raise SystemExit(name)
RUDE = Rude()
@dataclass(frozen=True)
class Mine(Predictor):
    def answer(self, method, mine, state, samples):
        x = samples.x
        {inside}
        return Answers({use}), state
"""


def mark_helped(use, change=("", ""), imports="", inside="pass"):
    source = HELPED.format(use=use, imports=imports, inside=inside)
    assert change[0] in source
    space = {"__name__": "__main__"}
    exec(compile(source.replace(*change), "script.py", "exec"), space)
    return fingerprint(compose(NET, space["Mine"]))


@pytest.mark.parametrize(
    ("use", "change"),
    [
        ("PART(1)", ("(plain, by=1.0)", "(plain, by=-1.0)")),
        ("HELD.get(x)", ("= Holder(1.0), types", "= Holder(2.0), types")),
        ("HELD.get(x)", ("return x * self.value", "return x + self.value")),
        ("BOUND(x)", ("BOUND = Holder(1.0)", "BOUND = Holder(2.0)")),
        ("SPACE.v", ("SimpleNamespace(v=1.0)", "SimpleNamespace(v=2.0)")),
        ("SPAN", ("range(3)", "range(4)")),
        ("QUEUE", ("deque([1.0])", "deque([2.0])")),
        ("remembered(x)", ("return x * 1.0", "return x * 2.0")),
        ("ACT(x)", ("torch.tanh", "torch.neg")),
        ("DTYPE", ("torch.float32", "torch.float64")),
        ("KIND", ("uint8", "int8")),
        ("LAYER(x)", ("fill_(1.0)", "fill_(2.0)")),
        ("HALF", ("torch.ones(2, dtype", "torch.zeros(2, dtype")),
    ],
)
def test_whatever_a_method_refers_to_counts(use, change):
    assert mark_helped(use) == mark_helped(use)
    assert mark_helped(use) != mark_helped(use, change)


def test_what_refers_to_itself_or_raises_for_any_name_ends():
    assert mark_helped("LOOP") == mark_helped("LOOP")
    assert mark_helped("RUDE") == mark_helped("RUDE")


@pytest.mark.parametrize(
    ("imports", "inside", "use"),
    [
        ("", "import lazy_help", "lazy_help.more(x)"),
        ("", "from lazy_help import more", "more(x)"),
        ("import lazy_pack.sub", "pass", "lazy_pack.sub.more(x)"),
        ("", "from lazy_pack import sub", "sub.more(x)"),
        ("import profile as profile", "pass", "profile.more(x)"),
    ],
)
def test_modules_imported_anywhere_count(imports, inside, use, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "lazy_pack").mkdir()
    (tmp_path / "lazy_pack" / "__init__.py").touch()
    names = ("lazy_help", "lazy_pack", "lazy_pack.sub", "profile")
    before = {name: sys.modules.pop(name, None) for name in names}
    seen = []
    try:
        for number in (1, 2, 2):
            for name in ("lazy_help.py", "lazy_pack/sub.py", "profile.py"):
                (tmp_path / name).write_text(f"def more(x):\n    return x * {number}\n")
            for name in names:
                sys.modules.pop(name, None)
            importlib.invalidate_caches()
            _is_library.cache_clear()
            seen.append(mark_helped(use, imports=imports, inside=inside))
    finally:
        _is_library.cache_clear()
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
    assert seen[0] != seen[1]
    assert seen[1] == seen[2]


def test_a_patch_that_wraps_the_original_is_seen(monkeypatch):
    import functools

    original = Rounds.local

    @functools.wraps(original)
    def patched(self, *given):
        return original(self, *given)

    monkeypatch.setattr(Rounds, "local", patched)
    assert fingerprint(Method(NET)) is not None


NETWORK = """
import torch
from torch import nn
from fedthe.nets.wrap import wrap_module
FACTOR = 1.0
def act(h):
    return FACTOR * torch.tanh(h)
class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Linear(4, 5)
    def forward(self, x):
        return act(self.w(x))
def make():
    module = nn.Sequential()
    module.add_module("inner", Inner())
    module.add_module("fc", nn.Linear(5, 3))
    nn.init.zeros_(module.fc.bias)
    return module
"""


def mark_network(change=("", ""), drawn=True):
    space = {"__name__": "__main__"}
    assert change[0] in NETWORK
    exec(compile(NETWORK.replace(*change), "script.py", "exec"), space)
    net = space["wrap_module"](space["make"] if drawn else space["make"]())
    return fingerprint(compose(net, METHODS["fedavg"]))


@pytest.mark.parametrize("drawn", [True, False])
def test_the_code_of_a_wrapped_module_counts_and_that_of_all_its_layers(drawn):
    assert mark_network(drawn=drawn) == mark_network(drawn=drawn)
    changes = [
        ("act(self.w(x))", "act(self.w(x + 0))"),
        ("torch.tanh(h)", "torch.sin(h)"),
        ("FACTOR = 1.0", "FACTOR = 2.0"),
    ]
    changes += [("zeros_", "ones_")] if drawn else []
    marks = [mark_network(change, drawn) for change in changes]
    assert len({mark_network(drawn=drawn), *marks}) == len(changes) + 1


def test_a_module_of_torchs_layers_alone_has_no_code_of_its_own():
    from torch import nn

    from fedthe.nets.wrap import wrap_module

    module = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    assert fingerprint(compose(wrap_module(module, head="2"), METHODS["fedavg"])) is None
