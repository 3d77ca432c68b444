"""What a publisher's rank and a receiver's do with memory, in one process and without Ray."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
import tracemalloc
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import ray
from ray.exceptions import RayTaskError

from raycollect.backends import arrays
from raycollect.backends.elements import convert
from raycollect.errors import (
    CollectiveTimeoutError,
    LayoutError,
    PublisherReplacedError,
    TensorDirtyError,
    UnsupportedError,
    VersionDirtyError,
    VersionNotPutError,
    VersionNotWholeError,
    refusal,
    wrong_layout,
)
from raycollect.planner.layout import layout
from raycollect.pos import Container
from raycollect.weights import agent, atoms
from raycollect.weights.exclusion import OwnProcess
from raycollect.weights.ranks import Ranks
from raycollect.weights.receiver import Receiver
from raycollect.weights.side_ranks import ActorRanks
from raycollect.weights.source import Source
from tests.pure.participants import entered
from tests.pure.weights.sides import (
    AMONG,
    KEY,
    LAYOUTS,
    NAMES,
    NBYTES,
    OTHER,
    V1,
    entered_here,
    holder,
    receiver,
    source,
    tensors,
)
from tests.support.values import replace
from tests.support.waiting import wait_until


@pytest.fixture(autouse=True)
def here():
    """The actor of both ranks; what reads from it has its store."""
    with entered_here() as actor:
        yield actor


def part_of(name):
    return {atom for atom in AMONG.atoms if atom[0] == name}


def test_parts_land_before_the_rest_and_what_has_landed_is_not_read_again(here):
    held, mine = tensors(1), tensors(0)
    src, dst = source(here, held), receiver(here, mine)
    dst.open_stream(V1)
    key, digests = src.seal_part(V1, AMONG, b"1", "a")
    assert set(digests) == part_of("a")
    assert dst.land(V1, digests, [holder(key)], 1.0) == NBYTES
    held["a"].fill(9)  # it has been sealed
    same, rest = src.seal(V1, AMONG, b"1")
    assert same == key
    assert set(rest) == set(AMONG.atoms)
    whole = replace(V1, digests=rest)
    assert dst.land(V1, {}, [], 1.0) == 0
    assert dst.stage(whole, [holder(key)], 1.0).nbytes == 3 * NBYTES
    assert not any(array.any() for array in mine.values())
    assert dst.show(whole)
    assert all((array == 1).all() for array in mine.values())
    assert dst.land(V1, digests, [holder(key)], 1.0) == 0  # it comes late: what lies here is served now


def test_holders_that_do_not_have_the_version_any_more_are_named(here):
    src, dst = source(here, tensors(1)), receiver(here, tensors(0))
    key, digests = src.seal(V1, AMONG, b"1")
    dst.stage(replace(V1, digests=digests), [holder(OTHER), holder(key)], 1.0)
    assert dst.stale_holders == (OTHER,)
    assert dst.show(V1)


def test_a_version_that_is_open_is_not_shown(here):
    src, mine = source(here, tensors(1)), tensors(0)
    dst = receiver(here, mine)
    dst.open_stream(V1)
    key, digests = src.seal_part(V1, AMONG, b"1", list(NAMES))
    dst.land(V1, digests, [holder(key)], 1.0)
    assert not dst.state.missing
    assert dst.show(V1) is None
    assert not mine["a"].any()


def test_another_attempt_seals_all_anew_and_one_that_failed_seals_nothing(here):
    held = tensors(1)
    src = source(here, held)
    first, _ = src.seal_part(V1, AMONG, b"1", "a")
    held["a"].fill(2)
    src.fail(V1, b"1", "no such layer")
    with pytest.raises(VersionNotPutError, match="no such layer"):
        src.seal(V1, AMONG, b"1")
    key, digests = src.seal(V1, AMONG, b"2")
    assert key != first
    mine = tensors(0)
    dst = receiver(here, mine)
    whole = replace(V1, digests=digests)
    dst.stage(whole, [holder(key)], 1.0)
    dst.show(whole)
    assert [float(mine[name][0, 0]) for name in NAMES] == [2, 1, 1]


def test_tensors_that_are_given_take_the_place_of_the_published(here):
    held = tensors(1)
    src = source(here, held)
    key, digests = src.seal_part(V1, AMONG, b"1", {"b": np.full((4, 6), 7, np.float32)})
    _, rest = src.seal(V1, AMONG, b"1")
    assert digests.items() <= rest.items()
    mine = tensors(0)
    dst = receiver(here, mine)
    whole = replace(V1, digests=rest)
    dst.stage(whole, [holder(key)], 1.0)
    dst.show(whole)
    assert [float(mine[name][0, 0]) for name in NAMES] == [1, 7, 1]
    assert (held["b"] == 1).all()


def test_a_version_shares_the_copies_of_tensors_that_have_not_changed(here):
    held, mine = tensors(1), tensors(0)
    src, dst = source(here, held), receiver(here, mine)
    lie = memory(here, put(src, dst, 1)[0])
    for number in (2, 3, 4):
        held["a"].fill(number)
        key, receipt = put(src, dst, number)
        assert receipt.nbytes == NBYTES  # the others lie here already
        before, lie = lie, memory(here, key)
        assert [name for name in NAMES if before[name] != lie[name]] == ["a"]
        assert [float(mine[name][0, 0]) for name in NAMES] == [number, 1, 1]
    mine["b"][0, 0] = 9  # what others have written is read again
    assert put(src, dst, 5)[1].nbytes == NBYTES
    assert (mine["b"] == 1).all()


def put(src, dst, number):
    """Puts a version and shows it; returns its key and the receipt."""
    version = replace(V1, number=number, count=number)
    key, digests = src.seal(version, AMONG, bytes([number]))
    receipt = dst.stage(replace(version, digests=digests), [holder(key)], 1.0)
    assert dst.show(version)
    return key, receipt


def memory(here, key):
    """Where the copies of a version lie."""
    return dict(zip(NAMES, map(arrays.byte_range, here.store.look(key).tensors), strict=True))


def test_what_a_receiver_has_verified_stays_as_it_is_while_other_versions_are_put(here):
    held, mine = tensors(1), tensors(0)
    src, dst = source(here, held), receiver(here, mine)
    key, digests = src.seal(V1, AMONG, b"1")
    first = replace(V1, digests=digests)
    dst.stage(first, [holder(key)], 1.0)
    for number in range(2, 6):  # they take the place of the first
        for array in held.values():
            array.fill(number)
        key, digests = src.seal(replace(V1, number=number, count=number), AMONG, bytes([number]))
    assert dst.show(first)
    assert all((array == 1).all() for array in mine.values())
    last = replace(V1, number=5, digests=digests)
    dst.stage(last, [holder(key)], 1.0)
    dst.release()  # as an update that has failed on another rank does
    assert dst.stage(last, [holder(key)], 1.0).nbytes == 3 * NBYTES
    assert dst.show(last)
    assert all((array == 5).all() for array in mine.values())


def test_an_interrupt_leaves_one_whole_version(here):
    src, mine = source(here, tensors(1)), tensors(0)
    dst = receiver(here, mine)
    key, digests = src.seal(V1, AMONG, b"1")
    whole, writes = replace(V1, digests=digests), 0
    dst.stage(whole, [holder(key)], 1.0)

    def profile(frame, event, arg):
        nonlocal writes
        if event == "call" and frame.f_code is convert.__code__:
            writes += 1
            if writes == 2:
                signal.raise_signal(signal.SIGINT)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        with pytest.raises(KeyboardInterrupt):
            dst.show(whole)
    finally:
        sys.setprofile(before)
    assert writes == len(NAMES)
    assert all((array == 1).all() for array in mine.values())
    assert dst.show(whole)


def test_a_version_is_served_until_another_one_is_written(here):
    held, mine = tensors(1), tensors(0)
    src, dst = source(here, held), receiver(here, mine)
    key, digests = src.seal(V1, AMONG, b"1")
    first = replace(V1, digests=digests)
    dst.stage(first, [holder(key)], 1.0)
    served = dst.show(V1)
    for array in held.values():
        array.fill(2)
    second = replace(V1, number=2, count=2)
    key, digests = src.seal(second, AMONG, b"2")
    bad = replace(second, digests={**digests, next(iter(part_of("c"))): b"another"})
    with pytest.raises(VersionNotWholeError):
        dst.stage(bad, [holder(key)], 1.0)
    dst.stage(replace(second, digests=digests), [holder(key)], 1.0)
    late = receiver(here, tensors(0))
    assert late.stage(first, [holder(served)], 1.0).nbytes == 3 * NBYTES
    assert dst.show(second) != served
    with pytest.raises(VersionNotWholeError):
        late.stage(replace(second, digests=digests), [holder(served)], 1.0)


def test_what_methods_write_between_the_two_phases_is_read_again(here):
    held, mine = tensors(1), tensors(0)
    src, dst = source(here, held), receiver(here, mine)
    put(src, dst, 1)
    held["a"].fill(2)
    second = replace(V1, number=2, count=2)
    key, digests = src.seal(second, AMONG, b"2")
    dst.stage(replace(second, digests=digests), [holder(key)], 1.0)
    mine["b"].fill(7)
    assert dst.show(second)
    assert [float(mine[name][0, 0]) for name in NAMES] == [2, 1, 1]


@pytest.mark.parametrize(
    ("part", "match"),
    [
        ("x", "'x' is no name of a tensor here"),
        ([], "list is no part"),
        (7, "int is no part"),
        ({"a": 7}, "'a' is no tensor"),
        ({"a": None}, "'a' is no tensor"),
        ({"a": np.zeros(3, np.float32)}, r"float32\[3\], where float32\[4, 6\] is published"),
        ({"a": np.zeros((4, 6))}, r"float64\[4, 6\], where float32"),
        ("again", "'c' was sealed before"),
    ],
)
def test_what_is_no_part(here, part, match):
    src = source(here, tensors(1))
    src.seal_part(V1, AMONG, b"1", "c")
    with pytest.raises(VersionNotPutError, match=match):
        src.seal_part(V1, AMONG, b"1", "c" if part == "again" else part)


def test_in_place_methods_and_tensors_are_refused_until_a_version_is_shown(here):
    held, mine = tensors(1), tensors(0)
    src, dst = source(here, held), receiver(here, mine, inplace=True)
    key, digests = src.seal(V1, AMONG, b"1")
    bad = replace(V1, digests={**digests, next(iter(part_of("c"))): b"another"})
    with pytest.raises(VersionNotWholeError):
        dst.stage(bad, [holder(key)], 1.0)
    assert (mine["a"] == 1).all()
    with pytest.raises(VersionDirtyError, match="in place has begun"):
        here.methods.may_begin()
    with pytest.raises(TensorDirtyError):
        source(here, mine).seal(V1, AMONG, b"2")
    assert dst.state.shown is None
    whole = replace(V1, digests=digests)
    assert dst.stage(whole, [holder(key)], 1.0).nbytes == NBYTES  # that of which another digest was wanted
    assert dst.show(whole)
    here.methods.may_begin()
    assert not here.store.statistics().dirty
    assert dst.state.shown == V1


def test_in_place_what_others_write_before_the_commit_is_not_shown(here):
    src, mine = source(here, tensors(1)), tensors(0)
    dst = receiver(here, mine, inplace=True)
    key, digests = src.seal(V1, AMONG, b"1")
    whole = replace(V1, digests=digests)
    dst.stage(whole, [holder(key)], 1.0)
    mine["b"][0, 0] = 5
    assert dst.show(whole) is None
    assert dst.stage(whole, [holder(key)], 1.0).nbytes == NBYTES
    assert dst.show(whole)
    mine["a"][0, 0] = 5  # and what they write afterwards is read again
    assert dst.stage(whole, [holder(key)], 1.0).nbytes == NBYTES


OWN = OwnProcess(None)


@pytest.fixture
def held_here(here):
    """What this process, as an actor, holds under `KEY`."""
    held = tensors(0)
    here.store.put(KEY, Container.of(held, arrays.is_tensor))
    return held


@pytest.mark.usefixtures("held_here")
def test_of_publishers_in_a_process_the_newest_stays_whatever_came_last(here):
    def seal(epoch, rank):
        return agent.seal(OWN, "policy", rank, replace(V1, epoch=epoch), AMONG, b"1")

    ranks = {name: layout([4, 6], mesh={"rank": 2}, dtype="float32") for name in NAMES}
    agent.attach_source(OWN, "policy", 2, KEY, ranks, 1)
    seal(2, 1)
    with pytest.raises(PublisherReplacedError, match="epoch 2 has begun"):
        agent.attach_source(OWN, "policy", 1, KEY, ranks, 1)
    seal(2, 1)
    agent.attach_source(OWN, "policy", 3, KEY, ranks, 0)
    assert here.store.statistics().held == 1  # what was kept for the earlier epoch is gone
    with pytest.raises(PublisherReplacedError, match="epoch 3 has begun"):
        seal(2, 1)
    seal(3, 0)
    agent.attach_source(OWN, "policy", 3, KEY, ranks, 0)  # of one that knows no record of the other
    assert here.store.statistics().held == 1
    seal(3, 0)
    agent.detach_source(OWN, "policy", 2)
    seal(3, 0)
    agent.detach_source(OWN, "policy", 3)
    with pytest.raises(VersionNotPutError, match="was closed, or its process has restarted"):
        seal(3, 0)


@pytest.mark.usefixtures("held_here")
def test_small_parts_are_told_together(monkeypatch):
    monkeypatch.setattr(agent, "TOLD_NBYTES", 2 * NBYTES)
    agent.attach_source(OWN, "policy", 1, KEY, LAYOUTS, 0)
    trainer = SimpleNamespace(layers=lambda: iter(NAMES))
    reports = agent.seal_parts(trainer, "policy", 0, V1, AMONG, b"1", "layers")
    assert [[name for name, _ in digests] for _, digests in reports] == [["a", "b"], ["c"]]


def test_in_place_another_driver_ends_what_one_has_left(here, held_here):
    held_here["none"] = pytest.importorskip("torch").empty(0, 4)  # of which numpy has another address each time
    layouts = LAYOUTS | {"none": layout([0, 4], mesh={"rank": 1}, dtype="float32")}
    here.store.free([KEY])
    here.store.put(OTHER, Container.of(held_here, arrays.is_tensor))
    src = source(here, tensors(1))
    key, digests = src.seal(V1, AMONG, b"1")
    whole = replace(V1, digests=digests)
    assert agent.attach_receiver(OWN, "policy", "first", OTHER, layouts, 0, True)[1] is None
    agent.stage(OWN, "first", 0, whole, [holder(key)], 1.0)
    assert agent.attach_receiver(OWN, "policy", "second", OTHER, layouts, 0, True)[1] is None
    assert agent.stage(OWN, "second", 0, whole, [holder(key)], 1.0)[0].nbytes == 0
    assert agent.show(OWN, "second", 0, whole)
    here.methods.may_begin()
    assert agent.shown("second") == (True, V1)
    assert agent.attach_receiver(OWN, "policy", "third", OTHER, layouts, 0, True)[1] == V1


def test_what_waits_under_a_lock_has_the_time_that_the_lock_has_left(here, held_here):
    entered_s = []

    @contextmanager
    def lock():
        entered_s.append(time.monotonic())
        yield

    key, digests = source(here, tensors(1)).seal(V1, AMONG, b"1")
    agent.attach_receiver(OWN, "policy", "sub", KEY, LAYOUTS, 0, False, lock)
    until_s = time.monotonic() + 1
    ranges = list(map(arrays.byte_range, held_here.values()))
    with here.store.reading(ranges), pytest.raises(CollectiveTimeoutError) as raised:
        agent.update(OWN, "sub", 0, replace(V1, digests=digests), [holder(key)], 1.0, until_s)
    assert raised.value.timeout_s < until_s - entered_s[0]


@pytest.mark.usefixtures("held_here")
def test_sides_end_with_their_participant(here):
    key, digests = source(here, tensors(1)).seal(V1, AMONG, b"1")
    before = here.store.statistics().held
    agent.attach_source(OWN, "policy", 2, KEY, LAYOUTS, 0)
    agent.attach_receiver(OWN, "policy", "first", KEY, LAYOUTS, 0, False)
    agent.update(OWN, "first", 0, replace(V1, digests=digests), [holder(key)], 1.0, time.monotonic() + 60)
    here.close()
    assert here.store.statistics().held == before
    assert agent.shown("first") == (False, None)
    assert agent.attach_receiver(OWN, "policy", "second", KEY, LAYOUTS, 0, False)[1] is None
    agent.attach_source(OWN, "policy", 1, KEY, LAYOUTS, 0)


def test_tensors_that_others_subscribe_otherwise_are_theirs(here, held_here):
    src = source(here, tensors(1))
    key, digests = src.seal(V1, AMONG, b"1")
    whole, before = replace(V1, digests=digests), here.store.statistics().held
    agent.attach_receiver(OWN, "policy", "first", KEY, LAYOUTS, 0, False)
    agent.stage(OWN, "first", 0, whole, [holder(key)], 1.0)
    assert agent.show(OWN, "first", 0, whole)
    assert here.store.statistics().held == before + 1
    agent.attach_receiver(OWN, "policy", "second", KEY, LAYOUTS, 0, True)
    assert here.store.statistics().held == before  # the second set of the other is given up
    assert agent.shown("first") == (False, None)
    with pytest.raises(VersionNotWholeError, match="another subscription has its tensors"):
        agent.stage(OWN, "first", 0, whole, [holder(key)], 1.0)
    assert agent.stage(OWN, "second", 0, whole, [holder(key)], 1.0)[0].nbytes == 3 * NBYTES
    assert held_here["a"].all()


def test_subscriptions_that_have_no_element_of_a_rank_take_nothing_from_each_other(here, held_here):
    none = {"none": layout([0, 4], mesh={"rank": 1}, dtype="float32")}
    here.store.put(OTHER, Container.of({"none": np.empty((0, 4), np.float32)}, arrays.is_tensor))
    for name in ("first", "second"):
        agent.attach_receiver(OWN, "policy", name, OTHER, none, 0, False)
    assert [agent.shown(name) for name in ("first", "second")] == [(True, None)] * 2


def test_tensors_that_have_become_others_are_refused_before_anything_is_copied(here):
    torch = pytest.importorskip("torch")
    held, mine = ({name: torch.full((4, 6), float(at)) for name in NAMES} for at in range(2))
    src, dst = source(here, held), receiver(here, mine)
    key, digests = src.seal(V1, AMONG, b"1")
    dst.stage(replace(V1, digests=digests), [holder(key)], 1.0)
    mine["c"].data = mine["c"].half()
    held["c"].data = held["c"].double()
    with pytest.raises(LayoutError, match=r"tensor 'c'.*float16\[4, 6\] on cpu.*float32\[4, 6\] on cpu, as before"):
        dst.show(V1)
    with pytest.raises(LayoutError):  # before other ranks show
        dst.stage(replace(V1, number=2, digests=digests), [holder(key)], 1.0)
    assert all((tensor == 1).all() for tensor in mine.values())
    with pytest.raises(LayoutError, match=r"float64\[4, 6\]"):
        src.seal(V1, AMONG, b"2")


@pytest.mark.parametrize("inplace", [False, True])
def test_torch_is_told_that_tensors_were_written(here, inplace):
    torch = pytest.importorskip("torch")
    src, mine = source(here, tensors(1)), {name: torch.zeros(4, 6, requires_grad=True) for name in NAMES}
    dst = receiver(here, mine, inplace=inplace)
    key, digests = src.seal(V1, AMONG, b"1")
    loss = (mine["a"] * mine["b"]).sum()
    dst.stage(replace(V1, digests=digests), [holder(key)], 1.0)
    assert dst.show(V1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_receiver_that_converts_has_one_converted_atom_in_memory_at_a_time(here):
    shape = [64, 1 << 10]
    layouts = {name: replace(layout(shape, mesh={"rank": 1}, dtype="float32"), converts=True) for name in NAMES}
    among = atoms.cut(layouts, [])
    held, mine = ({name: np.full(shape, value, dtype) for name in NAMES} for value, dtype in ((1, "<f4"), (0, "<f2")))
    halves = {name: replace(each, dtype="float16") for name, each in layouts.items()}
    src = Source(here, Container.of(held, arrays.is_tensor), layouts, 0)
    dst = Receiver(here, "policy", Container.of(mine, arrays.is_tensor), halves, 0, inplace=False)
    for number in (1, 2):
        version = replace(V1, number=number, count=number, cut=among)
        key, digests = src.seal(version, among, b"%d" % number)
        version = replace(version, digests=digests)
        dst.stage(version, [(holder(key)[0], atoms.served_places(layouts, 0, among))], 1.0)
        tracemalloc.start()
        assert dst.show(version)
        _, peak_nbytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_nbytes < 2 * mine["a"].nbytes
        assert all((array == number).all() for array in mine.values())
        for array in held.values():
            array += 1


def test_in_place_in_another_byte_order(here):
    src, mine = source(here, tensors(1)), {name: np.zeros((4, 6), ">f4") for name in NAMES}
    dst = receiver(here, mine, inplace=True)
    key, digests = src.seal(V1, AMONG, b"1")
    dst.stage(replace(V1, digests=digests), [holder(key)], 1.0)
    assert dst.show(V1)
    assert all((tensor == 1).all() for tensor in mine.values())


@pytest.mark.usefixtures("held_here")
def test_a_side_of_own_tensors_is_closed_between_two_calls(here):
    def close():
        with entered(here):
            agent.in_own_process(OWN, agent.detach_receiver, "sub")
        is_closed.set()

    def update(process):
        agent.in_own_process(process, lambda _: None)  # as a signal handler does
        closing.start()
        assert not is_closed.wait(0.1)
        return agent.shown("sub")[0]

    async def in_a_loop(process):
        await asyncio.to_thread(asyncio.run, close_in_loop())
        return agent.shown("sub")[0]

    async def close_in_loop():
        close()

    agent.attach_receiver(OWN, "policy", "sub", KEY, LAYOUTS, 0, False)
    is_closed, closing = threading.Event(), threading.Thread(target=close)
    assert agent.in_own_process(OWN, update)
    closing.join()
    assert not agent.shown("sub")[0]
    agent.attach_receiver(OWN, "policy", "sub", KEY, LAYOUTS, 0, False)
    assert agent.in_own_process(OWN, lambda process: asyncio.run(in_a_loop(process)))
    assert wait_until(lambda: not agent.shown("sub")[0])


def test_an_actor_of_two_ranks_shows_a_version_when_both_do(here, held_here):
    more = tensors(0)
    here.store.put(OTHER, Container.of(more, arrays.is_tensor))
    key, digests = source(here, tensors(1)).seal(V1, AMONG, b"1")
    layouts = {name: layout([4, 6], mesh={"rank": 2}, dtype="float32") for name in NAMES}
    for rank, held_key in enumerate((KEY, OTHER)):
        agent.attach_receiver(OWN, "policy", "sub", held_key, layouts, rank, False)
    for rank, expected in enumerate((None, V1)):
        agent.stage(OWN, "sub", rank, replace(V1, digests=digests), [holder(key)], 1.0)
        assert agent.show(OWN, "sub", rank, V1)
        assert agent.shown("sub") == (True, expected)


@pytest.mark.parametrize("inplace", [False, True])
def test_tensors_that_a_failed_collective_has_left_dirty_are_subscribed_and_overwritten(here, held_here, inplace):
    array = held_here["b"]
    here.store.mark_dirty([arrays.byte_range(array)], [array])
    key, digests = source(here, tensors(1)).seal(V1, AMONG, b"1")
    agent.attach_receiver(OWN, "policy", "sub", KEY, LAYOUTS, 0, inplace)
    assert here.store.statistics().dirty == 1
    agent.stage(OWN, "sub", 0, replace(V1, digests=digests), [holder(key)], 1.0)
    assert agent.show(OWN, "sub", 0, V1)
    assert here.store.statistics().dirty == 0
    assert (array == 1).all()


def test_an_only_rank_shows_at_once_and_not_after_the_drivers_time(here, held_here):
    key, digests = source(here, tensors(1)).seal(V1, AMONG, b"1")
    agent.attach_receiver(OWN, "policy", "sub", KEY, LAYOUTS, 0, False)
    args = OWN, "sub", 0, replace(V1, digests=digests), [holder(key)], 1.0
    with pytest.raises(CollectiveTimeoutError):
        agent.update(*args, time.monotonic() - 1)
    assert agent.shown("sub")[1] is None
    assert not held_here["a"].any()
    receipt, _, served = agent.update(*args, time.monotonic() + 60)
    assert receipt.digests == digests
    assert served is not None
    assert agent.shown("sub")[1] == V1
    assert held_here["a"].all()


def test_a_side_of_which_one_rank_refuses_is_ended_on_all(monkeypatch):
    def refused(refs, timeout):
        raise RayTaskError("attach_receiver", "", refusal("subscribe", "", (wrong_layout("dtype", "int8", "int64"),)))

    called, retrieved = [], []

    def call(self, rank, *args):
        called.append((rank, *args))
        return SimpleNamespace(future=lambda: retrieved.append(rank))

    monkeypatch.setattr(ray, "get", refused)
    monkeypatch.setattr(Ranks, "call", call)
    side = Ranks("subscribe", [SimpleNamespace(key=KEY)] * 2, LAYOUTS, None)
    with pytest.raises(LayoutError):
        side.check()
    assert retrieved == [0, 1]  # or Ray logs what the other has raised as an unhandled error
    called.clear()
    retrieved.clear()
    with pytest.raises(LayoutError):
        side.attach(agent.attach_receiver, lambda rank: (), (agent.drop_receiver, "sub"))
    assert called[2:] == [(0, agent.drop_receiver, "sub"), (1, agent.drop_receiver, "sub")]
    assert retrieved == [0, 1]


def test_methods_of_actors_with_a_lock_are_not_streamed():
    with pytest.raises(UnsupportedError):
        ActorRanks("publish", [], [], LAYOUTS, "lock").items(0, agent.seal_parts)


def test_who_is_dropped_serves_nothing_and_refuses_what_it_refused(here):
    src, dst = source(here, tensors(1)), receiver(here, tensors(0), inplace=True)
    key, digests = src.seal(V1, AMONG, b"1")
    before = here.store.statistics().held
    dst.stage(replace(V1, digests=digests), [holder(key)], 1.0)
    dst.withdraw()
    assert here.store.statistics().held == before
    with pytest.raises(VersionDirtyError):
        here.methods.may_begin()


@pytest.mark.usefixtures("held_here")
def test_own_tensors_refuse_no_methods_while_they_are_dirty(here):
    key, digests = source(here, tensors(1)).seal(V1, AMONG, b"1")
    agent.attach_receiver(OWN, "policy", "sub", KEY, LAYOUTS, 0, True)
    agent.stage(OWN, "sub", 0, replace(V1, digests=digests), [holder(key)], 1.0)
    here.methods.may_begin()
    assert here.store.statistics().dirty == len(NAMES)
    assert agent.show(OWN, "sub", 0, V1)
    assert here.store.statistics().dirty == 0
