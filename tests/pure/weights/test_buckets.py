"""Small tensors lie in buckets: what a receiver shows is the same as without, in each layout and on each way."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

import raycollect as col
from raycollect.backends import arrays
from raycollect.errors import VersionNotWholeError
from raycollect.planner.boxes import volume
from raycollect.pos import Container
from raycollect.weights import atoms
from raycollect.weights.cut import VersionCut
from raycollect.weights.protocol import Version
from raycollect.weights.receiver import Receiver
from raycollect.weights.source import Source
from tests.pure.participants import entered, participant
from tests.pure.weights.sides import HERE
from tests.support.values import replace

RANKS = 2
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
SHAPES = [(), (1,), (7, 5), (3, 4), (0, 2), (130, 2), (200, 100)]  # the last one is too large for a bucket
SPECS = {"whole": (), "rows": ("tp",), "columns": (None, "tp")}


def _layouts(specs: dict[str, str], shapes: dict[str, tuple[int, ...]], dtypes: dict[str, str]) -> dict[str, Any]:
    return {
        name: col.layout(list(shape), mesh={"tp": RANKS}, spec=SPECS[specs[name]][: len(shape)], dtype=dtypes[name])
        for name, shape in shapes.items()
    }


class World:
    """A publisher of two ranks, its tensors of which each has a share, and receivers."""

    def __init__(self, here: Any, seed: int, count: int = 260) -> None:
        self.here, self.random, self.count = here, np.random.default_rng(seed), 0
        self.names = [f"t{number}" for number in range(count)]
        pick = self.random.choice
        self.shapes = {name: SHAPES[pick(len(SHAPES))] for name in self.names}
        self.dtypes = {name: str(pick(list(DTYPES))) for name in self.names}
        self.layouts = self.some_layouts()
        self.values = {name: np.zeros(shape, DTYPES[self.dtypes[name]]) for name, shape in self.shapes.items()}
        self.shares = [self.share(self.layouts, rank) for rank in range(RANKS)]
        self.sources = [
            Source(here, Container.of(share, arrays.is_tensor), self.layouts, rank)
            for rank, share in enumerate(self.shares)
        ]

    def some_layouts(self) -> dict[str, Any]:
        specs = {name: str(self.random.choice(list(SPECS))) for name in self.names}
        return _layouts(specs, self.shapes, self.dtypes)

    def share(self, layouts: dict[str, Any], rank: int) -> dict[str, Any]:
        """A rank's tensors, with the current values."""
        share = {}
        for name, layout in layouts.items():
            shape = layout.local_shape(rank)
            if shape is not None:
                share[name] = np.zeros(shape, np.dtype(DTYPES[layout.dtype]))
                for region in layout.regions.of_rank.get(rank, ()):
                    into = tuple(slice(at, at + hi - lo) for at, (lo, hi) in zip(region.at, region.box, strict=True))
                    part = self.values[name][tuple(slice(*edges) for edges in region.box)]
                    share[name][into] = part.astype(share[name].dtype)
        return share

    def step(self, names: list[str]) -> None:
        for name in names:
            values = self.random.integers(-9, 9, self.shapes[name])
            self.values[name][...] = values.astype(self.values[name].dtype)
        for rank, share in enumerate(self.shares):
            for name, array in self.share(self.layouts, rank).items():
                share[name][...] = array

    def put(self, *readers: dict[str, Any]) -> tuple[Version, list[Any]]:
        self.count += 1
        cut = atoms.cut(self.layouts, readers, in_buckets=True)
        version, digests, holders = Version(1, self.count, cut=cut, count=self.count), {}, []
        for rank, source in enumerate(self.sources):
            key, sealed = source.seal(version.label, pickle.loads(pickle.dumps(cut)), bytes([self.count]))
            assert all(digests.setdefault(atom, digest) == digest for atom, digest in sealed.items())
            holder = structs.replace(HERE, address=self.here.address, rank=rank, key=key)
            holders.append((holder, atoms.served_places(self.layouts, rank, cut)))
        assert digests.keys() == set(cut.atoms)
        assert cut.members
        return replace(version, digests=digests), holders

    def receiver(self, layouts: dict[str, Any], rank: int, mine: dict[str, Any], *, inplace: bool = False) -> Receiver:
        return Receiver(self.here, "policy", Container.of(mine, arrays.is_tensor), layouts, rank, inplace=inplace)

    def check(self, layouts: dict[str, Any], rank: int, mine: dict[str, Any]) -> None:
        for name, array in self.share(layouts, rank).items():
            assert array.tobytes() == mine[name].tobytes(), name


@pytest.fixture(scope="module")
def here() -> Iterator[Any]:
    actor = participant()
    with entered(actor):
        yield actor
    actor.close()


def _elsewhere(holders: list[Any]) -> list[Any]:
    return [(structs.replace(holder, machine="another"), places) for holder, places in holders]


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_receivers_show_what_was_put(here, seed, is_known, inplace, is_far, converts):
    world = World(here, seed)
    layouts = world.some_layouts()
    if converts:
        layouts = {
            name: layout.astype("bfloat16" if layout.dtype == "float32" else layout.dtype)
            for name, layout in layouts.items()
        }
    mine = [world.share(layouts, rank) for rank in range(RANKS)]
    receivers = [world.receiver(layouts, rank, mine[rank], inplace=inplace) for rank in range(RANKS)]
    for names in (world.names, world.names[::3], [], world.names[5:8]):
        world.step(names)
        version, holders = world.put(*([layouts] if is_known else []))
        overwritten = world.names[int(world.random.integers(len(world.names)))]
        for rank, receiver in enumerate(receivers):
            if overwritten in mine[rank]:
                mine[rank][overwritten][...] = 3
            receiver.stage(version, _elsewhere(holders) if is_far else holders, 10.0)
            assert receiver.show(version.label)
            world.check(layouts, rank, mine[rank])


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), st.booleans())
def test_receivers_serve_others_who_are_cut_otherwise(here, seed, is_far):
    world = World(here, seed)
    world.step(world.names)
    version, holders = world.put()
    replicated = _layouts(dict.fromkeys(world.names, "whole"), world.shapes, world.dtypes)
    mine = world.share(replicated, 0)
    first = world.receiver(replicated, 0, mine)
    first.stage(version, holders, 10.0)
    key = first.show(version)
    served = structs.replace(HERE, address=here.address, is_publisher=False, key=key)
    for source in world.sources:
        source.close()
    layouts, others = world.some_layouts(), [(served, atoms.held_places(replicated, 0, version.cut))]
    for rank in range(RANKS):
        late = world.share(layouts, rank)
        for array in late.values():
            array[...] = 0
        receiver = world.receiver(layouts, rank, late)
        receiver.stage(version, _elsewhere(others) if is_far else others, 10.0)
        assert receiver.show(version)
        world.check(layouts, rank, late)


def test_other_bits_in_a_bucket_are_an_error_and_methods_see_the_old_ones(here):
    world = World(here, 7)
    world.layouts = _layouts(dict.fromkeys(world.names, "whole"), world.shapes, world.dtypes)
    world.shares = [world.share(world.layouts, rank) for rank in range(RANKS)]
    world.sources = [
        Source(here, Container.of(share, arrays.is_tensor), world.layouts, rank)
        for rank, share in enumerate(world.shares)
    ]
    mine = world.share(world.layouts, 0)
    receiver = world.receiver(world.layouts, 0, mine)
    before = {name: array.tobytes() for name, array in mine.items()}
    world.step(world.names)
    version, holders = world.put(world.layouts)
    for holder, places in holders:
        bucket = next(iter(version.cut.members))
        served = here.store.look(holder.key).tensors[places[bucket][0][0]]
        served.view(np.uint8)[-1] ^= 1
    with pytest.raises(VersionNotWholeError):
        receiver.stage(version, holders, 10.0)
    assert receiver.show(version) is None
    assert before == {name: array.tobytes() for name, array in mine.items()}
    version, holders = world.put(world.layouts)
    receiver.stage(version, holders, 10.0)
    assert receiver.show(version)
    world.check(world.layouts, 0, mine)


def test_a_bucket_of_which_nothing_has_changed_is_not_copied_and_an_unchanged_member_is_not_written(here):
    names = [f"t{number}" for number in range(19)]
    shapes, dtypes = dict.fromkeys(names, (4, 3)), dict.fromkeys(names, "float32")
    world = World(here, 1)
    world.names, world.shapes, world.dtypes = names, shapes, dtypes
    world.values = {name: np.zeros((4, 3), np.float32) for name in names}
    world.layouts = _layouts(dict.fromkeys(names, "whole"), shapes, dtypes)
    world.shares = [world.share(world.layouts, 0)]
    world.sources = [Source(here, Container.of(world.shares[0], arrays.is_tensor), world.layouts, 0)]
    torch = pytest.importorskip("torch")
    mine = {name: torch.zeros(4, 3) for name in names}
    receiver = world.receiver(world.layouts, 0, mine)
    world.step(names)
    version, holders = world.put(world.layouts)
    assert receiver.stage(version, holders, 10.0).nbytes == 19 * 48
    assert receiver.show(version)
    where = [array.ctypes.data for array in here.store.look(holders[0][0].key).tensors]
    written = {name: mine[name]._version for name in names}
    version, holders = world.put(world.layouts)
    assert [array.ctypes.data for array in here.store.look(holders[0][0].key).tensors] == where
    assert receiver.stage(version, holders, 10.0).nbytes == 0
    assert receiver.show(version)
    world.step(names[2:4])
    version, holders = world.put(world.layouts)
    assert [array.ctypes.data for array in here.store.look(holders[0][0].key).tensors] != where
    assert receiver.stage(version, holders, 10.0).nbytes == 19 * 48
    assert receiver.show(version)
    assert [name for name in names if mine[name]._version > written[name]] == names[2:4]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 2), st.integers(1, 200))
def test_small_atoms_of_one_dtype_and_of_the_same_ranks_share_a_bucket(seed, readers, count):
    random = np.random.default_rng(seed)
    names = [f"bucket {number}" for number in range(count)]
    shapes = {name: SHAPES[random.choice(len(SHAPES))] for name in names}
    dtypes = {name: str(random.choice(list(DTYPES))) for name in names}
    src, *others = (
        _layouts({name: str(random.choice(list(SPECS))) for name in names}, shapes, dtypes) for _ in range(1 + readers)
    )
    cut, plain = atoms.cut(src, others, in_buckets=True), atoms.cut(src, others)
    assert sorted(cut.parts()) == sorted(plain.atoms)
    assert not {name for name, _ in cut.members} & set(names)
    assert cut.tensors == plain.tensors
    for bucket, members in cut.members.items():
        assert volume(bucket[1]) == sum(volume(box) for _, box in members)
        assert {src[name].dtype for name, _ in members} == {cut.dtypes[bucket[0]]}
        for side in (src, *others):
            for rank in range(RANKS):
                lying = atoms.places(side, rank, plain, whole=True)
                assert len({member in lying for member in members}) == 1
    again = pickle.loads(pickle.dumps(cut))
    assert again == cut
    assert (again.atoms, list(again.members.items())) == (cut.atoms, list(cut.members.items()))
    assert VersionCut.unpack(bytes(cut.packed)) == cut


def test_each_process_serves_buckets_in_one_order():
    """The first bucket of float16 begins between the two of float32."""
    src = {f"t{at:03}": col.layout([8], mesh={"rank": 1}, dtype="float32") for at in range(700)}
    src |= {f"t{at:03}.scale": col.layout([8], mesh={"rank": 1}, dtype="float16") for at in range(40)}
    cut = atoms.cut(dict(sorted(src.items())), [], in_buckets=True)
    again = pickle.loads(pickle.dumps(cut))
    assert len(cut.members) == 3
    assert list(again.members) == list(cut.members)
    assert atoms.served_places(src, 0, again) == atoms.served_places(src, 0, cut)


def test_a_bucket_has_at_most_so_many_bytes_and_members():
    sizes = [1] * (atoms.MOST_MEMBERS + 1) + [atoms.SMALL_NBYTES // 4] * 31 + [atoms.SMALL_NBYTES // 4 + 1]
    src = {f"t{at:04}": col.layout([size], mesh={"rank": 1}) for at, size in enumerate(sizes)}
    cut = atoms.cut(src, [], in_buckets=True)
    assert all(cut.nbytes([bucket]) <= atoms.BUCKET_NBYTES for bucket in cut.members)
    assert max(map(len, cut.members.values())) == atoms.MOST_MEMBERS
    assert [name for name, _ in cut.atoms if name in src] == [max(src)]
