"""The tutorial's programs print what the tutorial prints, in both ways; the documents' examples run as documented."""

from __future__ import annotations

import re

import numpy as np
import pytest

from examples.documents import declarative, groups, point_to_point

pytestmark = pytest.mark.usefixtures("tidy")


def numbers(values):
    return f"tensor([{', '.join(f'{value}.' for value in values)}])"


def before(name, *tensors):
    return [f"Rank {rank} before {name}: {numbers(tensor)}" for rank, tensor in enumerate(tensors)]


def after(name, *tensors):
    return [f"Rank {rank} after {name}: {numbers(tensor)}" for rank, tensor in enumerate(tensors)]


ONE_TO_FOUR = [[1], [2], [3], [4]]
EVERYONES = f"[{', '.join(map(numbers, ONE_TO_FOUR))}]"

PRINTED = {
    "all_gather": [
        *before("all_gather", *ONE_TO_FOUR),
        *(f"Rank {rank} after all_gather: {EVERYONES}" for rank in range(4)),
    ],
    "all_reduce": [*before("all_reduce", *ONE_TO_FOUR), *after("all_reduce", [10], [10], [10], [10])],
    "reduce": [
        *before("reduce", *ONE_TO_FOUR),
        "Rank 0 is the root.",
        "Rank 0 after reduce: tensor([10.])",
        *(f"Rank {rank} after reduce: (unchanged) tensor([{rank + 1}.])" for rank in (1, 2, 3)),
    ],
    "reduce_scatter": [
        *before("reduce_scatter", *([rank] * 8 for rank in (1, 2, 3, 4))),
        *after("reduce_scatter", *([[10, 10]] * 4)),
    ],
    "send_recv": [*before("send_recv", *ONE_TO_FOUR), *after("send_recv", [4], [1], [2], [3])],
}
"""Program -> what it prints, as in the tutorial; the tutorial has no program for the last."""


class Again:
    """Starts an actor for each rank once, and has it begin anew for the next way: each imports torch."""

    def __init__(self, cls):
        self.cls, self.made = cls, {}

    def remote(self, rank):
        if rank in self.made:
            self.made[rank].__ray_call__.remote(lambda self, rank: self.__init__(rank), rank)
        else:
            self.made[rank] = self.cls.remote(rank)
        return self.made[rank]


@pytest.mark.full  # tests/ray/test_operations.py has all operations
@pytest.mark.parametrize("name", PRINTED)
def test_the_tutorial_prints_the_same_in_both_ways(name, capsys, monkeypatch):
    pytest.importorskip("torch")
    program = pytest.importorskip(f"examples.tutorial.{name}")
    monkeypatch.setattr(program, "Rank", Again(program.Rank))

    told = program.main()

    assert told == [PRINTED[name]] * 2
    ours = ("imperative:", "declarative:", "Rank ")  # Ray may print beside it
    printed = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip().startswith(ours)]
    assert printed == ["imperative:", *PRINTED[name], "declarative:", *PRINTED[name]]


@pytest.mark.full
def test_the_documents_two_ways_to_form_a_group():
    for results in (groups.imperative(), groups.declarative()):
        assert len(results) == 2
        for result in results:
            np.testing.assert_array_equal(result, np.full(4, 2, np.float32))


@pytest.mark.full
def test_the_documents_send_arrives_and_its_anti_pattern_is_an_error():
    received, error = point_to_point.main()

    np.testing.assert_array_equal(received, np.full(10, 3, np.float32))
    assert re.search(r"rank 1", error)
    assert "0.5 s" in error


def test_the_documents_declarative_call():
    for buffer in declarative.main():
        np.testing.assert_array_equal(buffer, np.full(10, 2, np.float32))
