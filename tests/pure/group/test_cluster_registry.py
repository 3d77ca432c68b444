"""What a cluster is told about groups, how it is read, and how `raycollect status` shows it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from ray.exceptions import RpcError

from raycollect.cli.commands import main
from raycollect.errors import UnknownGroupError
from raycollect.group import cluster_registry
from raycollect.group.cluster_registry import GroupRecord, MemberRecord
from raycollect.ray_bridge.ray_cluster import ClusterTables, KeyValueStore
from tests.support.values import replace


def _run(*args: str) -> Result:
    result = CliRunner().invoke(main, list(args))
    assert result.exception is None or isinstance(result.exception, SystemExit), "a traceback"
    return result


def _group(name: str = "g", **changes: Any) -> GroupRecord:
    members = tuple(
        MemberRecord(rank=rank, actor=f"Worker({rank})", actor_id=f"{rank}" * 32, node_id="n" * 56, pid=100 + rank)
        for rank in range(3)
    )
    one = GroupRecord(
        name=name,
        group_id=name * 8,
        backend="shm",
        epoch=0,
        job_id="01000000",
        actor_id="",
        host="10.0.0.1",
        pid=7,
        since=1.0,
        members=members,
    )
    return replace(one, **changes)


_CLUSTER = cluster_registry.ClusterReader  # a test puts something else in its place


class _Store:
    """Ray's key-value store and tables, as far as a reader asks them."""

    def __init__(self, *groups: GroupRecord) -> None:
        self.records = {b"posted/" + one.group_id.encode(): one.to_bytes() for one in groups}
        self.ended: set[str] = set()
        self.actors = {f"{rank}" * 32: {"State": "ALIVE", "Pid": 100 + rank, "NumRestarts": 0} for rank in range(3)}

    def internal_kv_keys(self, prefix: bytes, namespace: bytes, timeout: float) -> list[bytes]:
        return [key for key in self.records if key.startswith(prefix)]

    def internal_kv_get(self, key: bytes, namespace: bytes, timeout: float) -> bytes | None:
        return self.records.get(key)

    def internal_kv_del(self, key: bytes, by_prefix: bool, namespace: bytes, timeout: float) -> int:
        assert not by_prefix
        del self.records[key]
        return 1

    def job_table(self) -> list[dict[str, Any]]:
        return [{"JobID": job, "IsDead": job in self.ended} for job in ("01000000", "02000000")]

    def actor_table(self, actor_id: str) -> dict[str, Any]:
        return self.actors.get(actor_id, {})

    def cluster(self) -> cluster_registry.ClusterReader:
        made = object.__new__(_CLUSTER)
        made.address, made._store, made._tables = "10.0.0.1:6379", KeyValueStore(self), ClusterTables(self)  # type: ignore[assignment]
        return made


def test_a_record_that_is_none_or_too_long_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever can write to the store can post: what is read is bounded."""
    record = _group(since=1.5).to_bytes()
    assert GroupRecord.from_bytes(record) == _group(since=1.5)
    for broken in (
        record[:-1],
        b"\x91" * 10_000,
    ):
        assert GroupRecord.from_bytes(broken) is None
    monkeypatch.setattr(cluster_registry, "MOST_RECORD_NBYTES", len(record) - 1)
    assert GroupRecord.from_bytes(record) is None


@pytest.mark.parametrize(
    ("state", "says"),
    [("ALIVE", "all members alive"), ("RESTARTING", "rank 1 not alive"), ("DEAD", "broken: rank 1 gone")],
)
def test_a_group_is_as_well_as_its_members(state: str, says: str) -> None:
    store = _Store(_group())
    store.actors["1" * 32]["State"] = state
    [found] = store.cluster().groups("g")
    assert cluster_registry.summary(found.members) == says


def test_records_of_processes_that_are_gone_are_removed() -> None:
    ended = _group("ended", job_id="02000000")
    driver = _group("driven", actor_id="3" * 32, pid=50)
    again = _group("again", actor_id="0" * 32, pid=99)
    alive = _group("alive", actor_id="0" * 32, pid=100)
    store = _Store(ended, driver, again, alive)
    store.ended = {"02000000"}
    assert [one.name for one in store.cluster().groups()] == ["alive"]
    assert list(store.records) == [b"posted/" + alive.group_id.encode()]


def test_a_strange_record_is_left_alone() -> None:
    store = _Store()
    store.records[b"posted/x"] = b"from another version"
    assert store.cluster().groups() == ()
    assert store.records


def test_undeclared_group_raises_unknown_group_error() -> None:
    with pytest.raises(UnknownGroupError, match=r"there are \['g'\]"):
        _Store(_group()).cluster().groups("h")


def test_a_store_that_does_not_answer_is_a_connection_error(monkeypatch: pytest.MonkeyPatch) -> None:
    store = _Store(_group())

    def fail() -> list[dict[str, Any]]:
        raise RpcError("unavailable")

    monkeypatch.setattr(store, "job_table", fail)
    with pytest.raises(ConnectionError, match=r"10.0.0.1:6379 does not answer: unavailable"):
        store.cluster().groups()


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> _Store:
    """What `raycollect status` finds."""
    store = _Store(_group(epoch=2), replace(_group("h"), members=()))
    monkeypatch.setattr(cluster_registry, "find_cluster", lambda address: address or "auto")
    monkeypatch.setattr(cluster_registry, "ClusterReader", lambda address: store.cluster())
    return store


def test_status_is_watched_until_it_is_stopped(shown: _Store, monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("raycollect.cli.commands.time", SimpleNamespace(sleep=sleep, time=lambda: 60.0))
    result = _run("status", "--watch", "2", "--json")
    assert (result.exit_code, waited) == (130, [2.0, 2.0, 2.0])
    assert [len(json.loads(line)) for line in result.stdout.splitlines()] == [2, 2, 2]


def test_dead_address_raises_connection_error_at_once() -> None:
    with pytest.raises(ConnectionError, match=r"no Ray cluster answers at 127\.0\.0\.1:1"):
        cluster_registry.ClusterReader("127.0.0.1:1")
    with pytest.raises(ConnectionError, match="no Ray cluster answers at nonsense"):
        cluster_registry.ClusterReader("nonsense")


def test_nothing_is_posted_where_no_ray_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.experimental.internal_kv.internal_kv_get_gcs_client", lambda: None)
    membership: Any = SimpleNamespace(is_derived=False)  # nothing else of it is looked at
    cluster_registry.post(membership)
    cluster_registry.remove(membership)


def test_unavailable_store_does_not_block_destroy(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def delete(*args: object, timeout: float) -> None:
        asked.append((args, timeout))
        raise RpcError("unavailable")

    store = SimpleNamespace(internal_kv_del=delete)
    monkeypatch.setattr("ray.experimental.internal_kv.internal_kv_get_gcs_client", lambda: store)
    for group_id in ("77", "78"):
        membership: Any = SimpleNamespace(is_derived=False, spec=SimpleNamespace(name="g", group_id=group_id))
        cluster_registry.remove(membership)
        cluster_registry._posting.submit(int).result()  # after what was to be removed
        key = b"posted/" + group_id.encode()
        assert asked.pop() == ((key, False, b"raycollect"), cluster_registry.POST_TIMEOUT_S)
