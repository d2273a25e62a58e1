"""What a method's author may get wrong, said in one sentence with the name of the class and the way out."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack

from .. import tree
from ..errors import Broken, Failed, InputError, describe_error, is_out_of_memory
from ..tree import Tree
from .fit import Fitted
from .samples import Answers

if TYPE_CHECKING:
    from ..engine.fit import Optimizer
    from .base import Method, Personal, Rounds


# Columns that all samples have; predictors add others.
COLUMNS = (
    *("method", "seed", "test", "client", "sample", "label", "answer", "right", "probability", "truth"),
    *("log_probability", "segment", "origin", "shift", "kind", "severity"),
)


class WrongMethod(InputError):
    """A sentence that names the class at fault."""


# Code of a part


@contextmanager
def code_of(part: object, function: str, **given: Tree) -> Iterator[None]:
    """Say which function of which part an exception comes from. `given` are the trees that the function reads."""
    before = _read_generator()
    try:
        yield
    except (Failed, WrongMethod):
        raise
    except InputError as error:
        raise WrongMethod(f"{_name(part, function)}: {error}") from error
    except Exception as error:
        if is_out_of_memory(error):  # an engine that tries again with less must see it as it is
            raise
        raise Broken(error, _explain(part, function, error, given)) from error
    if _read_generator() != before:
        raise WrongMethod(f"{_name(part, function)} draws random numbers{_RANDOM}")


_RANDOM = ", so no run could be repeated; use fixed ones, from fedthe.rng."
_BRANCH = " branches in Python on the value of a tensor, which differs from client to client; use torch.where."
_IN_PLACE = " changes a tensor in place; return new tensors."


def _read_generator() -> bytes:
    """The state of torch's generator. Under vmap there is nothing to find out: torch itself refuses to draw."""
    return b"" if peek_interpreter_stack() else torch.random.get_rng_state().numpy().tobytes()


def _explain(part: object, function: str, error: Exception, given: Mapping[str, Tree]) -> str:
    words, where = describe_error(error), _find_line(part, error)
    if "random operation" in words:
        return f"{_name(part, function)} draws random numbers{where}{_RANDOM}"
    if "data-dependent control flow" in words or ".item() on a Tensor" in words:
        return f"{_name(part, function)}{where}{_BRANCH}"
    if "vmap: inplace" in words:
        return f"{_name(part, function)}{where}{_IN_PLACE}"
    hint = ""
    if isinstance(error, KeyError):
        has = " and ".join(f"`{name}` has {', '.join(leaves) or 'nothing'}" for name, leaves in given.items())
        ways = {"share": "", "keep": "", "aggregate": "", "answer": ": name it in `needs`"}
        hint = f"; {has}{ways.get(function, ': share it, keep it, or pass it to `fit`')}"
    return f"{_name(part, function)} raised {words.rstrip('.')}{where}{hint}."


def _find_line(part: object, error: Exception) -> str:
    """The last line of the part's own file that the error passed through."""
    file = getattr(sys.modules.get(type(part).__module__), "__file__", None)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" (line {lines[-1]} of {Path(file).name})" if file and lines else ""


def _name(part: object, function: str) -> str:
    return f"{type(part).__name__}.{function}"


# What functions return


def check_tree(what: str, value: object) -> None:
    """Refuse all but a nested dict of tensors."""
    if not isinstance(value, dict):
        raise WrongMethod(f"{what} must be a nested dict of tensors, not {_say_kind(value)}.")
    for name, leaf in tree.flatten(value).items():
        if not isinstance(leaf, Tensor):
            raise WrongMethod(f"{what} must be a nested dict of tensors, but its {name} is {_say_kind(leaf)}.")


def check_fitted(part: object, function: str, value: object) -> Fitted:
    who = _name(part, function)
    if not isinstance(value, Fitted):
        raise WrongMethod(f"{who} must return Fitted(params, losses), but it returned {_say_kind(value)}.")
    check_tree(f"what {who} returns as params", value.params)
    check_tree(f"what {who} returns as mine", value.mine)
    if not isinstance(value.losses, Tensor) or value.losses.ndim != 1:
        raise WrongMethod(f"{who} must return the losses that `fit` gave, a tensor [epochs], or none.")
    return value


def check_logits(part: object, function: str, value: object, samples: int, classes: int) -> Tensor:
    if not isinstance(value, Tensor) or value.shape != (samples, classes):
        shape = list(value.shape) if isinstance(value, Tensor) else _say_kind(value)
        wanted = f"{samples} samples and {classes} classes"
        raise WrongMethod(
            f"{_name(part, function)} must give one row of logits per sample, [{samples}, {classes}] for {wanted}, "
            f"but it gave {shape}."
        )
    return value


def check_answers(part: object, state: Tree, found: Any, samples: int, classes: int) -> tuple[Answers, Tree]:
    """A predictor's answers, and its next state, which is like the one before."""
    who = _name(part, "answer")
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Answers)):
        raise WrongMethod(f"{who} must return Answers and the next state, as a tuple.")
    answers, after = found
    check_logits(part, "answer", answers.logits, samples, classes)
    for name, column in answers.info.items():
        if not isinstance(column, Tensor) or column.shape[:1] != (samples,):
            raise WrongMethod(f"{who} must give info[{name!r}] as a tensor with one number per sample.")
        if "/" in name:
            raise WrongMethod(f"{who} gives info[{name!r}]; the name of a column must not have a slash.")
        if name in COLUMNS:
            raise WrongMethod(f"{who} gives info[{name!r}], but samples have a column of that name; choose another.")
    check_tree(f"the state that {who} returns", after)
    fault = tree.find_fault(tree.flatten(state), tree.flatten(after))
    if fault is not None:
        raise WrongMethod(
            f"{who} must return a state with the leaves, shapes and dtypes it was given, but {fault}; "
            f"begin with all of them in `start`."
        )
    return answers, after


def refuse_captured(loss: Callable[..., Any]) -> None:
    """A step is compiled once and run for all clients, so a loss must get its tensors as arguments."""
    found = next(_list_captured(loss, set()), None)
    if found is not None:
        raise InputError(
            f"the loss captures the tensor {found!r}; pass it as fit(loss, params, given), and read `given`."
        )


def _list_captured(value: Any, seen: set[int], name: str = "") -> Iterator[str]:
    """The names under which a function refers to tensors that are no arguments."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield name
    elif isinstance(value, functools.partial):
        for inner in (value.func, *value.args, *value.keywords.values()):
            yield from _list_captured(inner, seen, name or "an argument")
    elif isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _list_captured(inner, seen, name)
    elif hasattr(value, "__code__"):
        names, cells = value.__code__.co_freevars, value.__closure__ or ()
        for inner, cell in zip(names, cells, strict=True):
            try:
                yield from _list_captured(cell.cell_contents, seen, inner)
            except ValueError:  # a variable without a value yet
                continue
        for inner in value.__defaults__ or ():
            yield from _list_captured(inner, seen, "a default")


def _say_kind(value: object) -> str:
    name = type(value).__name__
    return "nothing" if value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


# A whole method, before any work


def start_parts(method: Method, params: Tree) -> tuple[Tree, Tree, Tree]:
    """What is shared, and what each client keeps for the rounds and for the personal part, before the first round."""
    rounds, personal = method.rounds, method.personal

    def call(part: Rounds | Personal, function: str) -> Tree:
        with code_of(part, function, params=params):
            made: Tree = getattr(part, function)(method.net, tree.map_leaves(lambda leaf: leaf, params))
        check_tree(f"what {_name(part, function)} returns", made)
        return made

    return call(rounds, "share"), {} if method.is_one_part else call(rounds, "keep"), call(personal, "keep")


def check_parts(method: Method, optimizer: Optimizer | None) -> None:
    """Refuse parts that do not fit together, or the optimizer, if it is known."""
    from .predictor import Predictor  # it imports this module

    shared, averages, mine = method.start(method.net.zeros())
    predictor = method.predictor
    who, deployed = type(predictor).__name__, {*shared, *averages, *mine["rounds"], *mine["personal"]}
    missing = [name for name in predictor.needs if name not in deployed]
    if missing:
        raise WrongMethod(
            f"{who} needs {missing[0]!r} in a client's state, "
            f"but this method has only {', '.join(sorted(deployed))}; choose another personal part."
        )
    if type(predictor).answer is Predictor.answer:
        raise WrongMethod(f"{who} has no `answer`; write answer(self, method, mine, state, samples).")
    if predictor.window is not None and predictor.window < 1:
        raise WrongMethod(f"{who} has a window of {predictor.window}; use 1 or more.")
    if optimizer is not None:
        check_optimizer(method, optimizer)
    predictor.check(method)


def check_optimizer(method: Method, optimizer: Optimizer) -> None:
    if method.rounds.plain_sgd and (optimizer.name != "sgd" or optimizer.momentum):
        has = f"momentum {optimizer.momentum:g}" if optimizer.name == "sgd" else optimizer.name
        who = type(method.rounds).__name__
        raise WrongMethod(f"{who} is defined for plain SGD, not for {has}; set optimizer=sgd and momentum=0.")


@contextmanager
def unchanged_state(part: object, mine: Tree) -> Iterator[None]:
    """Refuse changes in place to what a client deployed: other streams and methods read the same tensors."""
    before = {name: (leaf, leaf._version) for name, leaf in tree.flatten(mine).items()}
    yield
    for name, (leaf, version) in before.items():
        if leaf._version != version:
            who = part if isinstance(part, str) else _name(part, "answer")
            raise WrongMethod(f"{who} changes {name} of `mine` in place; return new tensors.")
