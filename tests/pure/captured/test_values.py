"""What runs of a captured step are given and give back: declared, packed, and put into its structure."""

from __future__ import annotations

import random
from typing import Any

import pytest

from raycollect.captured.step import Capture
from raycollect.captured.step_values import MISSING, Parameters, ReturnedValues
from raycollect.driver.pending import Argument
from raycollect.engine.step_program import Given
from raycollect.engine.value_codec import pack_value, unpack_values
from raycollect.errors import CaptureError


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
    returned = ReturnedValues.of(asked, read)
    given = returned.given({"rate": 0.25, "other": 1})
    assert given in ({}, {"rate": 0.25})
    assert returned.given({}) in ({}, {"rate": 0.5})
    assert returned.fill([one.upper() for one in leaves], given) == expected


def test_an_argument_may_be_called_self() -> None:
    with pytest.raises(CaptureError, match="can't run"):
        Capture().run(self=1)
