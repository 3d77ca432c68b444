"""How ranks of `nccl` come together, on the fake of cupy, and why they can't."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from raycollect import backends
from raycollect.backends import experimental
from raycollect.backends.experimental import ExperimentalWarning
from raycollect.backends.nccl import communicator as nccl
from raycollect.backends.nccl import group as _nccl_group
from raycollect.backends.nccl.group import SHARING
from raycollect.core.model import GroupSpec, Kernel, Launch, OpKind, ReduceOp
from raycollect.core.protocols import Communicator, Joining
from raycollect.engine.device_staging import transfer
from raycollect.errors import (
    BackendUnavailableError,
    CollectiveTimeoutError,
    InvalidGroupError,
    UnsupportedError,
)
from tests.fake_cupy import Fake, installed
from tests.pure.backends.streams import WAIT_S, stream_of, sums
from tests.pure.communicators import MemoryExchange, MemoryRendezvous, MemoryStar
from tests.pure.conformance import run_launch
from tests.pure.on_gpu import Caller, GpuTeam, gpus, pending, read_elsewhere
from tests.pure.thread_faults import helper_threads
from tests.support.values import replace
from tests.support.waiting import wait_until


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(SHARING, raising=False)
    yield
    os.environ.pop(SHARING, None)  # what the backend may have set


def spec_of(world_size: int, **options: Any) -> GroupSpec:
    spec = GroupSpec(name="team", group_id="1", backend="nccl", world_size=world_size)
    return replace(spec, options=tuple(sorted(options.items())))


def create(rank: int, world_size: int, rendezvous: MemoryRendezvous | None = None, **options: Any) -> Communicator:
    exchange = MemoryExchange(MemoryStar(), rank)
    return nccl.create(Joining(spec_of(world_size, **options), rank, rendezvous or MemoryRendezvous(), exchange))


def body_sum(communicator: Communicator, launch: Launch) -> list[int]:
    src = pending(np.full(3, communicator.rank + 1))
    run_launch(communicator, launch, sums(src))
    return read_elsewhere(src, Caller().other).tolist()


# ------------------------------------------------------------------------------- which device


@pytest.mark.parametrize("current", range(3))
def test_a_rank_works_on_the_current_device_of_the_thread_that_joins(current: int) -> None:
    with gpus(3) as fake, fake.cupy.cuda.Device(current):
        communicator = create(0, 1)
        assert stream_of(communicator).device_id == current
        assert fake.contexts == {current}
        communicator.close()


def test_the_option_names_another_device() -> None:
    with gpus(3) as fake:
        communicator = create(0, 1, device=2)
        assert fake.cupy.cuda.runtime.getDevice() == 0
        assert stream_of(communicator).device_id == 2
        assert getattr(communicator, "device", "") == "cuda:2"
        with fake.cupy.cuda.Device(2):
            src = pending(np.ones(3))
        run_launch(communicator, Launch(seq=1, ranks=(0,), timeout_s=WAIT_S), sums(src))  # 0 is the current one here
        communicator.close()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"device": 3}, "there is no device 3 here; this process sees 3"),
        ({"device": -1}, "there is no device -1"),
        ({"device": "0"}, "there is no device '0'"),
        ({"device": True}, "there is no device True"),
        ({"device": 0, "high_priority": True}, "takes the option 'device', and got high_priority"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], reason: str) -> None:
    with gpus(3), pytest.raises(InvalidGroupError, match=reason) as caught:
        create(0, 1, **options)
    assert caught.value.group_name == "team"


def test_no_gpu() -> None:
    with installed(0):
        with pytest.raises(BackendUnavailableError, match="no GPU here: cudaErrorNoDevice"):
            create(0, 1)
        assert not backends.is_available("nccl")


def test_the_first_use_of_a_gpu_in_a_process_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experimental, "_has_warned", False)
    with gpus(1):
        with pytest.warns(ExperimentalWarning, match="never on its hardware") as caught:
            backends.load("nccl")
        (warning,) = caught
        assert isinstance(warning.message, ExperimentalWarning)
        assert warning.message.feature == "backend 'nccl'"
        assert str(pickle.loads(pickle.dumps(warning.message))) == str(warning.message)
        backends.load("nccl")
        transfer(pending(np.ones(3)), np.zeros(3), lambda: None)


# ------------------------------------------------------------------------------- who is with whom


@pytest.mark.parametrize(("devices", "shared"), [(2, "[0, 2]"), (1, "[0, 1, 2]")])
def test_ranks_that_share_a_gpu_are_refused_before_2_30(devices: int, shared: str) -> None:
    with gpus(devices, nccl_version=22907) as fake:
        with pytest.raises(BackendUnavailableError) as caught:
            GpuTeam(3)
        assert not fake.counts["nccl.communicators"]
    said = str(caught.value)
    assert f"ranks {shared} share the GPU 127.0.0.1/0000:10:00.0" in said
    assert "needs NCCL 2.30, and this is 22907" in said
    assert "Give each member a GPU of its own, or use 'shm' or 'tcp'" in said
    assert SHARING not in os.environ


@pytest.mark.parametrize(("devices", "world"), [(2, 3), (1, 2)])
def test_ranks_share_a_gpu_from_2_30_on(devices: int, world: int) -> None:
    with gpus(devices, nccl_version=23000):
        team = GpuTeam(world)
        assert os.environ[SHARING] == "1"
        assert team.must(body_sum, team.launch()) == [[sum(range(world + 1))] * 3] * world
        team.close()


@pytest.mark.parametrize(("devices", "world", "shared"), [(2, 5, "0, 2, 4"), (1, 3, "0, 1, 2")])
def test_more_than_two_ranks_on_a_gpu_are_refused(devices: int, world: int, shared: str) -> None:
    """NCCL's documentation says that they hang."""
    with gpus(devices, nccl_version=23000) as fake:
        with pytest.raises(BackendUnavailableError, match=rf"ranks \[{shared}\] share the GPU .* 2 ranks on a GPU"):
            GpuTeam(world)
        assert not fake.counts["nccl.communicators"]


@pytest.mark.parametrize("theirs", [22802, 22703])
def test_members_with_different_releases_are_refused(theirs: int) -> None:
    """NCCL compares the last digit as well."""
    with gpus(1) as fake:
        rendezvous = MemoryRendezvous()
        place = _nccl_group._RankGpu(gpu="10.0.0.2/0000:10:00.0", version=theirs, may_share=True, capability=90)
        rendezvous.put("nccl.place.1", _nccl_group._RANK_GPUS.encode(place))
        reason = f"different releases of NCCL: rank 0 has 22803, rank 1 has {theirs}"
        with pytest.raises(BackendUnavailableError, match=reason):
            create(0, 2, rendezvous)
        assert not fake.counts["nccl.communicators"]


# ------------------------------------------------------------------------------- who does not come


@pytest.mark.parametrize("seed", range(3))
def test_a_member_that_is_gone_before_ncclcomminitrank(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """The library waits on; the rank does not. What comes of it when the other one does is let go of."""
    monkeypatch.setattr(nccl, "JOIN_TIMEOUT_S", 0.1)
    before = helper_threads()
    with gpus(2, seed=seed) as fake:
        rendezvous = MemoryRendezvous()
        place = _nccl_group._RankGpu(gpu="127.0.0.1/0000:11:00.0", version=22803, may_share=True, capability=90)
        rendezvous.put("nccl.place.1", _nccl_group._RANK_GPUS.encode(place))
        with pytest.raises(CollectiveTimeoutError, match="did not connect all 2 ranks within 0") as caught:
            create(0, 2, rendezvous)
        assert "NCCL_DEBUG=INFO" in str(caught.value)
        assert "team" in str(caught.value)
        assert len(helper_threads(before)) == 1
        unique = rendezvous.get("nccl.id", 1)
        with fake.cupy.cuda.Device(1):
            late = fake.cupy.cuda.nccl.NcclCommunicator(2, unique, 1)
        for thread in helper_threads(before):
            thread.join(WAIT_S)
        assert fake.counts["nccl.abort"] == 1
        late.abort()


@pytest.mark.parametrize(
    ("status", "reason"), [(3, "INTERNAL_ERROR"), (6, "REMOTE_ERROR"), (8, "NCCL status 8: an operation exceeded")]
)
def test_what_nccl_says_when_it_can_not_join(monkeypatch: pytest.MonkeyPatch, status: int, reason: str) -> None:
    before = helper_threads()
    with gpus(1) as fake:
        module = fake.cupy.cuda.nccl

        def fail(*_: Any) -> Any:
            raise module.NcclError(status)

        monkeypatch.setattr(module, "NcclCommunicator", fail)
        with pytest.raises(BackendUnavailableError, match="backend 'nccl': rank 0 can't join") as caught:
            create(0, 1)
    assert reason in str(caught.value)
    assert "NCCL_DEBUG=INFO" in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError | KeyError)
    assert wait_until(lambda: not helper_threads(before))


# ------------------------------------------------------------------------------- what is refused before the check


def stage(communicator: Communicator, **kernel: Any) -> Kernel:
    built = Kernel(**{"kind": OpKind.ALLREDUCE, "op": ReduceOp.SUM, **kernel})
    communicator.agree(Launch(seq=1, ranks=(0,), timeout_s=1.0), b"", built)
    return built


@pytest.fixture
def pair() -> Iterator[tuple[Fake, Communicator]]:
    """A group of one on the second of two GPUs."""
    with gpus(2) as fake:
        communicator = create(0, 1, device=1)
        yield fake, communicator
        communicator.close()


def on(fake: Fake, device: int, dtype: str = "float32") -> Any:
    with fake.cupy.cuda.Device(device):
        return pending(np.ones(4).astype(dtype))


def test_arrays_of_other_memory_are_refused(pair: tuple[Fake, Communicator]) -> None:
    fake, communicator = pair
    here, there, host = on(fake, 1), on(fake, 0), np.ones(4, np.float32)
    assert stage(communicator, src=here, dst=here)
    for src, dst, actual in [
        (there, there, "cuda:0"),
        (here, there, "cuda:0"),
        (host, here, "cpu"),
        (here, host, "cpu"),
    ]:
        with pytest.raises(UnsupportedError, match=f"device is {actual}, expected cuda:1"):
            stage(communicator, src=src, dst=dst)
    for pieces in [(here, there), (host, here)]:
        with pytest.raises(UnsupportedError, match="device is"):
            stage(communicator, kind=OpKind.ALLGATHER, op=None, src=here, dst=pieces)
    with pytest.raises(UnsupportedError, match="rank 0: device is cpu"):
        communicator.launch(Launch(seq=2, ranks=(0,), timeout_s=1.0), (sums(host),))
    run_launch(communicator, Launch(seq=3, ranks=(0,), timeout_s=WAIT_S), sums(here))  # nothing is broken


@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        ("float8_e4m3fnuz", ReduceOp.SUM),
        ("float8_e5m2", ReduceOp.BXOR),
        ("bfloat16", ReduceOp.BOR),
        ("float32", ReduceOp.BAND),
        ("complex64", ReduceOp.MAX),
        ("int16", ReduceOp.AVG),
    ],
)
def test_reductions_that_nobody_has_are_refused(pair: tuple[Fake, Communicator], dtype: str, op: ReduceOp) -> None:
    fake, communicator = pair
    array = on(fake, 1, dtype)
    with pytest.raises(UnsupportedError, match=f"reduce op is {op.name} of {dtype}"):
        stage(communicator, src=array, dst=array, op=op)
    assert stage(communicator, kind=OpKind.BROADCAST, op=None, peer=0, src=array)


@pytest.mark.parametrize(("version", "dtype"), [(20906, "bfloat16"), (22304, "float8_e5m2"), (22304, "float8_e4m3fn")])
def test_what_an_older_nccl_can_not_reduce_is_refused_and_moved(version: int, dtype: str) -> None:
    with gpus(1, nccl_version=version) as fake:
        communicator, array = create(0, 1), on(fake, 0, dtype)
        with pytest.raises(UnsupportedError, match=f"SUM of {dtype}, expected one that NCCL {version}"):
            stage(communicator, src=array, dst=array)
        launch = Launch(seq=1, ranks=(0,), timeout_s=WAIT_S)
        run_launch(communicator, launch, Kernel(kind=OpKind.BROADCAST, peer=0, src=array))
        communicator.close()


@pytest.mark.parametrize(("capability", "is_reduced"), [(89, False), (90, True), (100, True)])
def test_old_gpus_do_not_reduce_floats_of_8_bits(
    monkeypatch: pytest.MonkeyPatch, capability: int, is_reduced: bool
) -> None:
    with gpus(1) as fake:
        parts = {75: capability // 10, 76: capability % 10}
        monkeypatch.setattr(fake.cupy.cuda.runtime, "deviceGetAttribute", lambda number, device: parts[number])
        communicator, array = create(0, 1), on(fake, 0, "float8_e5m2")
        if is_reduced:
            stage(communicator, src=array, dst=array)
        else:
            with pytest.raises(UnsupportedError, match="on sm_89"):
                stage(communicator, src=array, dst=array)
        communicator.close()


# ------------------------------------------------------------------------------- who leaves


def test_closing_twice_and_threads_that_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "GUARD_S", 0.01)
    with gpus(2) as fake:
        team = GpuTeam(2)
        for _ in range(2):
            for communicator in team.communicators:
                communicator.close()
        assert (fake.counts["nccl.destroy"], fake.counts["nccl.abort"]) == (2, 0)
        assert wait_until(lambda: nccl._guard.timer is None)
        team = GpuTeam(2)
        assert team.must(body_sum, team.launch()) == [[3, 3, 3]] * 2
        assert wait_until(lambda: nccl._guard.timer is not None)
        team.close()
