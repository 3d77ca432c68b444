"""Records of publications in a store that is a dict: who removes which, and what comes in between."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace

import pytest
from ray.experimental import internal_kv

import raycollect as col
from raycollect.core.model import Address, Key
from raycollect.errors import (
    PublisherReplacedError,
    UnknownVersionError,
    VersionError,
    VersionNotPutError,
    VersionTimeoutError,
)
from raycollect.ray_bridge import ray_cluster, ray_session
from raycollect.weights import directory, publication
from raycollect.weights.directory import Holder, VersionDirectory, sweep
from raycollect.weights.protocol import Phase, Version, VersionRound
from raycollect.weights.publication import Publication
from raycollect.weights.ranks import Job, Ranks
from raycollect.weights.subscription import Subscription, _Updates
from raycollect.weights.turns import Turns

LAYOUTS = {"w": col.layout([4], mesh={"tp": 1}, spec=())}
COLUMNS = {"w": col.layout([4], mesh={"tp": 2}, spec=("tp",))}


class Store:
    """Ray's key-value store, of one step per call; `between` is called before a step that is chosen."""

    def __init__(self):
        self.entries: dict[bytes, bytes] = {}
        self.living: set[str] = set()
        self.steps = 0
        self.chosen = -1
        self.between: Callable[[], object] = lambda: None

    def _step(self):
        self.steps += 1
        if self.steps - 1 == self.chosen:
            self.between()

    def internal_kv_put(self, key, value, overwrite, namespace, timeout):
        self._step()
        if not overwrite and key in self.entries:
            return 0
        self.entries[key] = value
        return 1

    def internal_kv_get(self, key, namespace, timeout):
        self._step()
        return self.entries.get(key)

    def internal_kv_multi_get(self, keys, namespace, timeout):
        self._step()
        return {key: self.entries[key] for key in keys if key in self.entries}

    def internal_kv_keys(self, prefix, namespace, timeout):
        self._step()
        return [key for key in self.entries if key.startswith(prefix)]

    def internal_kv_del(self, key, by_prefix, namespace, timeout):
        self._step()
        for record in [record for record in self.entries if record == key or (by_prefix and record.startswith(key))]:
            del self.entries[record]

    def living_workers(self):
        self._step()
        return frozenset(self.living)

    def records(self, name):
        return sorted(key.decode() for key in self.entries if key.startswith(f"weights/{name}/".encode()))


@pytest.fixture
def make_store(monkeypatch) -> Callable[[], Store]:
    """Makes empty stores; the last one is that of this cluster."""

    def make():
        store = Store()
        monkeypatch.setattr(ray_session, "ensure_ray", lambda: None)
        monkeypatch.setattr(internal_kv, "internal_kv_get_gcs_client", lambda: store)
        monkeypatch.setattr(ray_cluster, "living_workers", store.living_workers)
        return store

    return make


def holder(worker, signature=b"s", *, is_publisher=False):
    address = Address(host="127.0.0.1", port=1, secret=bytes(32))
    return Holder(
        address=address, actor=worker, incarnation=worker, rank=0, is_publisher=is_publisher, signature=signature,
        key=Key(worker.encode()), machine="here",
    )  # fmt: skip


def holds(there, version, worker, signature=b"s"):
    there.post_holders(version, [holder(worker, signature)])


def publish(store, name, worker):
    """What a publisher and its only actor write until the first version is there to be had."""
    store.living |= {worker, f"{worker}'s actor"}
    there = VersionDirectory(name)
    epoch = there.begin_epoch(worker)
    version = Version(epoch, 1, signature=there.post_layouts(LAYOUTS, epoch))
    there.post_version(version, [holder(f"{worker}'s actor", version.signature, is_publisher=True)])
    there.forget_before(version)
    return version


def end(store, *workers):
    store.living -= {*workers, *(f"{worker}'s actor" for worker in workers)}


def is_served(name, version):
    """Whether one that knows nothing finds a version, who holds it, and the layouts that say what they hold."""
    there = VersionDirectory(name)
    latest = there.latest()
    holders = there.holders(version)
    layouts = [there.layouts(holder.signature, version.epoch) for holder in holders]
    return latest == version and bool(holders) and all(layout is not None for layout in layouts)


def is_swept(store, name):
    """Whether nothing is left of a publication but the record of its last epoch."""
    return [record.rpartition("/")[0] for record in store.records(name)] == [f"weights/{name}/epochs"]


@pytest.mark.parametrize("step", range(3))
def test_there_is_a_latest_version_whenever_another_one_takes_its_place(make_store, step):
    store = make_store()
    there, publisher = VersionDirectory("policy"), VersionDirectory("policy")
    for number in (1, 2):
        publisher.post_version(Version(1, number), [])

    def put_twice():
        for number in (1, 2):
            publisher.forget(Version(1, number))
            publisher.post_version(Version(1, number + 2), [])

    store.chosen, store.between = store.steps + step, put_twice
    assert there.latest().number in (2, 4)
    store.chosen = -1
    for number in (1, 2, 3, 4):
        publisher.forget(Version(1, number))
    assert there.latest() is None


@pytest.mark.parametrize("is_late", [False, True])
def test_a_store_that_does_not_answer_is_told_of_and_whose_time_is_over(make_store, monkeypatch, is_late):
    store, timeouts = make_store(), []

    def get(key, namespace, timeout):
        timeouts.append(timeout)
        raise RuntimeError("Deadline Exceeded")

    monkeypatch.setattr(store, "internal_kv_get", get)
    there = VersionDirectory("policy")
    limit_s = 0.0 if is_late else 20.0
    with pytest.raises(VersionError) as raised, there.within(limit_s, time.monotonic() + limit_s):
        there.version(1, 1)
    assert isinstance(raised.value, VersionTimeoutError) is is_late
    assert timeouts[0] == 0.05 if is_late else 10.0 < timeouts[0] <= 20.0
    with pytest.raises(VersionError):
        there.version(1, 1)
    assert timeouts[1] == 30.0


def test_an_update_waits_for_the_store_only_as_long_as_for_a_hint(make_store, monkeypatch):
    store, timeouts = make_store(), []
    there = VersionDirectory("policy")
    there.post_layouts(LAYOUTS, 1)

    def put(key, value, overwrite, namespace, timeout):
        timeouts.append(timeout)
        raise RuntimeError("Deadline Exceeded")

    def job(*_):
        raise VersionError(name="policy")

    monkeypatch.setattr(store, "internal_kv_put", put)
    sub = SimpleNamespace(_directory=there, _job=job, _ranks=Ranks("subscribe", [], LAYOUTS, None))
    version = Version(1, 1)
    _Updates([sub], version, 60.0, version, (), ()).run()
    assert timeouts == [2.0]


def publication_of_epoch_1():
    """A publication without ranks, whose epoch is in the directory."""
    pub = Publication.__new__(Publication)
    pub.name, pub.epoch, pub._signature, pub._publisher, pub._turns = "policy", 1, b"", "", Turns("policy")
    pub._ranks = Ranks("publish", [], LAYOUTS, None)
    pub._directory = VersionDirectory("policy")
    pub._directory.keep_epoch(1, "p")
    pub._cuts, pub._places, pub._nbytes = {}, {}, 0
    pub._used = pub._before = Version(1, 0)
    pub._last = pub._pushed = publication._Put(pub._used)
    return pub


def test_only_the_two_newest_versions_have_records(make_store, monkeypatch):
    store = make_store()
    pub, there = publication_of_epoch_1(), VersionDirectory("policy")

    def put(number):
        pub._forget_overwritten()
        pub._post(Version(1, number), {})

    def fail(*_, **__):
        raise RuntimeError("Deadline Exceeded")

    def numbers():
        return sorted(number for _, number in there.listed()[2])

    for number in (1, 2, 3):
        put(number)
    with monkeypatch.context() as patch, pytest.raises(VersionError):
        patch.setattr(store, "internal_kv_del", fail)
        put(4)
    put(4)
    assert numbers() == [3, 4]
    holds(there, Version(1, 1), "late")
    assert numbers() == [1, 3, 4]
    put(5)
    assert numbers() == [4, 5]


@pytest.mark.parametrize("line", range(8))
def test_a_push_beside_a_put_names_the_holders_of_its_own_version(make_store, monkeypatch, line):
    """`line`: that of `push` before which another thread puts."""
    make_store()
    pub, lines = publication_of_epoch_1(), count()
    pub._ranks.handles, pub._ranks.members = [None], [holder("trainer", is_publisher=True)]
    monkeypatch.setattr(publication, "update_all", lambda *_, resolved, held, **__: (resolved, held))

    def post(number):
        pub._post(Version(1, number), {0: Key(b"%d" % number)})

    def put_beside(frame, event, _):
        if frame.f_code is Publication.push.__code__:
            if event == "line" and next(lines) == line:
                post(2)
            return put_beside
        return None

    post(1)
    before = sys.gettrace()
    sys.settrace(put_beside)
    try:
        version, held = pub.push([])
    finally:
        sys.settrace(before)
    assert [each.key for each in held] == [b"%d" % version.number]


@pytest.mark.parametrize("step", range(2))  # before the version is posted, and after
def test_a_publisher_that_is_replaced_while_it_puts_hears_so_and_its_version_is_removed(make_store, step):
    store = make_store()
    pub = publication_of_epoch_1()
    version = pub.stream().version
    store.chosen, store.between = store.steps + step, lambda: VersionDirectory("policy").begin_epoch("later")
    with pytest.raises(PublisherReplacedError):
        pub._post(version, {})
    assert VersionDirectory("policy").latest() is None


def test_a_version_is_removed_and_those_with_longer_numbers_stay(make_store):
    make_store()
    there = VersionDirectory("policy")
    for number in (10**11, 10**12):
        there.post_version(Version(1, number), [])
    there.forget(Version(1, 10**11))
    assert there.latest() == Version(1, 10**12)


def test_a_receiver_that_has_moved_on_is_dropped_and_the_others_stay(make_store):
    make_store()
    there, version = VersionDirectory("policy"), Version(1, 1)
    there.post_version(version, [holder("publisher", is_publisher=True)])
    there.post_holders(version, [holder("a"), holder("b")])
    there.post_holders(version, [holder("c")])
    there.drop_holders(version, {Key(b"a"), Key(b"c"), Key(b"publisher")})
    assert [one.actor for one in there.holders(version)] == ["publisher", "b"]


def test_a_put_whose_record_may_be_there_is_not_put_again_under_its_number(make_store, monkeypatch):
    """Ray's store has taken the record, and its answer did not come."""
    store = make_store()
    pub = publication_of_epoch_1()
    put = store.internal_kv_put

    def put_and_lose(key, *args, **kwargs):
        put(key, *args, **kwargs)
        if b"/versions/" in key:
            raise RuntimeError("timed out")

    first = pub.stream().version
    with monkeypatch.context() as patched, pytest.raises(VersionError, match="timed out"):
        patched.setattr(store, "internal_kv_put", put_and_lose)
        pub._post(first, {})
    second = pub.stream().version
    pub._post(second, {})
    assert (first.number, second.number) == (1, 2)
    assert (first.count % 2, second.count % 2) == (1, 0)  # it is not copied over what the record is about


def bare_publication(monkeypatch, epochs):
    """A publication whose actors know these epochs, one after the other."""
    pub = Publication.__new__(Publication)
    pub.name, pub._publisher, pub._directory = "policy", "", VersionDirectory("policy")

    def attach(self, function, args, undo):
        if (epoch := epochs.pop(0)) > pub.epoch:
            raise PublisherReplacedError(name="policy", detail=f"epoch {epoch} has begun")

    pub._ranks = type("Known", (Ranks,), {"attach": attach})("publish", [], LAYOUTS, None)
    monkeypatch.setattr(ray_session, "worker_id", lambda: "p")
    return pub


def test_who_publishes_after_records_were_lost_begins_an_epoch_that_its_actors_do_not_know(make_store, monkeypatch):
    make_store()
    pub = bare_publication(monkeypatch, [3, 3, 3])
    assert [pub._begin() for _ in range(3)] == [False, False, True]
    assert pub.epoch == 3


def test_who_was_replaced_hears_so_whatever_its_actors_say(make_store, monkeypatch):
    make_store()
    pub, later = (bare_publication(monkeypatch, [0]) for _ in range(2))
    assert pub._begin()
    assert later._begin()
    pub._ranks.members = [SimpleNamespace(actor="A")]
    closed = VersionNotPutError(name="policy", detail="the publication was closed")
    job = Job(round=VersionRound(Version(1, 1), Phase.FAILED, frozenset()), errors={0: closed})
    with pytest.raises(PublisherReplacedError, match="epoch 2 has begun"):
        pub._check(job, 1.0)


def test_a_version_whose_layouts_are_lost_is_not_taken_for_one_that_fits(make_store):
    store = make_store()
    version = publish(store, "policy", "p")
    resolved = Subscription._find(
        SimpleNamespace(_directory=VersionDirectory("policy"), _check=lambda src: None), "latest"
    )
    assert resolved == version
    for key in [key for key in store.entries if b"/layouts/" in key]:
        del store.entries[key]
    with pytest.raises(UnknownVersionError):
        Subscription._find(SimpleNamespace(_directory=VersionDirectory("policy"), name="policy"), "latest")


@pytest.mark.parametrize("who", ["publisher", "publisher's actor", "receiver", "earlier publisher"])
def test_while_one_lives_all_stays(make_store, who):
    store = make_store()
    if who == "earlier publisher":
        VersionDirectory("name").begin_epoch(who)
    version = publish(store, "name", "publisher")
    if who == "earlier publisher":
        VersionDirectory("name")._put("epochs/00000001", who.encode(), overwrite=True)
    holds(VersionDirectory("name"), version, "receiver", VersionDirectory("name").post_layouts(COLUMNS, version.epoch))
    before = store.records("name")
    store.living = {who}
    sweep("new")
    assert store.records("name") == before
    assert is_served("name", version)


def test_a_sweep_looks_into_so_many_and_those_that_stay_hide_none(make_store, monkeypatch):
    monkeypatch.setattr(directory, "MOST_SWEPT", 2)
    store = make_store()
    names = [f"{when}{number}" for when in ("first", "last") for number in range(2)]
    served = {name: publish(store, name, "one") for name in names}
    for name, version in served.items():
        holds(VersionDirectory(name), version, "receiver", version.signature)
    for number in range(4):
        publish(store, f"in between{number}", "one")
    end(store, "one")
    store.living.add("receiver")
    left = []
    while not left or left[-1] > len(served):
        sweep("new")
        left.append(
            len([name for name in {key.split(b"/")[1].decode() for key in store.entries} if not is_swept(store, name)])
        )
        assert len(left) < 1000
    assert left[0] >= 8 - 2, "the first did not do it all"
    assert all(is_served(name, version) for name, version in served.items())


def steps_of(make_store, scene, work):
    """How many steps some work takes."""
    store = make_store()
    scene(store)
    store.steps = 0
    work()
    return store.steps


def scene(store):
    publish(store, "name", "one")
    VersionDirectory("name").post_layouts(COLUMNS, 1)
    end(store, "one")


def test_where_nothing_is_left_of_others_no_process_is_asked_for(make_store):
    assert steps_of(make_store, lambda store: None, lambda: sweep("new")) == 1
    assert steps_of(make_store, lambda store: publish(store, "new", "one"), lambda: sweep("new")) == 1


def test_a_new_publisher_in_the_midst_of_a_sweep_keeps_what_it_writes(make_store):
    for step in range(steps_of(make_store, scene, lambda: sweep("new"))):
        store = make_store()
        scene(store)
        versions = []
        store.between = lambda store=store, versions=versions: versions.append(publish(store, "name", "two"))
        store.steps, store.chosen = 0, step
        sweep("new")
        assert versions[0].epoch > 1, step
        assert is_served("name", versions[0]), step
        sweep("new")
        assert is_served("name", versions[0]), step
        end(store, "two")
        sweep("new")
        assert is_swept(store, "name"), step


def test_an_epoch_that_was_swept_while_another_took_it_is_not_taken_again(make_store):
    store = make_store()

    def comes_and_goes():
        publish(store, "name", "one")
        end(store, "one")
        sweep("new")

    for step in (0, 1):  # before what is asked for, and before what is written
        store = make_store()
        store.between, store.chosen = comes_and_goes, step
        assert VersionDirectory("name").begin_epoch("two") == 2, step


def test_a_latecomer_in_the_midst_of_a_sweep_is_served_while_its_holder_lives_and_serves_on(make_store):
    def before(store):
        version = publish(store, "name", "one")
        holds(VersionDirectory("name"), version, "receiver", version.signature)
        end(store, "one")
        store.living.add("receiver")

    for step in range(steps_of(make_store, before, lambda: sweep("new"))):
        store = make_store()
        before(store)
        version = Version(1, 1)

        def comes(store=store, version=version, step=step):
            assert is_served("name", version), step
            store.living.add("latecomer")
            holds(VersionDirectory("name"), version, "latecomer", VersionDirectory("name").latest().signature)
            store.living.discard("receiver")

        store.between = comes
        store.steps, store.chosen = 0, step
        sweep("new")
        sweep("new")
        assert is_served("name", version), step


def test_a_sweep_that_ends_anywhere_is_finished_by_another(make_store):
    class EndedError(Exception):
        pass

    def ends():
        raise EndedError

    for step in range(steps_of(make_store, scene, lambda: sweep("new"))):
        store = make_store()
        scene(store)
        store.between = ends
        store.steps, store.chosen = 0, step
        with pytest.raises(EndedError):
            sweep("new")
        store.chosen = -1
        sweep("new")
        assert is_swept(store, "name"), step


def test_layouts_of_receivers_go_over_to_the_next_epoch(make_store):
    store = make_store()
    waiting = VersionDirectory("name")
    signature = waiting.post_layouts(COLUMNS, waiting.epoch())  # before anything is published
    waiting.post_layouts({"v": COLUMNS["w"]}, waiting.epoch())
    sweep("another")
    for worker in ("one", "two"):
        version = publish(store, "name", worker)
        assert {signature, version.signature} < {signature for _, signature in VersionDirectory("name").listed()[1]}
        assert VersionDirectory("name").layouts(signature, version.epoch) == COLUMNS
    assert not [record for record in store.records("name") if "/00000001" in record or "/00000000" in record]
