"""What is torch.distributed's own: options, plugins, other groups of the process, aborts in mid-kernel, devices."""

from __future__ import annotations

import copy
import importlib.util
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raycollect import backends
from raycollect.core.model import GroupSpec, Kernel, Launch, OpKind, ReduceOp
from raycollect.core.protocols import Communicator
from raycollect.errors import (
    BackendNotInstalledError,
    CollectiveTimeoutError,
    GroupBrokenError,
    InternalError,
    InvalidGroupError,
    PlanAbortedError,
    UnsupportedError,
)
from tests.pure.backends.test_conformance import body_arrive
from tests.pure.communicators import MemoryExchange, MemoryRendezvous, MemoryStar, ProcessTeam, ThreadTeam, Worker
from tests.pure.conformance import check_allreduce, run_launch

if importlib.util.find_spec("torch") is None or not backends.is_available("torch:gloo"):
    pytest.skip("no torch with gloo is installed", allow_module_level=True)

import torch
from torch import distributed
from torch.distributed import distributed_c10d as c10d

from raycollect.backends.arrays import DeviceArray
from raycollect.backends.meshed import MESH_UP_TO_NBYTES
from raycollect.backends.tcp import communicator as tcp
from raycollect.backends.torch_dist import communicator as torch_dist
from raycollect.backends.torch_dist import run as _torch_run
from raycollect.backends.torch_dist.calls import Calls


class OptionsTeam(ThreadTeam):
    """A team on any torch backend, with options."""

    def __init__(self, backend: str, world_size: int, **options: Any) -> None:
        self.options = options
        super().__init__(backend, world_size)

    def _create(self, rank: int) -> Communicator:
        spec = GroupSpec(
            name="team",
            group_id=self.spec.group_id,
            backend=self.backend,
            world_size=self.world_size,
            options=tuple(self.options.items()),
        )
        return torch_dist.create(spec, rank, self.rendezvous, MemoryExchange(self.server, rank))


@pytest.fixture
def teams() -> Iterator[Callable[..., OptionsTeam]]:
    """Makes teams, and ends them."""
    made: list[OptionsTeam] = []

    def make(backend: str = "torch:gloo", world_size: int = 2, **options: Any) -> OptionsTeam:
        made.append(OptionsTeam(backend, world_size, **options))
        return made[-1]

    yield make
    for team in made:
        team.close()


def body_sum(communicator: Communicator, launch: Launch, value: int) -> int:
    array = np.full(3, value, np.int64)
    run_launch(communicator, launch, Kernel(kind=OpKind.ALLREDUCE, src=array, dst=array, op=ReduceOp.SUM))
    return int(array[0])


def alone(backend: str, **options: Any) -> Communicator:
    """A group of one."""
    spec = GroupSpec(name="g", group_id="1", backend=backend, world_size=1, options=tuple(options.items()))
    return torch_dist.create(spec, 0, MemoryRendezvous(), MemoryExchange(MemoryStar(), 0))


# ------------------------------------------------------------------------------- groups


def test_groups_of_one_process_are_apart(teams: Callable[..., OptionsTeam]) -> None:
    first, second = teams(), teams(world_size=3)
    assert first.must(body_sum, first.launch(), 1) == [2, 2]
    assert second.must(body_sum, second.launch(), 1) == [3, 3, 3]
    first.close()
    assert second.must(body_sum, second.launch(), 5) == [15, 15, 15]


def test_the_default_group_of_the_process_is_the_users(teams: Callable[..., OptionsTeam]) -> None:
    team = teams()
    assert not distributed.is_initialized()
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        assert team.must(body_sum, team.launch(), 1) == [2, 2]
        other = teams()
        assert other.must(body_sum, other.launch(), 1) == [2, 2]
        assert distributed.get_world_size() == 1
    finally:
        distributed.destroy_process_group()
    assert team.must(body_sum, team.launch(), 1) == [2, 2]


def listening() -> set[str]:
    """The IPv4 addresses, as the kernel writes them, on which this process listens; "any" for IPv6's sockets."""
    inodes = {
        str(link.readlink())[8:-1]
        for link in Path("/proc/self/fd").iterdir()
        if link.is_symlink() and str(link.readlink()).startswith("socket:")
    }
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1].split(":")[0])
    return found


def test_it_listens_on_the_given_address_only() -> None:
    before = listening()
    spec = GroupSpec(name="g", group_id="1", backend="torch:gloo", world_size=1)
    communicator = torch_dist.create(spec, 0, MemoryRendezvous(), MemoryExchange(MemoryStar(), 0), host="127.0.0.3")
    assert listening() - before == {"0300007F"}
    communicator.close()


def test_a_member_that_never_comes_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "JOIN_TIMEOUT_S", 0.2)
    spec = GroupSpec(name="g", group_id="1", backend="torch:gloo", world_size=2)
    with pytest.raises(CollectiveTimeoutError, match=r"ranks \[1\] did not come"):
        torch_dist.create(spec, 0, MemoryRendezvous(), MemoryExchange(MemoryStar(), 0))


@pytest.mark.parametrize(("backend", "cure"), [("torch:mpi", "MPI"), ("torch:sccl", "torch_tpu"), ("torch:x", "'x'")])
def test_an_absent_backend_says_what_to_install(backend: str, cure: str) -> None:
    with pytest.raises(BackendNotInstalledError, match=cure) as caught:
        alone(backend)
    assert backend.removeprefix("torch:") in str(caught.value)


# ------------------------------------------------------------------------------- options and plugins


def test_options_reach_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class Recorded(c10d.ProcessGroupGloo):
        def __init__(self, *args: Any) -> None:
            seen.append(args[3])
            super().__init__(*args)

    monkeypatch.setattr(c10d, "ProcessGroupGloo", Recorded)
    alone("torch:gloo", threads=3, timeout=7.5).close()
    assert (seen[0]._threads, seen[0]._timeout.total_seconds()) == (3, 7.5)


@pytest.mark.parametrize(("options", "said"), [({"chip_map": [1]}, "no option 'chip_map'"), ({"threads": "x"}, "'x'")])
def test_options_that_do_not_fit_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidGroupError, match=said):
        alone("torch:gloo", **options)


def gloo_of(store: Any, rank: int, world_size: int) -> Any:
    options = c10d.ProcessGroupGloo._Options()
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return c10d.ProcessGroupGloo(store, rank, world_size, options)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Registers backends with torch, for one test."""
    monkeypatch.setattr(distributed.Backend, "_plugins", dict(distributed.Backend._plugins))
    for name in ("backend_list", "default_device_backend_map", "backend_capability", "backend_type_map"):
        table = getattr(distributed.Backend, name, None)
        if table is not None:
            monkeypatch.setattr(distributed.Backend, name, copy.copy(table))

    def register(name: str, creator: Callable[..., Any], *, extended_api: bool) -> None:
        monkeypatch.setattr(distributed.Backend, name.upper(), name, raising=False)  # so that it is undone
        delattr(distributed.Backend, name.upper())
        distributed.Backend.register_backend(name, creator, extended_api=extended_api, devices=["cpu"])

    return register


def test_a_plugin_gets_its_options_as_keywords(plugin: Callable[..., None], teams: Callable[..., OptionsTeam]) -> None:
    seen = []

    def create(store: Any, rank: int, world_size: int, timeout: Any, chip_map: tuple[int, ...] = ()) -> Any:
        seen.append((rank, chip_map))
        return gloo_of(store, rank, world_size)

    plugin("plain", create, extended_api=False)
    team = teams("torch:plain", chip_map=(4, 5))
    assert sorted(seen) == [(0, (4, 5)), (1, (4, 5))]
    assert team.must(body_sum, team.launch(), 1) == [2, 2]
    assert team.run(body_moves, team.launch(), team.launch()) == [True, True]
    with pytest.raises(InvalidGroupError, match="does not take chips"):
        alone("torch:plain", chips=1)


def test_a_plugin_of_the_extended_form_gets_an_object(
    plugin: Callable[..., None], teams: Callable[..., OptionsTeam]
) -> None:
    seen = []

    def create(group: Any, options: Any) -> Any:
        seen.append(
            (group.group_rank, group.group_size, group.global_ranks_in_group, getattr(options, "chip_map", None))
        )
        return gloo_of(group.store, group.group_rank, group.group_size)

    plugin("extended", create, extended_api=True)
    team = teams("torch:extended", chip_map=(4, 5))
    assert sorted(seen) == [(0, 2, [0, 1], (4, 5)), (1, 2, [0, 1], (4, 5))]
    assert team.must(body_sum, team.launch(), 1) == [2, 2]
    alone("torch:extended").close()
    assert seen[-1] == (0, 1, [0], None)


def test_an_operation_that_the_library_lacks_is_refused_and_the_group_works_on(
    plugin: Callable[..., None], teams: Callable[..., OptionsTeam]
) -> None:
    class NoAllToAll:
        """A backend that says of one operation what torch's base class says."""

        def __init__(self, backend: Any) -> None:
            self._backend = backend

        def __getattr__(self, name: str) -> Any:
            return getattr(self._backend, name)

        def alltoall_base(self, *args: Any) -> None:
            raise RuntimeError("Backend lacking does not support alltoall_base")

    plugin("lacking", lambda store, rank, size, timeout: NoAllToAll(gloo_of(store, rank, size)), extended_api=False)
    team = teams("torch:lacking")
    for refused in team.run(body_alltoall, team.launch()):
        assert isinstance(refused, UnsupportedError)
        assert (refused.op, refused.group_name) == ("alltoall", "team")
        assert "'torch:lacking'" in str(refused)
    assert team.must(body_sum, team.launch(), 1) == [2, 2]


def body_alltoall(communicator: Communicator, launch: Launch) -> None:
    sides = [tuple(on_device(np.ones(2), gaps=False) for _ in launch.ranks) for _ in range(2)]
    run_launch(communicator, launch, Kernel(kind=OpKind.ALLTOALL, src=sides[0], dst=sides[1], most=2))


def body_moves(communicator: Communicator, pair: Launch, everyone: Launch) -> bool:
    """A send from 0 to 1 and a gather of uneven pieces back."""
    rank, out = communicator.rank, np.zeros(5, np.int16)
    kernel = Kernel(kind=OpKind.RECV, dst=out, peer=0)
    run_launch(
        communicator, pair, kernel if rank else Kernel(kind=OpKind.SEND, src=np.arange(5, dtype=np.int16), peer=1)
    )
    dst = (np.zeros(0, np.int16), np.zeros(5, np.int16))
    given = out if rank else out[:0]
    run_launch(communicator, everyone, Kernel(kind=OpKind.GATHER, src=given, dst=None if rank else dst, peer=0, most=5))
    return list(out if rank else dst[1]) == [0, 1, 2, 3, 4]


# ------------------------------------------------------------------------------- reductions


def body_nan(communicator: Communicator, launch: Launch, op: ReduceOp, holder: int) -> np.ndarray:
    array = np.arange(10_000).astype(np.float32)
    if communicator.rank == holder:
        array[::2] = np.nan
    run_launch(communicator, launch, Kernel(kind=OpKind.ALLREDUCE, src=array, dst=array, op=op))
    return array


@pytest.mark.parametrize("op", [ReduceOp.MAX, ReduceOp.MIN])
def test_a_nan_stays_wherever_it_is(teams: Callable[..., OptionsTeam], op: ReduceOp) -> None:
    expected = np.arange(10_000).astype(np.float32)
    expected[::2] = np.nan
    team = teams(world_size=3)
    for holder in team.everyone:
        for result in team.must(body_nan, team.launch(), op, holder):
            np.testing.assert_array_equal(result, expected)


def test_pieces_larger_than_agreed_are_our_bug_and_no_hang() -> None:
    communicator = alone("torch:gloo")
    launch = Launch(seq=1, ranks=(0,), timeout_s=5)
    side = (on_device(np.ones(3), gaps=False),)
    with pytest.raises(InternalError, match="more than the 2 elements"):
        communicator.launch(launch, Kernel(kind=OpKind.ALLTOALL, src=side, dst=side, most=2))
    communicator.close()


# ------------------------------------------------------------------------------- devices


def on_device(array: np.ndarray, *, gaps: bool) -> DeviceArray:
    """Wraps CPU memory as if it were a device's, so that the library does all."""
    values = torch.from_numpy(array.copy())
    return DeviceArray(torch.stack([values, values], -1)[..., 0] if gaps else values)


def body_device(communicator: Communicator, launch: Launch, kind: OpKind, gaps: bool) -> list[list[float]]:
    """Runs a kernel of uneven pieces over tensors that only the library reads; gives what was written."""
    rank, world = communicator.rank, communicator.world_size
    sizes = [2 * of + 1 for of in range(world)]

    def tensor(size: int, value: float) -> DeviceArray:
        return on_device(np.full(size, value, np.float32), gaps=gaps)

    own, out = tensor(sizes[rank], rank + 1.0), tensor(sizes[rank], -1.0)
    whole, whole_out = tensor(5, rank + 1.0), tensor(5, -1.0)
    pieces = tuple(tensor(size, 10.0 * rank + of) for of, size in enumerate(sizes))
    outs = tuple(tensor(size, -1.0) for size in sizes)
    equal = tuple(tensor(sizes[rank] + sizes[of], 10.0 * rank + of) for of in range(world))
    equal_outs = tuple(tensor(sizes[rank] + sizes[of], -1.0) for of in range(world))
    is_root = rank == 1
    src, dst = {
        OpKind.ALLREDUCE: (whole, whole_out),
        OpKind.REDUCE: (whole, whole_out if is_root else None),
        OpKind.BROADCAST: (whole if is_root else None, whole_out),
        OpKind.ALLGATHER: (own, outs),
        OpKind.GATHER: (own, outs if is_root else None),
        OpKind.SCATTER: (pieces if is_root else None, out),
        OpKind.REDUCESCATTER: (pieces, out),
        OpKind.ALLTOALL: (equal, equal_outs),
    }[kind]
    op = ReduceOp.AVG if kind is OpKind.ALLREDUCE else ReduceOp.SUM
    run_launch(communicator, launch, Kernel(kind=kind, src=src, dst=dst, op=op, peer=1, most=2 * sizes[-1]))
    assert whole.tensor.tolist() == [rank + 1.0] * 5
    written = () if dst is None else dst if isinstance(dst, tuple) else (dst,)
    return [array.tensor.tolist() for array in written]


EXPECTED: dict[OpKind, Callable[[int], list[list[float]]]] = {
    OpKind.ALLREDUCE: lambda rank: [[2.0] * 5],
    OpKind.REDUCE: lambda rank: [[6.0] * 5] if rank == 1 else [],
    OpKind.BROADCAST: lambda rank: [[2.0] * 5],
    OpKind.ALLGATHER: lambda rank: [[1.0], [2.0] * 3, [3.0] * 5],
    OpKind.GATHER: lambda rank: [[1.0], [2.0] * 3, [3.0] * 5] if rank == 1 else [],
    OpKind.SCATTER: lambda rank: [[10.0 + rank] * (2 * rank + 1)],
    OpKind.REDUCESCATTER: lambda rank: [[30.0 + 3 * rank] * (2 * rank + 1)],
    OpKind.ALLTOALL: lambda rank: [[10.0 * of + rank] * (2 * rank + 2 * of + 2) for of in range(3)],
}


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("kind", EXPECTED)
def test_tensors_of_a_device_are_left_to_the_library(
    teams: Callable[..., OptionsTeam], kind: OpKind, gaps: bool
) -> None:
    team = teams(world_size=3)
    results = team.must(body_device, team.launch(), kind, gaps)
    assert results == [EXPECTED[kind](rank) for rank in team.everyone]


# ------------------------------------------------------------------------------- failures


def started(communicator: Communicator, launch: Launch, kernel: Kernel) -> None:
    communicator.launch(launch, kernel)


def wait_for_kernel(team: OptionsTeam, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Gives a function that returns when a rank waits in the library."""
    looks: list[float] = []
    look = Calls.look

    def recorded(calls: Calls) -> None:
        if calls.has_begun:
            looks.append(time.monotonic())
        look(calls)

    monkeypatch.setattr(Calls, "look", recorded)

    def wait() -> None:
        until_s = time.monotonic() + 10
        while not looks:
            assert time.monotonic() < until_s, "nobody entered the library"
            time.sleep(0.001)

    return wait


def kernel_of(kind: OpKind, array: np.ndarray) -> Kernel:
    side = (array, array.copy()) if kind is OpKind.ALLTOALL else array
    return Kernel(kind=kind, src=side, dst=side, op=ReduceOp.SUM, peer=1, most=array.size)


LARGE = MESH_UP_TO_NBYTES[0][1] // 8 + 1
"""So many elements are for the library, between two ranks and among three."""


@pytest.mark.parametrize("kind", [OpKind.ALLREDUCE, OpKind.BROADCAST])
def test_an_abort_wakes_a_rank_in_mid_kernel_and_what_comes_late_is_not_written(
    teams: Callable[..., OptionsTeam], monkeypatch: pytest.MonkeyPatch, kind: OpKind
) -> None:
    """The library works in the user's array: its connections are ended, and so is its kernel."""
    team = teams(world_size=3)
    in_kernel = wait_for_kernel(team, monkeypatch)
    array, launch = np.ones(LARGE), team.launch(timeout_s=60)
    waiting = team.start(0, started, launch, kernel_of(kind, array))
    in_kernel()
    was_under_way, ended = list[bool](), list[bool]()
    settle = Calls._settle

    def recorded(calls: Calls, work: Any) -> None:
        was_under_way.append(not work.is_completed())
        settle(calls, work)
        ended.append(work.is_completed())

    monkeypatch.setattr(Calls, "_settle", recorded)
    team.communicators[0].abort(launch.seq)
    assert isinstance(waiting.result(5), PlanAbortedError)
    assert any(was_under_way)
    assert all(ended), "no thread of the library is in the array"
    left = array.copy()
    for late in team.run(started, launch, kernel_of(kind, np.full(LARGE, 7.0)), ranks=(1, 2)):
        assert isinstance(late, PlanAbortedError | None)  # the root of a broadcast need not see that nobody takes it
    np.testing.assert_array_equal(array, left)
    for body in (body_arrive, body_sum):
        args = (team.launch(),) if body is body_arrive else (team.launch(), 1)
        assert isinstance(team.run(body, *args, ranks=(0,))[0], GroupBrokenError)


def test_where_connections_can_not_be_ended_the_library_gets_memory_of_its_own(
    plugin: Callable[..., None], teams: Callable[..., OptionsTeam], monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin("mine", lambda store, rank, size, timeout: gloo_of(store, rank, size), extended_api=False)
    team = teams("torch:mine")
    given: list[int] = []
    lend = _torch_run.host_tensor
    monkeypatch.setattr(_torch_run, "host_tensor", lambda array: given.append(array.ctypes.data) or lend(array))
    results = team.must(body_large, team.launch(), team.launch())
    assert all(sums == 3.0 and moved == 2.0 for sums, moved, _ in results)
    assert given
    assert not {at for *_, at in results} & set(given)


def body_large(communicator: Communicator, first: Launch, second: Launch) -> tuple[float, float, int]:
    """An allreduce and a broadcast of large arrays, in place."""
    array = np.full(LARGE, communicator.rank + 1.0)
    communicator.launch(first, Kernel(kind=OpKind.ALLREDUCE, src=array, dst=array, op=ReduceOp.SUM))
    moved = np.full(LARGE, communicator.rank + 1.0)
    communicator.launch(second, Kernel(kind=OpKind.BROADCAST, src=moved, dst=moved, peer=1))
    return float(array.min()), float(moved.max()), array.ctypes.data


def body_gaps(communicator: Communicator, launches: list[Launch]) -> list[float]:
    """Large arrays of every kind: with gaps, read-only, from one array into another."""
    wide, rank = np.full((LARGE, 2), communicator.rank + 1.0), communicator.rank
    gaps, out = wide[:, 0], np.zeros(LARGE)
    fixed = np.full(LARGE, rank + 1.0)
    fixed.flags.writeable = False
    communicator.launch(launches[0], Kernel(kind=OpKind.ALLREDUCE, src=gaps, dst=gaps, op=ReduceOp.AVG))
    communicator.launch(launches[1], Kernel(kind=OpKind.ALLREDUCE, src=fixed, dst=out, op=ReduceOp.SUM))
    moved = fixed if rank == 0 else np.zeros((LARGE, 2))[:, 1]
    communicator.launch(launches[2], Kernel(kind=OpKind.BROADCAST, src=moved, dst=None if rank == 0 else moved, peer=0))
    return [float(each) for each in (gaps.max(), wide[:, 1].min(), out.min(), fixed.max(), moved.min())]


def test_large_arrays_of_every_kind_are_worked_in(teams: Callable[..., OptionsTeam]) -> None:
    team = teams()
    found = team.must(body_gaps, [team.launch() for _ in range(3)])
    assert found == [[1.5, 1.0, 3.0, 1.0, 1.0], [1.5, 2.0, 3.0, 2.0, 1.0]]


def body_parts(communicator: Communicator, launches: list[Launch], size: int) -> list[bool]:
    """Arrays of several parts: in place, and averaged from one array into another, which has gaps on one rank."""
    own = np.arange(size, dtype=np.float64) * (communicator.rank + 1)
    out = np.zeros((size, 2))[:, 0] if communicator.rank == 1 else np.zeros(size)
    communicator.launch(launches[0], Kernel(kind=OpKind.ALLREDUCE, src=own, dst=out, op=ReduceOp.AVG))
    is_kept = bool((own == np.arange(size) * (communicator.rank + 1.0)).all())
    communicator.launch(launches[1], Kernel(kind=OpKind.ALLREDUCE, src=own, dst=own, op=ReduceOp.SUM))
    return [is_kept, bool((out == np.arange(size) * 2.0).all()), bool((own == np.arange(size) * 6.0).all())]


def test_large_arrays_are_reduced_in_parts_at_the_same_time(
    teams: Callable[..., OptionsTeam], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_torch_run, "PART_NBYTES", MESH_UP_TO_NBYTES[0][1] // 6)  # 7 parts
    team, begin = teams(world_size=3), Calls.begin
    open_at_once: list[int] = []

    def recorded(calls: Calls, *args: Any) -> Any:
        work = begin(calls, *args)
        open_at_once.append(len(calls._open))
        return work

    monkeypatch.setattr(Calls, "begin", recorded)
    found = team.must(body_parts, [team.launch() for _ in range(2)], LARGE + LARGE // 6)
    assert found == [[True] * 3] * 3
    assert len(open_at_once) == 3 * 2 * 7
    assert max(open_at_once) == _torch_run.AHEAD


def test_an_abort_ends_all_parts_that_are_under_way(
    teams: Callable[..., OptionsTeam], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_torch_run, "PART_NBYTES", MESH_UP_TO_NBYTES[0][1] // 6)
    team = teams(world_size=2)
    in_kernel, works, settle = wait_for_kernel(team, monkeypatch), [], Calls._settle

    def recorded(calls: Calls, work: Any) -> None:
        settle(calls, work)
        works.append(work)

    monkeypatch.setattr(Calls, "_settle", recorded)
    launch = team.launch(timeout_s=60)
    waiting = team.start(0, started, launch, kernel_of(OpKind.ALLREDUCE, np.ones(LARGE)))
    in_kernel()
    team.communicators[0].abort(launch.seq)
    assert isinstance(waiting.result(5), PlanAbortedError)
    assert len(works) == _torch_run.AHEAD
    assert all(work.is_completed() for work in works), "no thread of the library is in the array"


def test_close_wakes_a_rank_in_mid_kernel(teams: Callable[..., OptionsTeam], monkeypatch: pytest.MonkeyPatch) -> None:
    team = teams()
    in_kernel = wait_for_kernel(team, monkeypatch)
    waiting = team.start(0, started, team.launch(timeout_s=60), kernel_of(OpKind.ALLREDUCE, np.ones(LARGE)))
    in_kernel()
    team.communicators[0].close()
    team.communicators[0].close()
    assert isinstance(waiting.result(5), GroupBrokenError)


def test_a_peer_that_does_not_come_to_the_kernel_is_a_timeout_that_names_it(teams: Callable[..., OptionsTeam]) -> None:
    team = teams()
    launch = team.launch(timeout_s=0.3)
    assert team.run(body_door, launch) == [None, None]
    late = team.run(started, launch, kernel_of(OpKind.ALLREDUCE, np.ones(LARGE)), ranks=(0,))[0]
    assert isinstance(late, CollectiveTimeoutError)
    assert (late.group_name, late.timeout_s, late.missing, late.within) == ("team", 0.3, (1,), (1,))
    assert isinstance(team.run(body_sum, team.launch(), 1, ranks=(0,))[0], GroupBrokenError)


def body_door(communicator: Communicator, launch: Launch) -> None:
    communicator.agree(launch, b"")


@pytest.mark.parametrize(
    "kind", [OpKind.ALLREDUCE, *(pytest.param(kind, marks=pytest.mark.full) for kind in (OpKind.ALLTOALL, OpKind.RECV))]
)
def test_a_peer_that_dies_breaks_the_group(kind: OpKind) -> None:
    workers = [Worker() for _ in range(2)]
    team = ProcessTeam("torch:gloo", 2, workers)
    try:
        check_allreduce(team, ReduceOp.SUM, "int64", 1024, "plain", True)
        workers[1].process.kill()
        workers[1].process.join()
        failed = team.run(started, team.launch(), kernel_of(kind, np.ones(LARGE)), ranks=(0,))[0]
        assert isinstance(failed, PlanAbortedError), "an echo: whoever has died is for others to tell"
        assert failed.group_name == "team"
        assert isinstance(team.run(body_sum, team.launch(), 1, ranks=(0,))[0], GroupBrokenError)
    finally:
        team.close()
        for worker in workers:
            worker.close()
