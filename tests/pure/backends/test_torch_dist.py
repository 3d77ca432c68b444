"""What is torch.distributed's own: options, plugins, other groups of the process, devices."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raycollect import backends
from raycollect.core.model import GroupSpec, Kernel, Launch, OpKind, ReduceOp
from raycollect.core.protocols import Communicator, Joining
from raycollect.errors import (
    BackendNotInstalledError,
    InternalError,
    InvalidGroupError,
    UnsupportedError,
)
from tests.pure.communicators import MemoryExchange, MemoryRendezvous, MemoryStar
from tests.pure.conformance import (
    KINDS,
    Case,
    as_read,
    body_cases,
    check_outcomes,
    checksum_of,
    every_case,
    listed,
    made,
    put_in_place,
    ranks_of,
    run_kernel,
    run_launch,
    sides,
    what_is_wrong,
)

if importlib.util.find_spec("torch") is None or not backends.is_available("torch:gloo"):
    pytest.skip("no torch with gloo is installed", allow_module_level=True)

import torch
from torch import distributed
from torch.distributed import distributed_c10d as c10d

from raycollect.backends.arrays import DeviceArray
from raycollect.backends.torch_dist import communicator as torch_dist
from tests.pure.backends.torch_teams import OptionsTeam, body_sum, gloo_of, plugin, teams

__all__ = ["plugin", "teams"]  # fixtures


def alone(backend: str, **options: Any) -> Communicator:
    """A group of one."""
    spec = GroupSpec(name="g", group_id="1", backend=backend, world_size=1, options=tuple(options.items()))
    return torch_dist.create(Joining(spec, 0, MemoryRendezvous(), MemoryExchange(MemoryStar(), 0)))


# ------------------------------------------------------------------------------- groups


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
    hosts = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                hosts.add(fields[1].split(":")[0])
    return hosts


def test_it_listens_on_the_given_address_only() -> None:
    before = listening()
    spec = GroupSpec(name="g", group_id="1", backend="torch:gloo", world_size=1)
    communicator = torch_dist.create(
        Joining(spec, 0, MemoryRendezvous(), MemoryExchange(MemoryStar(), 0), host="127.0.0.3")
    )
    assert listening() - before == {"0300007F"}
    communicator.close()


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


def test_pieces_larger_than_agreed_are_our_bug_and_no_hang() -> None:
    communicator = alone("torch:gloo")
    launch = Launch(seq=1, ranks=(0,), timeout_s=5)
    side = (on_device(np.ones(3), gaps=False),)
    with pytest.raises(InternalError, match="more than the agreed 2 elements"):
        communicator.launch(launch, (Kernel(kind=OpKind.ALLTOALL, src=side, dst=side, most=2),))
    communicator.close()


# ------------------------------------------------------------------------------- devices


def on_device(array: np.ndarray, *, gaps: bool) -> DeviceArray:
    """Wraps CPU memory as if it were a device's, so that the library does all."""
    values = torch.from_numpy(array.copy())
    return DeviceArray(torch.stack([values, values], -1)[..., 0] if gaps else values)


def run_on_device(communicator: Communicator, launch: Launch, case: Case, gaps: bool) -> tuple[str, int]:
    """`run_case` over tensors that only the library reads."""
    given, expected, most = sides(case, communicator.rank, communicator.world_size)
    make = partial(on_device, gaps=gaps)
    src, dst = made(given, make), made(expected, make, blank=True)
    shared: tuple[Any, ...] = ()
    if case.inplace:
        dst, shared = put_in_place(case.kind, communicator.rank, src, dst)
    run_kernel(communicator, launch, case, (src, dst, most), staged=False)
    host = {id(tensor): tensor.tensor.numpy() for tensor in (*listed(src), *listed(dst))}
    src, dst, shared = (as_read(side, host) for side in (src, dst, shared))
    return what_is_wrong(case, given, src, expected, dst, shared, False), checksum_of(dst)


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_tensors_of_a_device_are_left_to_the_library(teams: Callable[..., OptionsTeam], dtype: str, gaps: bool) -> None:
    team = teams(world_size=3)
    every = every_case(dtype, 3, (0, 7, 60), KINDS)
    cases = [case for case in every if case.op in (None, ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX)]
    launches = [team.launch(ranks_of(case, team)) for case in cases]
    results = team.must(body_cases, launches, cases, run_on_device, gaps)
    check_outcomes(cases, [case.kind for case in cases], results, "on a device")
