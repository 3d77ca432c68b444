"""A stream's driver over actors that are queues in this process: what is told to whom, and when."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from raycollect.errors import InvalidArgumentError, VersionNotPutError
from raycollect.member.runtime import Runtime
from raycollect.pos import Store, fetch
from raycollect.weights import agent, atoms, publication, stream
from raycollect.weights.protocol import Phase
from raycollect.weights.publication import Publication
from raycollect.weights.stream import Stream
from raycollect.weights.subscription import Subscription
from tests.pure.weights.sides import AMONG, LAYOUTS, NAMES, NBYTES, V1, holder, receiver, source, tensors


class Items:
    """In place of Ray's generator of refs."""

    def __init__(self, made):
        self.made = made
        self.ahead = deque()
        self.is_over = False

    def fill(self):
        """Runs to the next item."""
        if not self.ahead and not self.is_over:
            try:
                self.ahead.append(Ref(lambda: None, value=next(self.made)))
            except StopIteration:
                self.is_over = True
            except VersionNotPutError as exc:
                self.ahead.append(Ref(lambda: None, error=exc))

    def __next__(self):
        if not self.ahead:
            raise StopIteration
        return self.ahead.popleft()


class Ref:
    def __init__(self, do, value=None, error=None):
        self.do, self.value, self.error, self.is_done = do, value, error, value is not None or error is not None

    def fill(self):
        if not self.is_done:
            self.is_done = True
            try:
                self.value = self.do()
            except VersionNotPutError as exc:
                self.error = exc

    def future(self):
        """As `fill`: what is asked for comes some time."""
        self.fill()


class Ray:
    """What a stream uses of Ray. What is waited for is done, the newest first, as far as an actor's order allows."""

    ObjectRefGenerator = Items

    def wait(self, pending, timeout):
        for one in reversed(pending):
            one.fill()
        return pending[-1:], pending[:-1]

    def get(self, ref):
        if isinstance(ref.error, RayActorError):
            raise ref.error
        if ref.error is not None:
            raise RayTaskError("f", "", ref.error)
        return ref.value


class Ranks:
    """Actors, whose calls are made when somebody waits for them."""

    def __init__(self, actor):
        self.actor = actor

    def __len__(self):
        return 1

    def call(self, rank, function, *args):
        return Ref(lambda: function(self.actor, *args))

    def items(self, rank, function, *args, **kwargs):
        return Items(function(self.actor, *args, **kwargs))

    def keys(self, rank):
        return frozenset(NAMES)


class Group:
    """A receiver group of one rank; it keeps what it was asked for."""

    def __init__(self, receiver):
        self.receiver = receiver
        self.landed = []

    def _open_stream(self, version, among):
        self.receiver.open_stream(version, among)
        return [frozenset(among)]

    def _land(self, rank, version, part, holders, limit_s):
        def land():
            self.landed.append([name for name, _ in part])
            return self.receiver.land(version, part, holders, limit_s)

        return Ref(land)


class Trainer:
    def __init__(self, held):
        self.held = held

    def layers(self, fails=False):
        for name, array in self.held.items():
            if fails and name == NAMES[-1]:
                raise ValueError("no such layer")
            array.fill(1)
            yield name
            array.fill(9)  # it was sealed

    def nothing(self):
        yield from ()


@pytest.fixture(autouse=True)
def world(monkeypatch):
    runtime = SimpleNamespace(store=Store(), actor="A", refusals={}, is_ordered=False)
    monkeypatch.setattr(Runtime, "_current", runtime)
    monkeypatch.setitem(fetch._clients.local, b"here", runtime.store)
    monkeypatch.setattr(stream, "ray", Ray())
    monkeypatch.setattr(agent, "TOLD_NBYTES", NBYTES)
    held, mine = tensors(0), tensors(0)
    made = SimpleNamespace(held=held, mine=mine, receiver=receiver(mine), finished=[])
    monkeypatch.setitem(agent._agents.sources, "policy", (1, {0: source(held)}))
    made.group = Group(made.receiver)
    made.publication = SimpleNamespace(
        name="policy",
        _ranks=Ranks(Trainer(held)),
        _one_at_a_time=lambda *_: nullcontext(),
        _count=0,
        _places_on=lambda rank: atoms.held_places(LAYOUTS, 0, AMONG),
        _holder=lambda rank, key: holder(key)[0],
        _forget_overwritten=lambda: None,
        _finish=lambda job, *_: made.finished.append(job),
    )
    made.stream = Stream(made.publication, [made.group], V1, AMONG)
    monkeypatch.setattr("raycollect.weights.stream.update_all", lambda *_, **__: ["receipt"])
    return made


def test_each_layer_is_landed_before_the_next_is_asked_for(world):
    world.stream.call("layers")
    assert world.group.landed == [[name] for name in NAMES]
    assert world.receiver._ahead == 3 * NBYTES
    assert not any(array.any() for array in world.mine.values())
    assert world.stream.commit() == ["receipt"]
    (job,) = world.finished
    assert job.round.phase is Phase.DONE
    assert set(job.round.version.digests) == set(AMONG)
    assert world.receiver.stage(job.round.version, [], 1.0).nbytes == 3 * NBYTES  # all of it came before
    world.receiver.show(job.round.version)
    assert all((array == 1).all() for array in world.mine.values())


def test_small_layers_are_told_together(world, monkeypatch):
    monkeypatch.setattr(agent, "TOLD_NBYTES", 2 * NBYTES)
    world.stream.call("layers")
    assert world.group.landed == [["a", "b"], ["c"]]


def test_what_is_no_part_comes_with_the_commit(world):
    world.stream.part("b")
    assert world.group.landed == [["b"]]
    world.stream.commit()
    (job,) = world.finished
    assert set(job.round.parts) < set(job.round.version.digests) == set(AMONG)
    with pytest.raises(InvalidArgumentError, match="'x'"):
        world.stream.part("b", "x")


def test_a_method_that_yields_nothing_leaves_all_to_the_commit(world):
    world.stream.call("nothing")
    world.stream.commit()
    (job,) = world.finished
    assert job.round.phase is Phase.DONE
    assert set(job.round.version.digests) == set(AMONG)


def test_a_receiver_that_is_slow_gets_several_parts_at_once(world, monkeypatch):
    def wait(self, pending, timeout):  # a receiver's answer comes last
        pending[0].fill()
        return pending[:1], pending[1:]

    monkeypatch.setattr(Ray, "wait", wait)
    world.stream.call("layers")
    assert world.group.landed == [[NAMES[0]], list(NAMES[1:])]


def test_a_part_is_asked_of_those_who_have_sealed_it(world):
    world.publication._ranks = [None, None]  # replicas
    world.publication._holder = lambda rank, key: rank
    made = Stream(world.publication, [], V1, AMONG)
    for rank, names in enumerate((NAMES, NAMES[:1])):
        sealed = {atom: b"digest" for atom in AMONG if atom[0] in names}
        made._heard(rank, Ref(None, value=(b"key", sealed)), is_all=False)
    holders = made._holders(dict.fromkeys(AMONG, b"digest"))
    assert [(rank, [name for name, _ in places]) for rank, places in holders] == [(0, list(NAMES)), (1, ["a"])]
    world.publication._places_on = lambda rank: {}  # another stream has begun, whose receivers cut otherwise
    assert made._holders(dict.fromkeys(AMONG, b"digest")) == []


def test_a_layer_that_fails_ends_the_stream_and_what_is_sealed_later_does_not_count(world):
    world.stream.call("layers", fails=True)
    assert world.stream._job.round.phase is Phase.FAILED
    world.stream.commit()
    (job,) = world.finished  # which raises, there
    assert job.round.phase is Phase.FAILED
    assert "'layers' raised ValueError: no such layer" in str(job.errors[0])
    ref = world.publication._ranks.call(0, agent.seal, *world.stream._of(0))
    ref.fill()
    assert "no such layer" in str(ref.error)


def test_a_stream_in_whose_place_another_one_has_sealed_puts_nothing(world):
    world.stream.part(*NAMES)
    Stream(world.publication, [], V1, AMONG).part("a")
    world.stream.commit()
    (job,) = world.finished  # which raises, there
    assert job.round.phase is Phase.FAILED
    assert "took its place" in str(job.errors[0])


@pytest.mark.parametrize(("error", "lost"), [(RayActorError(), {0}), (ActorUnavailableError("no way", None), set())])
def test_who_can_not_be_reached_is_not_taken_for_dead(world, error, lost):
    world.publication._ranks.call = lambda *_: Ref(None, error=error)
    world.stream.commit()
    (job,) = world.finished
    assert (job.round.phase, set(job.round.lost)) == (Phase.FAILED, lost)
    assert lost or "which may live: The actor None is unavailable: no way" in str(job.errors[0])


@pytest.mark.parametrize("number", [1, 0, 1 << 63, True, "2"])
def test_a_number_is_above_the_last_and_fits_into_a_record(number):
    with pytest.raises(InvalidArgumentError, match="above 1, and below"):
        Publication._begun(SimpleNamespace(_used=V1), (), number)


def test_who_comes_after_another_version_puts_nothing(world):
    world.publication._count = 1
    for late in (world.stream.commit, lambda: world.stream.call("layers"), lambda: world.stream.part("a")):
        with pytest.raises(VersionNotPutError, match="another version was put"):
            late()
    assert np.array_equal(world.mine["a"], np.zeros((4, 6)))


def test_receiver_groups_come_in_whatever_can_be_iterated_over(monkeypatch):
    """As the values of a dict, of which a stream has always made a list."""
    pub, sub = Publication.__new__(Publication), Subscription.__new__(Subscription)
    pub.name, pub._ranks, pub._last = "policy", SimpleNamespace(layouts=LAYOUTS), V1
    sub.name, sub._check = "policy", lambda layouts: None
    monkeypatch.setattr(publication, "update_all", lambda groups, *_, **__: list(groups))
    for given in ([sub], {1: sub}.values(), {sub}, iter([sub])):
        assert pub.push(given) == [sub]
