"""What is wrong with a method is one sentence, in a check and in every engine."""

from __future__ import annotations

from dataclasses import replace

import pytest

import fedthe
from fedthe.engine.check import _try
from fedthe.engine.loop import Loop
from fedthe.engine.stack import Stack
from fedthe.errors import Failed, InputError
from fedthe.methods import METHODS, compose
from helpers import fails
from tiny_net import TINY
from wrong_methods import IN_A_CHECK, IN_THE_STACK, WRONG


@pytest.mark.parametrize("case", WRONG)
def test_a_check_says_what_is_wrong_in_one_sentence(case):
    recipe, says = WRONG[case]
    sentence = fails(lambda: fedthe.check_method(recipe), says)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    assert len(sentence) < 350


@pytest.mark.parametrize("engine", [Loop, Stack])
@pytest.mark.parametrize("case", [case for case in WRONG if case not in IN_A_CHECK])
def test_engines_say_the_same(case, engine):
    recipe, says = WRONG[case]
    if engine is Loop and case in IN_THE_STACK:
        return
    with pytest.raises((Failed, InputError)) as caught:
        use(recipe, engine())
    assert says in str(caught.value)


def use(recipe, engine):
    method = compose(replace(TINY, size=8), recipe)
    method.check()
    _try(method, engine)


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedthe", "ttt", "memo_p"])
def test_a_check_says_what_a_method_does(name):
    says = fedthe.check_method(METHODS[name])
    assert "gives the same numbers in both engines" in says
    assert ("it keeps nothing" in says) == (name in ("fedavg", "ttt", "memo_p"))
    assert ("rotation [4, 6]" in says) == (name == "ttt")
    assert ("the mean of what it keeps as descriptor [6]" in says) == (name == "fedthe")
    assert ("own_control.head.out [3, 6]" in says) == (name == "scaffold")
