"""How runs name methods: what is parsed, what is refused, and that a name is read back as it was written."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as some

from fedthe.config import Config, make_config, read_words
from fedthe.names import name_method
from fedthe.specs import LONGEST, Spec, parse_spec
from fedthe.text import split_list
from helpers import fails

KEYS = some.from_regex(r"[a-z]\w{0,8}(\.[a-z]\w{0,8})?", fullmatch=True).filter(str.isascii)
VALUES = some.one_of(
    some.booleans(),
    some.integers(-(2**31) + 1, 2**31 - 1),
    some.floats(allow_nan=False, allow_infinity=False),
    some.sampled_from(["slw", "a-b", "x.y"]),
)


@given(some.dictionaries(KEYS, VALUES, max_size=3), some.sampled_from([None, "mine.py", "a b/c.py", r"C:\x\mine.py"]))
def test_what_is_written_is_read_back_as_the_same_method(hyper, file):
    spec = Spec("fedthe", file=file).vary(hyper)
    again = parse_spec(str(spec))
    assert again == spec  # 1.0 and 1 are equal, and have one name
    assert str(again) == str(spec)
    assert not re.search(r'[<>:"/\\|?*\s]', spec.id)  # what file systems refuse


@pytest.mark.parametrize(
    ("text", "id", "name"),
    [
        ("fedthe", "fedthe", "FedTHE"),
        (" fedthe ( beta = .50 , alpha=1.0 ) ", "fedthe(alpha=1,beta=0.5)", "FedTHE (alpha=1, beta=0.5)"),
        ("fedthe_plus(then.lr=1e-3)", "fedthe_plus(then.lr=0.001)", "FedTHE+ (then.lr=0.001)"),
        ("dir/mine.py:FedPer", "FedPer", "FedPer"),
        ("mine.py:FedPer(mu=2,on=True)", "FedPer(mu=2,on=true)", "FedPer (mu=2, on=true)"),
        ("fedthe()", "fedthe", "FedTHE"),
    ],
)
def test_a_method_has_one_id_and_one_name(text, id, name):
    assert parse_spec(text).id == id
    assert name_method(id) == name


@pytest.mark.parametrize(
    "text",
    [
        *("", "fedthe(", "fedthe)", "fedthe(alpha)", "fedthe(alpha=)", "fedthe(alpha=1,alpha=2)", "a:b"),
        *("fedthe(a=b/c)", "fedthe(1=2)", "fedthe(alpha=nan)", "fedthe(alpha=(1))", "fedthe(a=1)(b=2)"),
        f"fedthe(alpha={'x' * LONGEST})",
    ],
)
def test_anything_else_is_refused_in_a_sentence(text):
    fails(lambda: parse_spec(text))


def test_commas_within_parentheses_do_not_separate_methods():
    assert split_list("a(x=1, y=2),b , c(z=3)") == ["a(x=1, y=2)", "b", "c(z=3)"]
    config = make_config(read_words(["methods=fedthe(alpha=0.2, beta=0.3),fedavg"]))
    assert config.methods == ("fedthe(alpha=0.2,beta=0.3)", "fedavg")
    assert make_config(config.as_dict()) == config  # as it is read from config.json
    assert list(config.specs) == ["fedthe(alpha=0.2,beta=0.3)", "fedavg"]


def test_methods_with_the_same_name_are_refused():
    fails(lambda: make_config({"methods": ["fedthe(alpha=1)", "fedthe(alpha=1.0)"]}), "each only once")
    fails(lambda: Config(methods=("a.py:Mine", "b.py:Mine")), "a.py:Mine and b.py:Mine", "rename")
