"""`"auto"` for actors to which Ray gave GPUs: whom it asks, and what the plan says. There is no GPU here."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import raycollect as col
from raycollect.backends import Gpu
from raycollect.driver import groups, member_discovery
from tests.support.actors import Worker

pytestmark = pytest.mark.usefixtures("tidy")


def _has_cupy(self):
    return "cupy" in sys.modules


@pytest.fixture
def owners(actors, monkeypatch):
    """Actors of which Ray says that each has a GPU."""
    described = member_discovery.describe
    own = {"accelerators": (("GPU", ("0",)),)}
    monkeypatch.setattr(member_discovery, "describe", lambda *args: [info | own for info in described(*args)])
    return actors(Worker, 2)


def test_actors_with_gpus_that_can_not_be_used_meet_as_before(owners):
    """They are asked, and have no driver."""
    group = col.declare_collective_group(owners)
    refs = [worker.get_buffer.remote() for worker in owners]
    told = col.plan(col.allreduce_refs, refs).explain()
    assert "shm: chosen, as 2 ranks are on one machine" in told
    col.allreduce_refs(refs)
    np.testing.assert_array_equal(col.get(refs[0]), np.full(10, 2, np.float32))
    assert "chosen, as 2 ranks are on one machine" in group._repr_html_()
    assert col.get([worker.call.remote(_has_cupy) for worker in owners]) == [False] * 2


def test_the_plan_says_why_gpus_are_not_used(owners, monkeypatch):
    unlike = [Gpu(name=f"0000:{at}0:00.0", version=22803 + at, may_share=True) for at in (1, 2)]
    monkeypatch.setattr(groups.member_discovery, "gpus", lambda *_: unlike)
    col.declare_collective_group(owners)
    refs = [worker.get_buffer.remote() for worker in owners]
    told = col.plan(col.allreduce_refs, refs).explain()
    assert "each has a GPU, but the ranks have different releases of NCCL" in told
