"""Objects between members."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from raycollect.errors import InvalidArgumentError, MismatchError, NotATensorError, RefusedError
from raycollect.member import objects, operations
from tests.pure.member.operation_bodies import backend

__all__ = ["backend"]  # fixtures


def _plain(name, rank):
    told = {"rank": rank, "words": ("a" * 100 * rank, None, b"\0"), "array": np.arange(rank, dtype=np.int16)}
    everybody = objects.allgather_object(told, name)
    assert [one["rank"] for one in everybody] == [0, 1, 2]
    assert everybody[2]["words"] == ("a" * 200, None, b"\0")
    assert everybody[2]["array"].tolist() == [0, 1]
    said = objects.broadcast_object(told if rank == 1 else None, 1, name)
    assert said["rank"] == 1
    assert (said is told) == (rank == 1)
    gathered = objects.gather_object(rank * 1.5, 2, name)
    assert gathered == ([0.0, 1.5, 3.0] if rank == 2 else None)
    return objects.scatter_object([0, "one", [2]] if rank == 0 else None, 0, name)


def test_plain_values_travel(crew, backend):
    assert crew.group(3, backend).must(_plain) == [0, "one", [2]]


def _pickled(name, rank):
    said = objects.allgather_object(Fraction(1, rank + 2), name, pickle=True)
    return said, objects.scatter_object([Fraction(1), {2}] if rank else None, 1, name, pickle=True)


def test_any_object_travels_where_pickle_is_asked_for(crew):
    both = [Fraction(1, 2), Fraction(1, 3)]
    assert crew.group(2).must(_pickled) == [(both, Fraction(1)), (both, {2})]


def _strange(name, rank):
    strange = Fraction(1, 3) if rank else 1
    errors = []
    for call in (
        lambda: objects.allgather_object(strange, name),
        lambda: objects.gather_object(strange, 0, name),
        lambda: objects.broadcast_object(strange, 1, name),
        lambda: objects.scatter_object([1, strange], 1, name),
        lambda: objects.scatter_object([1, 2, 3], 1, name),
        lambda: objects.allgather_object((lambda: rank) if rank else 1, name, pickle=True),
        lambda: objects.scatter_object(1, 1, name),
        lambda: objects.scatter_object((one for one in (1, 2, 3)), 1, name),
    ):
        with pytest.raises(NotATensorError) as caught:
            call()
        assert caught.value.op.endswith("_object")
        errors.append(str(caught.value))
    x = np.ones(1)
    operations.allreduce(x, name)  # the group works on
    assert x == 2
    return errors


def test_what_can_not_travel_is_refused_on_all_ranks(crew):
    here, there = crew.group(2).must(_strange)
    assert all("rank 1" in one for one in (*here, *there))
    assert "Fraction" in there[0]
    assert "plain values, or pickle=True on all ranks" in there[0]
    assert "a value that can be pickled" in there[5]
    assert "3 values for 2 ranks" in there[4]
    assert "not iterable" in there[6]


CALLS = {
    "allgather_object": lambda name, rank, root=0, **how: objects.allgather_object(rank, name, **how),
    "broadcast_object": lambda name, rank, root=0, **how: objects.broadcast_object(rank, root, name, **how),
    "gather_object": lambda name, rank, root=0, **how: objects.gather_object(rank, root, name, **how),
    "scatter_object": lambda name, rank, root=0, **how: objects.scatter_object([1, 2], root, name, **how),
}


def _refused(name, rank):
    """What each call raises where one rank gives something odd: the class, the operation, the ranks that are blamed."""
    odd = [("pickle", True, 1), *(("pickle", wrong, who) for wrong in ("yes", np.ones(2)) for who in (0, 1))]
    found = []
    for operation, call in CALLS.items():
        for what, wrong, who in [*odd, *([("root", np.ones(2), 1)] * (operation != "allgather_object"))]:
            with pytest.raises(RefusedError) as caught:
                call(name, rank, **({what: wrong} if rank == who else {"pickle": False}))
            error = caught.value
            found.append(
                (type(error), error.op == operation or what == "root", {one.rank for one in error.violations} >= {who})
            )
    return found, objects.broadcast_object(rank, 1, name, pickle=np.int64(1))


def test_what_is_no_flag_or_rank_or_differs_is_refused_on_all_ranks_by_whoever_gives_it(crew):
    """A rank that only takes was not refused; of an array one rank raised ValueError, and the others waited."""
    here, there = crew.group(2).must(_refused)
    assert here == there
    found, last = here
    assert last == 1
    assert [one for one in found if not (one[1] and one[2])] == []
    assert {kind for kind, *_ in found} == {MismatchError, InvalidArgumentError}


def _scattered(name, rank):
    return [objects.scatter_object(values if rank else object(), 1, name) for values in (np.zeros(2), iter("ab"))]


def test_values_to_scatter_are_any_iterable(crew):
    """The truth of an array of several elements has no meaning, and that of one is not whether there are any."""
    assert crew.group(2).must(_scattered) == [[0.0, "a"], [0.0, "b"]]
