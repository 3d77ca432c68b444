"""Versions that a receiver reads from a publisher of another host, over sockets: as deltas, or as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from msgspec import structs

from raycollect.backends import arrays
from raycollect.core.model import Key
from raycollect.planner.layout import layout
from raycollect.pos import Container
from raycollect.weights import atoms
from raycollect.weights.directory import Holder
from raycollect.weights.hosts import Sharing
from raycollect.weights.protocol import Version
from raycollect.weights.receiver import Receiver
from raycollect.weights.source import Source
from tests.pure.participants import entered, participant
from tests.pure.weights.sides import HERE
from tests.support.values import replace

SHAPES = {"a": (64, 256), "b": (300, 70), "c": (5,), "d": (0, 3)}
DTYPES = {"a": "float32", "b": "bfloat16", "c": "float64", "d": "float32"}
NBYTES = 4 * 64 * 256 + 2 * 300 * 70 + 8 * 5
MOST = NBYTES // 10


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def _tensors(**dtypes: str) -> dict[str, Any]:
    return {name: np.zeros(shape, _dtype({**DTYPES, **dtypes}[name])) for name, shape in SHAPES.items()}


def _layouts(**dtypes: str) -> dict[str, Any]:
    named = {**DTYPES, **dtypes}
    return {name: layout(list(shape), mesh={"rank": 1}, dtype=named[name]) for name, shape in SHAPES.items()}


class World:
    """A publisher's rank, and receivers of another host."""

    def __init__(self, here: Any) -> None:
        self._here = here
        self.held = _tensors()
        self.source = Source(here, Container.of(self.held, arrays.is_tensor), _layouts(), 0)
        self.count = 0

    def receiver(self, mine: dict[str, Any], *, inplace: bool = False, **dtypes: str) -> Receiver:
        container = Container.of(mine, arrays.is_tensor)
        return Receiver(self._here, "policy", container, _layouts(**dtypes), 0, inplace=inplace)

    def step(self, every: int = 61) -> None:
        """Changes the bits of some elements, some to NaNs."""
        for array in self.held.values():
            words = array.reshape(-1).view(f"u{array.itemsize}")
            words[self.count % every :: every] += 1
            words[:: 50 * every] = np.iinfo(words.dtype).max

    def put(self) -> tuple[Version, list[tuple[Holder, Any]]]:
        """Puts a version; returns it with its holders."""
        self.count += 1
        version = Version(1, self.count, cut=atoms.cut(_layouts(), []), count=self.count)
        key, digests = self.source.seal(version, version.cut, bytes([self.count]))
        return replace(version, digests=digests), [self.holder(key)]

    def holder(self, key: Key) -> tuple[Holder, Any]:
        holder = structs.replace(HERE, address=self._here.address, machine="another", key=key)
        return holder, atoms.served_places(_layouts(), 0, atoms.cut(_layouts(), []))

    def brings(self, receiver: Receiver) -> int:
        """Puts a version and shows it; returns the bytes that were read."""
        version, holders = self.put()
        nbytes = receiver.stage(version, holders, 10.0).nbytes
        assert receiver.show(version)
        return nbytes

    def is_same(self, mine: dict[str, Any]) -> bool:
        return all(array.tobytes() == mine[name].tobytes() for name, array in self.held.items())


@pytest.fixture
def world() -> Iterator[World]:
    actor = participant()
    with entered(actor):
        yield World(actor)
    actor.close()


@pytest.mark.parametrize("inplace", [False, True])
def test_a_receiver_with_the_version_before_reads_what_differs(world: World, inplace: bool) -> None:
    mine = _tensors()
    receiver = world.receiver(mine, inplace=inplace)
    world.step()
    assert world.brings(receiver) == NBYTES
    for _ in range(3):
        world.step()
        assert 0 < world.brings(receiver) < MOST
        assert world.is_same(mine)


def _overwritten(world: World, receiver: Receiver, mine: dict[str, Any]) -> None:
    for array in mine.values():
        array += array.dtype.type(1)


def _skipped(world: World, receiver: Receiver, mine: dict[str, Any]) -> None:
    for _ in range(2):
        world.step()
        world.put()


def _dense(world: World, receiver: Receiver, mine: dict[str, Any]) -> None:
    world.step(1)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("other", [_overwritten, _skipped, _dense])
def test_a_receiver_with_another_base_reads_the_whole(
    world: World, other: Callable[[World, Receiver, dict[str, Any]], None], inplace: bool
) -> None:
    mine = _tensors()
    receiver = world.receiver(mine, inplace=inplace)
    world.brings(receiver)
    other(world, receiver, mine)
    world.step()
    assert world.brings(receiver) == NBYTES
    assert world.is_same(mine)
    world.step()
    assert world.brings(receiver) < MOST
    assert world.is_same(mine)


def test_another_receiver_is_asked_before_the_publisher_where_there_is_no_delta(world: World) -> None:
    receiver = world.receiver(_tensors())
    world.brings(receiver)
    world.step(1)
    version, holders = world.put()
    holder, places = holders[0]
    gone = structs.replace(holder, key=Key(bytes(28)), is_publisher=False)
    assert receiver.stage(version, [(gone, places), *holders], 10.0).nbytes == NBYTES
    assert receiver.stale_holders == (gone.key,)


def test_only_the_tensor_that_a_method_has_written_is_read_whole(world: World) -> None:
    mine = _tensors()
    receiver = world.receiver(mine)
    world.brings(receiver)
    mine["b"][1, 1] = 7
    world.step()
    assert mine["b"].nbytes < world.brings(receiver) < mine["b"].nbytes + MOST
    assert world.is_same(mine)


def test_a_version_that_was_verified_and_never_shown_is_no_base(world: World) -> None:
    mine = _tensors()
    receiver = world.receiver(mine)
    world.step()
    world.brings(receiver)
    world.step()
    receiver.stage(*world.put(), 10.0)
    world.step()
    assert world.brings(receiver) == NBYTES
    assert world.is_same(mine)


def test_a_receiver_of_another_dtype_reads_that_tensor_whole(world: World) -> None:
    mine = _tensors(b="float32")
    receiver = world.receiver(mine, b="float32")
    world.brings(receiver)
    world.step()
    whole = world.held["b"].nbytes
    assert whole < world.brings(receiver) < whole + MOST
    assert mine["b"].tobytes() == world.held["b"].astype(np.float32).tobytes()


def test_another_publisher_of_the_same_actor_gives_the_whole(world: World) -> None:
    mine = _tensors()
    receiver = world.receiver(mine)
    world.brings(receiver)
    world.source.close()
    world.source = Source(world._here, Container.of(world.held, arrays.is_tensor), _layouts(), 0)
    world.step()
    assert world.brings(receiver) == NBYTES
    world.step()
    assert world.brings(receiver) < MOST
    assert world.is_same(mine)


def test_a_receiver_that_has_the_version_is_asked_for_what_the_publisher_no_longer_has(world: World) -> None:
    mine, others = _tensors(), _tensors()
    receiver, late = world.receiver(mine), world.receiver(others)
    version, holders = world.put()
    for each in (receiver, late):
        each.stage(version, holders, 10.0)
        assert each.show(version)
    world.step()
    version, holders = world.put()
    receiver.stage(version, holders, 10.0)
    key = receiver.show(version)
    assert key
    world.source.close()
    holder, places = world.holder(key)
    served = structs.replace(holder, is_publisher=False), places
    assert late.stage(version, [*holders, served], 10.0).nbytes == NBYTES
    assert late.show(version)
    assert world.is_same(others)


def test_a_rank_lends_what_arrived_until_it_is_shown(world: World) -> None:
    mine, others = _tensors(), _tensors()
    leader, follower = world.receiver(mine), world.receiver(others)
    world.brings(leader)
    world.step()
    version, holders = world.put()
    members = [structs.replace(HERE, address=world._here.address, rank=rank, is_publisher=False) for rank in range(2)]
    replicated = {name: layout(list(shape), mesh={"rank": 2}) for name, shape in SHAPES.items()}
    sharing = Sharing(members, replicated, holders, lends=True)
    assert sharing.after == {1: 0}
    receipt = leader.stage(version, sharing.holders(0), 10.0, lends=True)
    assert receipt.nbytes < MOST
    sharing.staged(0, leader.loan, receipt.digests)
    lender, (publisher, places) = sharing.holders(1)
    no_delta = {atom: place for atom, place in places.items() if atom[0] == "c"}  # lent to both, in one process
    follower.stage(version, [lender, (publisher, no_delta)], 10.0)
    assert leader.show(version)
    assert follower.show(version)
    assert world.is_same(mine)
    assert world.is_same(others)
    assert leader.loan is None


def test_ranks_share_on_hosts_without_a_holder_and_only_the_same_elements(world: World) -> None:
    machines = ["here", "far", "far", "far", "away", "away"]
    members = [structs.replace(HERE, machine=machine, rank=rank) for rank, machine in enumerate(machines)]
    near = [(HERE, {})]
    whole = {"a": layout([8, 2], mesh={"rank": 6})}
    assert Sharing(members, whole, near, lends=True).after == {2: 1, 3: 1, 5: 4}
    assert Sharing(members, whole, near, lends=False).after == {}
    halves = {**whole, "b": layout([8, 2], mesh={"rank": 3, "half": 2}, spec=("half",))}
    assert Sharing(members, halves, near, lends=True).after == {3: 1}
