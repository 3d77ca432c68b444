"""A publisher's rank and a receiver's in one process, of three tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from msgspec import structs

from raycollect.backends import arrays
from raycollect.core.model import Address, Key
from raycollect.member.participant import Participant
from raycollect.planner.layout import layout
from raycollect.pos import Container, fetch
from raycollect.weights import atoms
from raycollect.weights.directory import Holder
from raycollect.weights.protocol import Version
from raycollect.weights.receiver import Receiver
from raycollect.weights.source import Source
from tests.pure.participants import entered, participant

NAMES = ("a", "b", "c")
LAYOUTS = {name: layout([4, 6], mesh={"rank": 1}, dtype="float32") for name in NAMES}
AMONG = atoms.cut(LAYOUTS, [])
NBYTES = 4 * 6 * 4
HERE = Holder(
    address=Address(host="", port=0, secret=b"here"),
    actor="T",
    incarnation="1",
    machine="here",
    rank=0,
    is_publisher=True,
)
KEY, OTHER = Key(b"k" * 28), Key(b"o" * 28)
V1 = Version(1, 1, cut=AMONG, count=1)


def tensors(value):
    return {name: np.full((4, 6), value, np.float32) for name in NAMES}


def source(here, held):
    return Source(here, Container.of(held, arrays.is_tensor), LAYOUTS, 0)


def receiver(here, held, **kwargs):
    return Receiver(here, "policy", Container.of(held, arrays.is_tensor), LAYOUTS, 0, **{"inplace": False, **kwargs})


def holder(key):
    places = atoms.served_places(LAYOUTS, 0, AMONG)
    return structs.replace(HERE, key=key), places


@contextmanager
def entered_here() -> Iterator[Participant]:
    """The actor of both ranks, for the length of a block; what reads from it has its store."""
    actor = participant()
    fetch.register_local(HERE.address.secret, actor.store)
    with entered(actor):
        yield actor
    fetch.forget_local(HERE.address.secret)
    actor.close()
