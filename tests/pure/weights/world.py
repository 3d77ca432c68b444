"""Two trainers, a publisher, a directory, two readers and their driver, in one value: all orders of their steps.

Each weight is a number: what put n seals is n in both atoms, of which each trainer has one. Anything may happen at any
moment: a process ends, the directory forgets all, a byte flips on its way. `steps` lists what can happen next.
Puts may be streams, where each trainer's atom is a part that readers land before the put is over, or that fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from raycollect.weights import protocol
from raycollect.weights.protocol import (
    RankFailed,
    RankLost,
    RankSealed,
    RankSealedPart,
    RankShown,
    RankState,
    RankVerified,
    Tell,
    Version,
    VersionRound,
)
from tests.support.values import replace

RANKS = 2
ATOMS = tuple((name, ((0,), (1,))) for name in "ab")
TORN, FLIPPED = -1, 77
PUBLISHER, DRIVER = "publisher", "driver"


def digest(value: int) -> bytes:
    return value.to_bytes(1, "big", signed=True)


def is_whole(value: tuple[int, ...]) -> bool:
    return len(set(value)) == 1 and TORN not in value


@dataclass(frozen=True)
class Reader:
    state: RankState = field(default_factory=RankState)
    back: tuple[int, ...] = (0, 0)
    front: tuple[int, ...] = (0, 0)


@dataclass(frozen=True)
class World:
    slots: tuple[tuple[int, int], ...] = ((0, 0), (0, 0))  # of each trainer: the version that it keeps, and its value
    put: VersionRound | None = None
    posted: Version | None = None
    update: VersionRound | None = None
    orders: tuple[tuple[Tell, int], ...] = ()  # what processes were told, and have not done
    heard: tuple[tuple[str, object], ...] = ()  # what is on its way back
    readers: tuple[Reader, ...] = (Reader(),) * RANKS
    dead: frozenset[object] = frozenset()
    puts: int = 0
    updates: int = 0
    faults: int = 1
    receipts: tuple[VersionRound, ...] = ()
    at_show: tuple[tuple[int, frozenset[int]], ...] = ()  # version told to be shown, the ranks that are to show it
    torn: frozenset[int] = frozenset()  # trainers in the middle of a copy
    is_streamed: bool = False
    inplace: bool = False  # readers have no second memory: `back` is what methods see, unless they are refused
    parted: frozenset[int] = frozenset()  # trainers that have sealed their part, and not said that it is all
    landing: tuple[tuple[int, Version, int, bytes], ...] = ()  # parts that readers were told of: which, and its digest

    @property
    def key(self) -> object:
        readers = tuple((*_ranked(reader.state), reader.back, reader.front) for reader in self.readers)
        rounds = tuple(
            state and (state.version, state.phase, state.waiting, frozenset(state.done), state.lost)
            for state in (self.put, self.update)
        )
        heard = tuple((who, type(event), event.rank) for who, event in self.heard)
        rest = (self.slots, rounds, self.posted, self.orders, heard, readers, self.dead, self.puts, self.updates)
        return (*rest, self.faults, len(self.receipts), self.at_show, self.torn, self.parted, self.landing)


def _ranked(state: RankState) -> tuple[object, ...]:
    return (
        state.shown,
        state.staged,
        state.is_open,
        state.is_dirty,
        *(tuple(sorted(digests.items())) for digests in (state.wanted, state.landed)),
    )


def steps(world: World, most_puts: int, most_updates: int) -> Iterator[tuple[str, World]]:
    yield from _drivers(world, most_puts, most_updates)
    for at, (tell, rank) in enumerate(world.orders):
        left = replace(world, orders=world.orders[:at] + world.orders[at + 1 :])
        if tell is Tell.SEAL:
            yield from _seal(left, world, rank)
        elif ("reader", rank) in world.dead:
            yield f"Ray says that reader {rank} is dead", _say(left, DRIVER, RankLost(rank))
        elif tell is Tell.STAGE:
            yield from _stage(left, world, rank)
        else:
            yield f"reader {rank} shows", _show(left, rank)
    for at, (rank, version, place, digested) in enumerate(world.landing):
        left = replace(world, landing=world.landing[:at] + world.landing[at + 1 :])
        yield from _land(left, rank, version, place, digested)
    for at, (who, event) in enumerate(world.heard):
        if who not in world.dead:
            left = replace(world, heard=world.heard[:at] + world.heard[at + 1 :])
            yield f"{who} hears {event}", _hear(left, who, event)
    if world.faults:
        yield from _faults(replace(world, faults=world.faults - 1))


def _drivers(world: World, most_puts: int, most_updates: int) -> Iterator[tuple[str, World]]:
    if PUBLISHER not in world.dead and world.puts < most_puts and (world.put is None or world.put.is_over):
        put, tell = protocol.begin_put(Version(1, world.puts + 1), len(world.slots))
        yield "put", _tell(replace(world, put=put, puts=world.puts + 1), tell, put.waiting)
    if DRIVER in world.dead:
        return
    if world.update is not None and not world.update.is_over and world.update.waiting:
        some = min(world.update.waiting)
        yield "the driver's time is over", _hear(world, DRIVER, RankFailed(some))
    if world.posted and world.updates < most_updates and (world.update is None or world.update.is_over):
        update = protocol.begin_update(world.posted, RANKS)
        yield "update", _tell(replace(world, update=update, updates=world.updates + 1), Tell.STAGE, update.waiting)


def _seal(left: World, world: World, rank: int) -> Iterator[tuple[str, World]]:
    if ("trainer", rank) in world.dead:
        yield f"Ray says that trainer {rank} is dead", _say(left, PUBLISHER, RankLost(rank))
    elif rank not in world.torn:
        torn = replace(world, slots=_set(world.slots, rank, (0, TORN)), torn=world.torn | {rank})
        yield f"trainer {rank} begins to copy", torn
    else:
        value = world.puts  # what it was told last: a publisher tells in order
        digests = {ATOMS[rank]: digest(value)}
        sealed = replace(world, slots=_set(world.slots, rank, (value, value)))
        if world.is_streamed and rank not in world.parted:
            part = replace(sealed, parted=world.parted | {rank})
            yield f"trainer {rank} has sealed a part", _say(part, PUBLISHER, RankSealedPart(rank, digests))
            if world.faults:
                failed = replace(left, faults=world.faults - 1, torn=world.torn - {rank})
                yield f"a layer of trainer {rank} fails", _say(failed, PUBLISHER, RankFailed(rank))
            return
        done = replace(sealed, orders=left.orders, torn=world.torn - {rank}, parted=world.parted - {rank})
        yield f"trainer {rank} has sealed", _say(done, PUBLISHER, RankSealed(rank, digests))


def _land(left: World, rank: int, version: Version, place: int, digested: bytes) -> Iterator[tuple[str, World]]:
    reader = left.readers[rank]
    if ("reader", rank) in left.dead:
        yield f"reader {rank} is not there", left
        return
    state = protocol.open_stream(reader.state, version, ATOMS)
    state = protocol.expect(state, version, {ATOMS[place]: digested})
    yield f"a part does not come to reader {rank}", _with(left, rank, replace(reader, state=state))
    if state.staged != version or not state.is_open or ATOMS[place] not in state.missing:
        return
    values = {left.slots[place][1]} if ("trainer", place) not in left.dead else set()
    for value in sorted(values | ({FLIPPED} if left.faults else set())):
        landed = protocol.land(state, version, {ATOMS[place]: digest(value)})
        then = replace(left, faults=left.faults - 1) if value == FLIPPED else left
        yield (
            f"a part comes to reader {rank}",
            _with(then, rank, Reader(landed, _set(reader.back, place, value), reader.front)),
        )


def _stage(left: World, world: World, rank: int) -> Iterator[tuple[str, World]]:
    version, reader = world.update.version, world.readers[rank]
    if reader.state.staged != version:
        if world.inplace:
            present = {atom: digest(value) for atom, value in zip(ATOMS, reader.back, strict=True)}
            state = protocol.stage_in_place(reader.state, version, version.digests, present)
        else:
            state = protocol.stage(reader.state, version, version.digests)
        yield f"reader {rank} begins", _with(world, rank, replace(reader, state=state))
        return
    if not reader.state.missing:
        yield f"reader {rank} has all", _say(left, DRIVER, RankVerified(rank, dict(reader.state.landed)))
        return
    atom = reader.state.missing[0]
    place = ATOMS.index(atom)
    present = {slot[1] for at, slot in enumerate(world.slots) if at == place and ("trainer", at) not in world.dead}
    others = (other for at, other in enumerate(world.readers) if at != rank and ("reader", at) not in world.dead)
    present |= {other.back[place] for other in others if other.state.shown == other.state.staged == version}
    arriving = [(f"{value} comes to reader {rank}", value, world) for value in sorted(present)]
    if world.faults:
        faulty = replace(world, faults=world.faults - 1)
        arriving.append((f"a byte flips on its way to reader {rank}", FLIPPED, faulty))
    for name, value, then in arriving:
        back = _set(reader.back, place, value)
        state = protocol.land(reader.state, version, {atom: digest(value)})
        if (state, back) != (reader.state, reader.back):  # else it asks another holder, or again
            yield name, _with(then, rank, Reader(state, back, back if world.inplace else reader.front))
    yield f"reader {rank} finds no holder", _say(left, DRIVER, RankFailed(rank))


def _show(left: World, rank: int) -> World:
    version, reader = left.update.version, left.readers[rank]
    if not protocol.may_show(reader.state, version):
        return _say(left, DRIVER, RankFailed(rank))
    shown = Reader(protocol.show(reader.state, version), reader.back, reader.back)
    return _say(_with(left, rank, shown), DRIVER, RankShown(rank))


def _hear(world: World, who: str, event: object) -> World:
    if who == PUBLISHER:
        put, tell = protocol.advance(world.put, event)
        if tell is Tell.LAND:
            part = (0, put.version, event.rank, event.digests[ATOMS[event.rank]])  # the other reader takes no parts
            return replace(world, put=put, landing=(*world.landing, part))
        return replace(world, put=put, posted=put.version if tell is Tell.POST else world.posted)
    before = world.update
    update, tell = protocol.advance(before, event)
    world = replace(world, update=update)
    if update.phase is protocol.Phase.DONE and before.phase is not protocol.Phase.DONE:
        world = replace(world, receipts=(*world.receipts, update))
    if tell is None:
        return world
    return _tell(
        replace(world, at_show=(*world.at_show, (update.version.number, update.waiting))), tell, update.waiting
    )


def _faults(world: World) -> Iterator[tuple[str, World]]:
    if world.puts or world.updates:
        for rank in range(len(world.slots)):
            yield f"trainer {rank} dies", replace(world, dead=world.dead | {("trainer", rank)})
        yield "the publisher dies", replace(world, dead=world.dead | {PUBLISHER})
    if world.is_streamed:
        return  # the others come when it is over, as without a stream
    if world.puts or world.updates:
        yield "the directory forgets", replace(world, posted=None)
    if world.updates:
        yield "the readers' driver dies", replace(world, dead=world.dead | {DRIVER})
        for rank in range(RANKS):
            yield f"reader {rank} dies", replace(world, dead=world.dead | {("reader", rank)})


def restarted(world: World) -> World:
    """What is left, with another driver for the readers, and no more faults."""
    dead = world.dead - {DRIVER}
    return replace(world, dead=dead, update=None, orders=(), heard=(), faults=0, torn=frozenset())


def _tell(world: World, tell: Tell, ranks: frozenset[int]) -> World:
    return replace(world, orders=(*world.orders, *((tell, rank) for rank in sorted(ranks))))


def _say(world: World, who: str, event: object) -> World:
    return replace(world, heard=(*world.heard, (who, event)))


def _with(world: World, rank: int, reader: Reader) -> World:
    return replace(world, readers=_set(world.readers, rank, reader))


def _set(values: tuple, at: int, value: object) -> tuple:
    return (*values[:at], value, *values[at + 1 :])
