"""Tensors in shared memory, in real actors: one-sided reads, limits, and who may write what."""

from __future__ import annotations

import pickle
import random
import threading

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect.backends import arrays
from raycollect.errors import ArenaFullError
from raycollect.pos.segments import Segments
from tests.support.actors import Plain, Worker

SIZE = 262_144  # elements of a megabyte
ARENA, ORDINARY = "arena", "ordinary"


def lies_in_arena(tensor):
    """Whether a tensor lies in the arena of the process that asks."""
    memory = arrays.memory(tensor)
    return Segments.current().locate(memory.ctypes.data, memory.nbytes) is not None


def hold(place, given):
    """Makes an array where it is wanted. Runs inside the actor."""
    made = col.array(given) if place == ARENA else np.array(given)
    assert lies_in_arena(made) == (place == ARENA)
    return made


def limited(text):
    """Options of an actor whose arena has that limit."""
    return {"runtime_env": {"env_vars": {"RAYCOLLECT_ARENA_LIMIT": text}}}


@pytest.fixture(scope="module")
def crew(cluster):
    """Three actors for the whole file; a test declares its groups of them."""
    made = [Worker.options(num_cpus=0).remote() for _ in range(3)]
    yield made
    for actor in made:
        ray.kill(actor)


# ---------------------------------------------------------------------------------------------- reads


def stride(array):
    """A view with gaps."""
    return array[::2]


def turn(array):
    """A view that is not in C order."""
    return array.reshape(2, -1).T


VIEWS = {"whole": lambda array: array, "gaps": stride, "turned": turn}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("place", [ARENA, ORDINARY])
def test_get_returns_a_copy(crew, tidy, place, view):
    expected = VIEWS[view](np.arange(SIZE, dtype=np.float32))

    def keep(self, place, array, view):
        self.held = VIEWS[view](hold(place, array))
        return self.held

    def scribble(self, read):
        found = read.copy()
        read[...] = -1
        return found, read

    ref = crew[0].make.remote(keep, place, np.arange(SIZE, dtype=np.float32), view)
    found = col.get(ref)
    np.testing.assert_array_equal(found, expected)
    found[...] = -1
    here, there = ray.get(crew[1].call.remote(scribble, ref))
    np.testing.assert_array_equal(here, expected)
    assert (there == -1).all()
    np.testing.assert_array_equal(ray.get(crew[0].call.remote(lambda self: self.held.copy())), expected)
    assert ray.get(crew[0].call.remote(lambda self, very: very is self.held, ref))


def extremes(self, tensor):
    return int(tensor.min()), int(tensor.max())


class Reader:
    """A thread that reads tensors again and again, and keeps what it saw; all elements of one are equal."""

    def __init__(self, refs, read, seed):
        self.seen = {kind: set() for kind in refs}
        self.failures = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(refs, read, random.Random(seed)))

    def _run(self, refs, read, rng):
        try:
            while not self._ended.is_set():
                for kind in rng.sample(list(refs), len(refs)):
                    low, high = read(rng.choice(refs[kind]))
                    assert low == high, f"{kind}: {low} and {high} in one tensor"
                    self.seen[kind].add(low)
        except BaseException as exc:
            self.failures.append(exc)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exc):
        self._ended.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        assert not self.failures, self.failures[0]


ROUNDS, MOST_ROUNDS = 20, 400
"""How often the tensors are reduced; and how often where the machine is busy, and the readers are slow to come."""


@pytest.mark.parametrize("seed", [0, *(pytest.param(more, marks=pytest.mark.full) for more in (1, 2))])
def test_readers_see_whole_tensors_while_they_are_reduced(crew, actors, seed):
    """Three ranks triple a tensor again and again, modulo 2^64: what is read is a power of three everywhere."""
    rng = random.Random(seed)
    size, begin, done = rng.randrange(1 << 17, 1 << 19) & ~1, rng.randrange(1, 1 << 32, 2), 0
    (other,) = actors(Worker, 1)

    def keep(self, place, view):
        return VIEWS[view](hold(place, np.full(size, begin, np.uint64)))

    kinds = [(place, view) for place in (ARENA, ORDINARY) for view in ("whole", "gaps")]
    refs = {kind: [actor.make.remote(keep, *kind) for actor in crew] for kind in kinds}
    col.declare_collective_group(crew)
    with (
        Reader(refs, lambda ref: extremes(None, col.get(ref)), seed) as here,
        Reader(refs, lambda ref: ray.get(other.call.remote(extremes, ref)), seed) as there,
    ):

        def have_met(kind):
            return len(here.seen[kind] | there.seen[kind]) > 1

        while done < ROUNDS or (done < MOST_ROUNDS and not all(map(have_met, kinds))):
            for kind in kinds:
                col.allreduce_refs(refs[kind])
            done += 1
    powers = [begin * 3**k % (1 << 64) for k in range(done + 1)]
    for kind in kinds:
        seen = here.seen[kind] | there.seen[kind]
        assert have_met(kind), f"{kind}: the readers never met the loop"
        assert seen <= set(powers)
        assert [extremes(None, found) for found in col.get(refs[kind])] == [(powers[-1], powers[-1])] * 3


# ---------------------------------------------------------------------------------------------- the driver


def test_the_driver_has_an_arena_too(crew, tidy):
    before = col.arena_statistics().blocks
    mine = col.empty((300, 400), np.float32)
    mine[:] = np.arange(400)
    assert lies_in_arena(mine)
    assert col.arena_statistics().blocks == before + 1
    ref = crew[0].make.remote(lambda self, given: col.array(given), mine)
    np.testing.assert_array_equal(col.get(ref), mine)
    mine[:] = 0
    np.testing.assert_array_equal(col.get(ref)[7], np.arange(400))
    del mine
    assert col.arena_statistics().blocks == before


# ---------------------------------------------------------------------------------------------- limits


def test_a_member_without_an_arena_has_its_group_stage(crew, actors):
    without = actors(Worker, 1, **limited("0"))[0]
    group = col.declare_collective_group([crew[0], without])

    def make(self, value):
        return col.full(1 << 20, value, np.float32)

    def has_arena(self, tensor):
        return lies_in_arena(tensor)

    refs = [actor.make.remote(make, value) for actor, value in ((crew[0], 1), (without, 2))]
    outs = col.allreduce_refs(refs, inplace=False)
    for _ in range(2):
        col.allreduce_refs(refs)
    for found, expected in zip(col.get([*refs, *outs]), (6, 6, 3, 3), strict=True):
        np.testing.assert_array_equal(found, np.full(1 << 20, expected, np.float32))
    for pair in (refs, outs):
        placed = [crew[0].call.remote(has_arena, pair[0]), without.call.remote(has_arena, pair[1])]
        assert ray.get(placed) == [True, False]
    assert group.statistics().members[0].arena.mapped == group.statistics().members[1].arena.limit == 0


@pytest.mark.parametrize("cls", [Worker, Plain])
def test_full_arena_raises_in_the_users_method(actors, cls):
    worker = actors(cls, 1, **limited("4M"))[0]

    def take(self, nbytes):
        self.kept = col.empty(nbytes, np.uint8)

    ray.get(worker.call.remote(take, 1 << 20))
    for _ in range(2):
        with pytest.raises(ArenaFullError, match="RAYCOLLECT_ARENA_LIMIT") as caught:
            ray.get(worker.call.remote(take, 4 << 20))
        cause = caught.value.cause
        assert isinstance(cause, MemoryError)
        assert (cause.nbytes, cause.limit, cause.in_use) == (4 << 20, 4 << 20, 1 << 20)
        again = pickle.loads(pickle.dumps(cause))
        assert (type(again), str(again)) == (ArenaFullError, str(cause))
    ray.get(worker.call.remote(take, 1 << 20))  # the old one goes when the new one is there


def test_outputs_use_ordinary_memory_if_the_arena_is_full(crew, actors):
    small = actors(Worker, 1, **limited("8M"))[0]
    col.declare_collective_group([crew[0], small])
    refs = [actor.make.remote(lambda self: col.ones(3 << 18, np.float32)) for actor in (crew[0], small)]
    outs = col.allreduce_refs(refs, inplace=False)
    for found in col.get(outs):
        np.testing.assert_array_equal(found, np.full(3 << 18, 2, np.float32))
    assert ray.get(crew[0].call.remote(lambda self, made: lies_in_arena(made), outs[0]))
    assert not ray.get(small.call.remote(lambda self, made: lies_in_arena(made), outs[1]))
    col.allreduce_refs(outs)
    assert (col.get(outs[1]) == 4).all()
