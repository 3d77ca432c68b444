"""What runs of a captured step are given and give back: declared, packed, and put into its structure."""

from __future__ import annotations

import math
import random
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from raycollect.captured.step import Capture
from raycollect.captured.step_values import ARGUMENTS_NBYTES, MISSING, RESERVED, Parameters, Returned
from raycollect.driver.pending import Argument
from raycollect.engine.step_program import Given
from raycollect.engine.value_codec import pack_value, unpack_values
from raycollect.errors import CaptureError, InvalidArgumentError


@pytest.mark.parametrize("name", ["", "2x", "a b", 7, None, *RESERVED, "known"])
def test_a_name_that_run_could_not_take_is_refused(name: Any) -> None:
    parameters = Parameters()
    parameters.declare("known", MISSING)
    with pytest.raises(InvalidArgumentError, match="name"):
        parameters.declare(name, MISSING)


def test_a_default_that_does_not_travel_is_refused_at_once() -> None:
    parameters = Parameters()
    with pytest.raises(InvalidArgumentError, match="default"):
        parameters.declare("rate", object())
    assert parameters.declare("rate", 0.5).default == 0.5, "what was refused is not declared"


def test_an_argument_is_no_array() -> None:
    made: Any = Parameters().declare("rate", MISSING)
    with pytest.raises(CaptureError):
        np.asarray(made)
    with pytest.raises(CaptureError):
        np.array(made, np.float32)


def test_an_argument_is_of_one_step() -> None:
    mine, others = Parameters(), Parameters()
    made = mine.declare("rate", MISSING)
    assert mine.own(made) is made
    with pytest.raises(CaptureError, match="belongs to another captured step"):
        others.own(made)


@pytest.mark.parametrize("seed", range(5))
def test_each_participant_gets_its_own_arguments_in_its_own_order(seed: int) -> None:
    rng = random.Random(seed)
    parameters, names = Parameters(), [f"p{at}" for at in range(6)]
    defaults = {name: rng.randrange(100) for name in rng.sample(names, 3)}
    for name in names:
        parameters.declare(name, defaults.get(name, MISSING))
    wanted = [tuple(rng.sample(names, rng.randrange(len(names)))) for _ in range(5)]
    parameters.place(wanted)
    given = {name: [name, seed] for name in names if name not in defaults or rng.random() < 0.5}
    packed = parameters.pack(given)
    values = defaults | given
    assert [unpack_values(one) for one in packed] == [tuple(values[name] for name in mine) for mine in wanted]


def test_argument_error_lists_all_violations() -> None:
    parameters = Parameters()
    parameters.declare("rate", MISSING)
    parameters.place([("rate",)])
    with pytest.raises(InvalidArgumentError) as caught:
        parameters.pack({"speed": 1, "turn": 2})
    assert [(one.field, one.found) for one in caught.value.violations] == [
        ("speed", "given"),
        ("turn", "given"),
        ("rate", "missing"),
    ]
    with pytest.raises(InvalidArgumentError, match="rate is a value of type object, which can't travel"):
        parameters.pack({"rate": object()})
    with pytest.raises(InvalidArgumentError, match="speed is given, expected no arguments: the step declares none"):
        Parameters().pack({"speed": 1})
    with pytest.raises(InvalidArgumentError, match=rf"at most {ARGUMENTS_NBYTES}"):
        parameters.pack({"rate": bytes(ARGUMENTS_NBYTES)})


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_run_that_is_given_nothing_sends_nothing(count: int) -> None:
    parameters = Parameters()
    parameters.place([()] * count)
    assert parameters.pack({}) == (b"",) * count
    with pytest.raises(InvalidArgumentError, match="declares none"):
        parameters.pack({"rate": 1})


@pytest.mark.parametrize("seed", range(10))
def test_a_structure_comes_back_as_it_was_asked_for(seed: int) -> None:
    """Whatever its nesting, with values, arguments and constants among each other."""
    rng, parameters = random.Random(seed), Parameters()
    rate = parameters.declare("rate", 0.5)
    leaves: list[str] = []

    def read(value: Any, where: str) -> int | Argument | Given:
        if isinstance(value, Argument):
            return value
        if isinstance(value, int):
            return Given(pack_value(value))
        assert where.startswith("the value")
        leaves.append(value)
        return len(leaves) - 1

    def build(depth: int) -> tuple[Any, Any]:
        """What is asked for, and what should come."""
        kind = rng.choice(("list", "tuple", "dict") if depth else ("leaf", "argument", "constant"))
        if kind == "leaf":
            name = f"leaf {rng.random()}"
            return name, name.upper()
        if kind == "argument":
            return rate, 0.25
        if kind == "constant":
            return (number := rng.randrange(1000)), number
        inner = [build(rng.randrange(depth)) for _ in range(rng.randrange(4))]
        asked, come = [one for one, _ in inner], [one for _, one in inner]
        if kind == "dict":
            return dict(enumerate(asked)), dict(enumerate(come))
        return (asked, come) if kind == "list" else (tuple(asked), tuple(come))

    asked, expected = build(rng.randrange(5))
    returned = Returned.of(asked, read)
    given = returned.given({"rate": 0.25, "other": 1})
    assert given in ({}, {"rate": 0.25})
    assert returned.given({}) in ({}, {"rate": 0.5})
    assert returned.fill([one.upper() for one in leaves], given) == expected


def test_a_constant_is_another_array_each_time() -> None:
    returned = Returned.of([np.arange(3)], lambda value, where: Given(pack_value(value)))
    (first,), (second,) = (returned.fill([], {}) for _ in range(2))
    first[:] = 7
    assert second.tolist() == [0, 1, 2]


def test_unreadable_value_error_gives_its_place() -> None:
    def refuse(value: Any, where: str) -> int:
        raise ValueError(where)

    for values, where in (([0], "the value[0]"), ({"a": (1,)}, "the value['a'][0]"), (5, "the value")):
        with pytest.raises(ValueError) as caught:
            Returned.of(values, refuse)
        assert str(caught.value) == where


def test_an_argument_may_be_called_self() -> None:
    with pytest.raises(CaptureError, match="can't run"):
        Capture().run(self=1)


@pytest.mark.parametrize("timeout_s", ["1", math.nan, 0, -1])
def test_a_time_limit_that_makes_no_sense_is_refused_and_breaks_nothing(timeout_s: Any) -> None:
    step = Capture()
    step._state, step._installed = "", Mock()
    with pytest.raises(InvalidArgumentError, match="timeout_s"):
        step.run(timeout_s=timeout_s)
    step._installed.runs.begin.assert_not_called()  # which can't tell it from a signal, after which the step is broken
