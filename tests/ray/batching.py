"""What the tests of batches share: arrays on actors, and what is sent to these."""

from __future__ import annotations

import contextlib

import numpy as np

import raycollect as col
from raycollect.driver.controller import Controller


def hold(actor, value):
    """Keeps an array on an actor; returns its ref."""
    return actor.make.remote(lambda self, array: array.copy(), np.array(value, np.float32))


def spread(workers, value=lambda rank: [rank]):
    """Keeps an array on each actor, by its place; returns their refs."""
    return [hold(worker, value(rank)) for rank, worker in enumerate(workers)]


def found(refs):
    return [np.asarray(one).tolist() for one in col.get(refs)]


@contextlib.contextmanager
def nothing_sent(submits):
    """Nothing is submitted, and no plan is under way."""
    before = len(submits)
    yield
    assert len(submits) == before
    assert [tracker for tracker in Controller.current().trackers() if not tracker.resolved] == []
