"""Settings that are wrong, absurd or hostile: one sentence each, and nothing on disk is lost or made."""

import os
import random

import numpy as np
import pytest

from fedthe.config import Config, make_config, read_config, read_example, read_words
from fedthe.data import load_dataset
from fedthe.data.plan import build
from fedthe.engine.pick import pick_engine
from fedthe.errors import InputError
from fedthe.methods.make import make_methods
from fedthe.nets.make import make_net
from fedthe.text import quote
from helpers import ROOT

NUMBERS = [
    "1" + 400 * "0",
    "1e400",
    "-1e400",
    "1" + 30 * "0",
    5000 * "9",
    "-" + 5000 * "9",
    "nan",
    "-nan",
    "inf",
    "-inf",
    "-0.0",
    "0x10",
    "0b1",
    "1_000",
    "1__0",
    "_1",
    "٣",
    "１２",
    "",
    " ",
    "-1",
    "0",
    "1e-400",
    "5e-324",
    "1e308",
    "2147483648",
    "9223372036854775808",
    "1.5",
    "true",
    "True",
    "none",
    "[]",
    "1,2",
    ",",
    "1,",
    "0,0",
    "1e",
    "--1",
    "+5",
    "0o7",
]
TEXTS = [
    "",
    " ",
    "\x00",
    "a\x00b",
    "\x1b[31m",
    "a\nb",
    "\ud800",
    "../../x",
    "/etc/x",
    ".",
    "..",
    "a/b",
    "a\\b",
    300 * "a",
    5000 * "a",
    100 * "a/",
    "~nosuchuser",
    "\u202e",
    "漢" * 100,
    "%s{}",
    "npz:",
    "npz:\x00",
    "npz:" + 300 * "a",
    "none",
    "1",
    "cuda:99",
    "cuda:-1",
    "cpu:1",
    "meta",
    "true",
    ":",
    "=",
    "[bold]",
    "-",
    "--help",
    "\r",
    "\x7f",
    "\u2028",
    "💥",
]
KEYS = [
    *Config.__dataclass_fields__,
    "hyper.fedthe.alpha",
    "hyper.fedthe",
    "hyper.",
    "hyper..",
    "hyper.x.y",
    "nokey",
    "",
]
TOML = [
    '"a',
    "\x00",
    "\x01 = 1",
    "a = 1\na = 2",
    "rounds = 2020-01-01",
    "rounds = []",
    "seeds = [[0]]",
    "methods = {a = 1}",
    "rounds = " + 5000 * "9",
    "rounds = 1" + 30 * "0",
    "lr = 1" + 400 * "0",
    "lr = 1e400",
    "lr = nan",
    "clients = inf",
    "a = " + 1000 * "[" + 1000 * "]",
    "methods = " + 1000 * "[" + 1000 * "]",
    "hyper = " + 500 * "{a = " + "1" + 500 * "}",
    "hyper." + ".".join(1000 * "a") + " = 1",
    "hyper = 3",
    "hyper = [1]",
    "[hyper]\nfedthe = 3",
    '[hyper.""]\na = 1',
    '[hyper.fedthe]\n"" = 1',
    '[hyper.fedthe]\n"\\u0000" = 1',
    "[hyper.fedthe]\nalpha = nan",
    "[hyper.fedthe]\nalpha = []",
    "[hyper.fedthe]\nalpha = 1" + 400 * "0",
    "[hyper.fedthe]\nalpha = 12:00:00",
    '[hyper.fedthe]\nalpha = ""',
    "[rounds]",
    '"\\u0000" = 1',
    '"" = 1',
    'name = "\\u0000"',
    'name = "../x"',
    'name = "/x"',
    'out = "\\u001b"',
    'out = ""',
    "out = 3",
    'dataset = "\\u0000"',
    'dataset = ""',
    "name = true",
    "flip = 1",
    'flip = "yes"',
    "curve = [3, 2]",
    "keep = [-1]",
    "seeds = " + str([*range(5000), 0]),
    "rounds = 0x7fffffffff",
    "rounds = 1_000_000_000_000",
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "tiny.npz"
    images = np.random.default_rng(0).integers(0, 256, (150, 16, 16, 3), dtype=np.uint8)
    np.savez(path, images=images, labels=np.arange(150) % 3)
    return f"npz:{path}"


def draw_case(random, tiny):
    """A config file and words; some of them are right."""
    lines = [f'dataset = "{tiny}"', "clients = 3", "dirichlet = 1"]
    words = []
    if random.random() < 0.4:
        lines.append(random.choice(TOML))
    for _ in range(random.choice((0, 1, 1, 2))):
        value = random.choice(random.choice((NUMBERS, TEXTS)))
        words.append(f"{random.choice(KEYS)}{random.choice(('=', '=', '=', '=', '=', ''))}{value}")
    head = random.choice(("", "", "", "\ufeff"))
    return (head + "\n".join(lines) + "\n").encode("utf-8", "surrogatepass") + random.choice((b"", b"", b"\xff")), words


def prepare(config):
    """All that a run refuses before it trains."""
    pick_engine(config.engine, config.device, config.precision)
    make_methods(config, make_net(config, 2, (3, 32, 32)))
    dataset = load_dataset(config.dataset, natural=config.natural, size=config.size)
    for seed in config.seeds:
        build(dataset, config.settings(seed))


def try_case(case, words, path):
    path.write_bytes(case)
    try:
        prepare(read_config(path, words))
    except InputError as error:
        return " ".join(str(error).split())
    return None


def list_files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.filterwarnings("error")
def test_absurd_settings_are_one_sentence_and_leave_no_trace(tiny, tmp_path, monkeypatch):
    """FUZZ=5000 tries as many."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "kept").write_text("kept")
    path, refused, cases = tmp_path / "c.toml", 0, int(os.environ.get("FUZZ", 200))
    path.touch()
    before = list_files(tmp_path)
    for seed in range(cases):
        case, words = draw_case(random.Random(seed), tiny)
        try:
            said = try_case(case, words, path)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {words} {case[-200:]!r}") from error
        refused += said is not None
        assert said is None or (said.endswith((".", "?")) and len(said) < 1000), (seed, said)
        assert list_files(tmp_path) == before
    assert cases / 3 < refused < cases  # some are right


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["lr=1" + 400 * "0"], "lr must be a finite number, not inf"),
        (["clients=1e400"], "clients must be a whole number, not inf"),
        (["rounds=1" + 30 * "0"], "rounds is too large"),
        (["rounds=" + 5000 * "9"], "rounds must be a whole number, not inf"),
        (["rounds=٣"], "rounds must be a whole number"),
        (["dirichlet=nan"], "dirichlet must be a finite number, not nan"),
        (["hyper.fedthe.alpha=inf"], "hyper.fedthe.alpha must be a finite number"),
        (["name=../../x"], "not a path"),
        (["name=/x"], "not a path"),
        (["name=" + 300 * "x"], "too long"),
        (["out=" + 300 * "x"], "too long"),
        (["out="], "out must not be empty"),
        (["name=a\x00"], "without control characters"),
        (["out=\x1b[31m"], "without control characters"),
        (
            ["net=cnn", "width=4"],
            "cnn has no width to set; leave width out, or use a network that has one: resnet20",
        ),
        (["net=cct4", "width=2"], "cct4 has no width"),
        (["net=cct4", "momentum=0.9"], "adam takes no momentum"),
        (["optimizer=adam", "momentum=0.5"], "adam takes no momentum"),
        (["methods=fedavg,", "fedthe"], 'or in quotes: methods="fedavg, fedthe"'),
        (["methods=fedavg", ",fedthe"], "in quotes"),
        (["rounds=3", "fedthe"], "is not a setting"),
        (["net=resnet20_gn", "width=100000"], "width must be at most"),
    ],
)
def test_a_wrong_word_is_explained(words, says):
    with pytest.raises(InputError) as refused:
        prepare(make_config(read_words(words)))
    assert says in str(refused.value)
    assert len(str(refused.value)) < 300


def test_right_words_of_odd_forms_are_taken():
    config = make_config(read_words(["methods= fedavg, fedthe ", "seeds=0, 1", "lr=-0.0", "rounds=1_000"]))
    assert (config.methods, config.seeds, config.rounds) == (("fedavg", "fedthe"), (0, 1), 1000)
    assert str(config.lr) == "0.0"
    assert make_config({"net": "resnet20_gn", "width": 4}).width == 4
    assert make_config({"net": "cct4", "optimizer": "sgd", "momentum": 0.5}).training.optimizer.momentum == 0.5


def test_only_a_file_is_read_as_a_config_and_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "link.toml").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe.toml", tmp_path / "link.toml", tmp_path):
        with pytest.raises(InputError, match="not a regular file"):
            read_config(path)
    (tmp_path / "large.toml").write_bytes(b"#" * 2**21)
    with pytest.raises(InputError, match="2,097,152 bytes"):
        read_config(tmp_path / "large.toml")
    with pytest.raises(InputError, match="cannot be read"):
        read_config(tmp_path / (300 * "a"))


def test_a_file_with_a_byte_order_mark_is_read(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("rounds = 7\n", encoding="utf-8-sig")
    assert read_config(path).rounds == 7


def test_the_packaged_example_is_the_file_in_configs_and_runs():
    example = read_example()
    assert example == (ROOT / "configs" / "quick.toml").read_text(encoding="utf-8")
    prepare(read_config(ROOT / "configs" / "quick.toml"))


def test_quoting_is_short_whatever_the_value():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    for value in (deep, 10**5000, list(range(10**5)), "x" * 10**6, np.arange(10**6), {"a": "\x1b" * 100}, {1: deep}):
        said = quote(value)
        assert len(said) <= 80
        assert said.isprintable()
