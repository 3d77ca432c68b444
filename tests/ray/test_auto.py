"""`"auto"` for actors to which Ray gave GPUs: whom it asks, and what the plan says. There is no GPU here."""

from __future__ import annotations

import pytest

import raycollect as col
from raycollect.backends import Gpu
from raycollect.driver import groups, member_discovery
from tests.support.actors import Worker

pytestmark = pytest.mark.usefixtures("tidy")


@pytest.fixture
def owners(actors, monkeypatch):
    """Actors of which Ray says that each has a GPU."""
    described = member_discovery.describe
    own = {"accelerators": (("GPU", ("0",)),)}
    monkeypatch.setattr(member_discovery, "describe", lambda *args: [info | own for info in described(*args)])
    return actors(Worker, 2)


def test_the_plan_says_why_gpus_are_not_used(owners, monkeypatch):
    unlike = [Gpu(name=f"0000:{at}0:00.0", version=22803 + at, may_share=True) for at in (1, 2)]
    monkeypatch.setattr(groups.member_discovery, "gpus", lambda *_: unlike)
    col.declare_collective_group(owners)
    refs = [worker.get_buffer.remote() for worker in owners]
    told = col.plan(col.allreduce_refs, refs).explain()
    assert "each has a GPU, but the ranks have different releases of NCCL" in told
