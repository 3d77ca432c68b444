"""What a stream and a put do with what they are given, and with who does not answer."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import ray
from msgspec import structs
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError

from raycollect.core.model import Address
from raycollect.errors import (
    InvalidArgumentError,
    UnknownVersionError,
    VersionError,
    VersionNotWholeError,
    VersionTimeoutError,
)
from raycollect.planner.layout import layout
from raycollect.weights import protocol, publication
from raycollect.weights.protocol import Phase, RankFailed, RankLost, RankVerified, VersionRound
from raycollect.weights.publication import Publication
from raycollect.weights.ranks import Job, Ranks, Update, event_of
from raycollect.weights.side_ranks import OwnRank
from raycollect.weights.stream import Stream
from raycollect.weights.subscription import Subscription, _Updates
from tests.pure.weights.sides import AMONG, HERE, KEY, LAYOUTS, NAMES, V1

DONE = VersionRound(V1, Phase.DONE, frozenset())


@pytest.mark.parametrize(
    ("error", "event"),
    [
        (RayActorError(), RankLost),
        (ActorUnavailableError("no way", None), RankFailed),
        (OutOfMemoryError("its answer"), RankFailed),
    ],
)
def test_who_can_not_be_reached_is_not_taken_for_dead(error, event):
    def heard():
        raise error

    job = Job(round=protocol.begin_put(V1, 1)[0], errors={})
    assert type(event_of(job, 0, heard)) is event
    assert event is RankLost or isinstance(job.errors[0], VersionError)


@pytest.mark.parametrize(("events", "missing"), [([], (0, 3)), ([0], (1, 2, 3)), ([0, 1, 2, 3], (0, 1, 2, 3))])
def test_ranks_that_were_not_called_yet_are_not_late(events, missing):
    ranks = Ranks("subscribe", [], LAYOUTS, None)
    ranks.members = [structs.replace(HERE, address=Address(host="127.0.0.1", port=1, secret=bytes(32)))] * 4
    job = Update(round=protocol.begin_update(V1, 4), errors={}, tell=None, read=None, after={1: 0, 2: 0})
    for rank in events:
        job.round, _ = protocol.advance(job.round, RankVerified(rank))
    job.end_late()
    assert ranks.late_error("policy", job, 1.0).missing == missing


def test_an_update_that_failed_raises_its_own_error_where_no_newer_version_can_be_found():
    def find(version):
        raise UnknownVersionError(name="policy")

    def finish(*args):
        raise VersionNotWholeError(name="policy", detail="its own")

    sub = SimpleNamespace(
        _ranks=None, _find=find, _finish=finish, _directory=SimpleNamespace(holders=lambda version: [])
    )
    sub._job = lambda *args: Update(round=DONE, errors={}, tell=None, read=None)
    sub._directory.keep_layouts = lambda *_, **__: None
    sub._directory.post_holders = lambda version, holders: None
    sub.name = "policy"
    updates = _Updates([sub], "latest", 1.0, V1, (), ())
    updates.run()
    with pytest.raises(VersionNotWholeError):
        updates.receipts()


def test_the_calling_process_is_called_after_the_other_receiver_groups(monkeypatch):
    class Ref:
        def future(self):
            pass

    called = []

    def group(name, ranks):
        def tell(*_):
            called.append(name)
            return Ref()

        def job(*_):
            return Update(round=protocol.begin_update(V1, 1), errors={}, tell=tell, read=None)

        def finish(*_):
            raise VersionTimeoutError(name="policy")

        return SimpleNamespace(_ranks=ranks, _job=job, _finish=finish, _directory=there)

    monkeypatch.setattr(ray, "wait", lambda refs, **_: ([], refs))
    there = SimpleNamespace(holders=lambda _: [], keep_layouts=lambda *_, **__: None, post_holders=lambda *_: None)
    handle = SimpleNamespace(key=KEY)
    own, actors = OwnRank("subscribe", handle, LAYOUTS, None), Ranks("subscribe", [handle], LAYOUTS, None)
    groups = [group("own", own), group("first", actors), group("second", actors)]
    updates = _Updates(groups, "latest", 1.0, V1, (), ())
    updates.run()
    assert called == ["first", "second", "own"]
    assert sorted(updates.errors) == [0, 1, 2]


def test_a_part_is_asked_of_those_who_have_sealed_it():
    places = dict.fromkeys(AMONG.atoms, ((0, (0, 0), (4, 6)),))
    replicas = SimpleNamespace(_ranks=[None, None], _places_on=lambda rank, cut: places, _holder=lambda rank, key: rank)
    stream = Stream(replicas, [], V1)
    for rank, names in enumerate((NAMES, NAMES[:1])):
        stream._keys[rank] = b"key"
        stream._has[rank].update(atom for atom in AMONG.atoms if atom[0] in names)
    holders = stream._holders(dict.fromkeys(AMONG.atoms, b"digest"))
    assert [(rank, [name for name, _ in some]) for rank, some in holders] == [(0, list(NAMES)), (1, ["a"])]
    replicas._places_on = lambda rank, cut: {}  # another stream has begun, whose receivers cut otherwise
    assert stream._holders(dict.fromkeys(AMONG.atoms, b"digest")) == []


def test_a_rank_whose_methods_overlap_is_called_once_the_call_before_has_ended(monkeypatch):
    pending = []

    def call(rank, function, *args):
        assert rank == 0 or not pending
        pending.extend([object()] * rank)
        return pending[-1] if rank else object()

    def wait(refs, timeout):
        ready = [ref for ref in refs if ref in pending] if timeout else []
        for ref in ready:
            pending.remove(ref)
        return ready, []

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", lambda ref: (b"key", {}))
    ranks = Ranks("publish", [None] * 2, {name: layout([4, 6], mesh={"rank": 2}) for name in NAMES}, None)
    ranks.call, ranks._overlapping = call, frozenset({1})
    publisher = SimpleNamespace(name="policy", _ranks=ranks, _count=0, _one_at_a_time=lambda *_: nullcontext())
    stream = Stream(publisher, [], V1)
    for name in NAMES:
        stream.part(name)
    assert [len(queue) for queue in stream._sealing] == [len(NAMES), 0]


@pytest.mark.parametrize("number", [1, 0, 1 << 63, True, "2"])
def test_a_number_is_above_the_last_and_fits_into_a_record(number):
    with pytest.raises(InvalidArgumentError, match="above 1, and below"):
        Publication._begun(SimpleNamespace(_used=V1), (), number)


def test_receiver_groups_come_in_whatever_can_be_iterated_over(monkeypatch):
    """As the values of a dict, of which a stream has always made a list."""
    pub, sub = Publication.__new__(Publication), Subscription.__new__(Subscription)
    pub.name, pub._ranks = "policy", SimpleNamespace(layouts=LAYOUTS)
    pub._last = pub._pushed = publication._Put(V1)
    sub.name, sub._check = "policy", lambda layouts: None
    monkeypatch.setattr(publication, "update_all", lambda groups, *_, **__: list(groups))
    for given in ([sub], {1: sub}.values(), {sub}, iter([sub])):
        assert pub.push(given) == [sub]
