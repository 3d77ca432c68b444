"""What ranks of a group do in processes of their own, for the tests of the members' operations."""

from __future__ import annotations

import numpy as np
import pytest

from raycollect.member import init
from raycollect.member import operations as col

BACKENDS = ("shm", "tcp", "gloo")


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def summed(name, rank, n=4, timeout_s=None):
    x = np.full(n, rank + 1, np.float32)
    col.allreduce(x, name, timeout_s=timeout_s)
    return x


def exchange(name, rank, nbytes):
    """Every rank sends to the next and receives from the one before, at once."""
    world = init.get_collective_group_size(name)
    mine, theirs = np.full(nbytes, rank, np.uint8), np.zeros(nbytes, np.uint8)
    before = (rank - 1) % world
    sent = col.send(mine, (rank + 1) % world, name, async_op=True)
    col.recv(theirs, before, name)
    sent.wait()
    assert (theirs == before).all()


def close(name, rank):
    init.destroy_collective_group(name)
