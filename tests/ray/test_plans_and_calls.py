"""Plans of the driver beside calls of the members that are out of step."""

from __future__ import annotations

import time

import numpy as np
import pytest

import raycollect as col
from raycollect import errors
from tests.support.actors import Worker, told

WORLD, ODD = 3, 1

MESHES = ["shm", "tcp", pytest.param("gloo", marks=pytest.mark.full)]
"""Where ranks agree: in shared memory, or on sockets, as those of gloo do."""


@pytest.fixture(params=MESHES)
def trio(request, actors):
    """Three actors in a declared group, in which plans and calls must work when the test is over."""
    workers = actors(Worker, WORLD)
    col.declare_collective_group(workers, backend=request.param)
    yield workers
    refs = [worker.make.remote(lambda self: np.ones(3)) for worker in workers]
    col.allreduce_refs(refs)
    assert all((one == WORLD).all() for one in col.get(refs))
    assert told([worker.call.remote(summed) for worker in workers]) == [[WORLD] * 3] * WORLD


def summed(self):
    tensor = np.ones(3)
    col.allreduce(tensor)
    return list(tensor)


@pytest.mark.parametrize("callers", [(ODD,), (0, 2)], ids=["one", "two"])
def test_a_call_out_of_step_with_a_plan_is_a_named_mismatch(trio, callers):
    """Some ranks call what the others never will, as the driver's plan comes first."""
    out_of_step = [trio[rank].call.remote(summed) for rank in callers]
    refs = [worker.make.remote(lambda self: np.ones(5)) for worker in trio]

    began_s = time.monotonic()
    col.allreduce_refs(refs)

    assert time.monotonic() - began_s < 30
    assert all((found == WORLD).all() for found in col.get(refs))
    for error in told(out_of_step):
        assert isinstance(error, errors.MismatchError), error
        assert {violation.field for violation in error.violations} == {"call"}
        assert {violation.rank in callers for violation in error.violations} == {True, False}
