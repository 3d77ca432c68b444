"""What tests check of calls: that they are refused, and that nothing is sent."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect.driver.controller import Controller


@contextlib.contextmanager
def refused(error, *texts, actors=()):
    """The call raises `error` with all of `texts` in its message, and no buffer of `actors` changes."""
    before = ray.get([actor.read.remote() for actor in actors])
    with pytest.raises(error) as caught:
        yield caught
    for text in texts:
        assert text in str(caught.value)
    for actor, buffer in zip(actors, before, strict=True):
        np.testing.assert_array_equal(ray.get(actor.read.remote()), buffer)


@contextlib.contextmanager
def nothing_sent(submits):
    """Nothing is submitted, and no plan is under way."""
    before = len(submits)
    yield
    assert len(submits) == before
    assert [tracker for tracker in Controller.current().plans.trackers() if not tracker.resolved] == []


def assert_works(refs, **given):
    """The next collective of these refs leaves the same in all."""
    col.allreduce_refs(refs, op="max", **given)
    first, *others = col.get(refs)
    for one in others:
        np.testing.assert_array_equal(one, first)
