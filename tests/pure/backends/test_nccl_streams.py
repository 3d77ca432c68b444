"""The order of `nccl`'s kernels and of their callers' work, on the fake of cupy: what waits for what, and what not.

Streams are stopped and let go on by the tests, so that what is not in order shows each time.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from raycollect.backends import streams
from raycollect.backends.nccl.communicator import NcclCommunicator
from raycollect.core.model import Kernel, Launch, OpKind, ReduceOp, TensorInfo
from raycollect.core.protocols import Communicator
from tests.fake_cupy import Fake
from tests.pure.backends.streams import WAIT_S, info, stream_of, sums
from tests.pure.conformance import bits, run_launch
from tests.pure.on_gpu import STREAMS, Caller, cupy_of, pending, read_elsewhere, team_on_gpus
from tests.pure.operands import left_fold, operand


def begun(communicator: Any, launch: Launch, kernel: Kernel) -> Callable[[], None]:
    """Enqueues a kernel; what it gives waits for the end."""
    communicator.enqueue(launch, (kernel,))
    return lambda: communicator.finish(launch, kernel)


# ------------------------------------------------------------------------------- before


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("current", STREAMS)
def test_a_kernel_follows_the_current_stream_and_the_default_one(name: str, current: str, seed: int) -> None:
    """Blocking streams come before what is enqueued on the default one."""
    with team_on_gpus(2, seed=seed) as (fake, team):
        launched = threading.Barrier(2)

        def body(communicator: Communicator, launch: Launch) -> np.ndarray:
            caller = Caller()
            with caller[name]:
                src = pending(np.zeros(9, np.int32))
                caller[name].synchronize()
                fake.hold(caller[name])
                written = cupy_of(src)
                written += communicator.rank + 1
            with caller[current]:
                under_way = begun(communicator, launch, sums(src))
            launched.wait(WAIT_S)
            fake.drain()
            follows = bool(fake.pending(stream_of(communicator)))
            launched.wait(WAIT_S)
            fake.release(caller[name])
            under_way()
            values = read_elsewhere(src, caller.other)
            return np.append(values, follows)

        results = team.must(body, team.launch())
        if current == name or name != "non-blocking":
            assert [result.tolist() for result in results] == [[3] * 9 + [1]] * 2
        else:  # a stream of its own that is not the caller's: nobody could know
            assert [result[-1] for result in results] == [0, 0]


@pytest.mark.parametrize("seed", range(3))
def test_a_thread_that_calls_for_another_follows_its_mark_and_not_its_own_stream(seed: int) -> None:
    with team_on_gpus(2, seed=seed) as (fake, team), ThreadPoolExecutor(2) as others:
        launched = threading.Barrier(2)

        def body(communicator: Communicator, launch: Launch) -> np.ndarray:
            caller, lanes = Caller(), Caller()
            with caller["non-blocking"]:
                src = pending(np.zeros(9, np.int32))
                fake.hold(caller["non-blocking"])
                written = cupy_of(src)
                written += communicator.rank + 1
                mark = streams.mark(info(src))
                written *= 1  # behind the mark: no part of what is followed

            def lane() -> Any:
                with team.device_of(communicator.rank), lanes["non-blocking"], streams.after(mark):
                    waste = pending(np.zeros(3))
                    fake.hold(lanes["non-blocking"])
                    cupy_of(waste).fill(1)  # what nobody has to wait for
                    return begun(communicator, launch, sums(src)), waste

            under_way, waste = others.submit(lane).result(WAIT_S)
            launched.wait(WAIT_S)
            fake.drain()
            assert fake.pending(stream_of(communicator)), "it has not waited for the mark"
            launched.wait(WAIT_S)
            fake.release(caller["non-blocking"])
            under_way()
            assert fake.pending(lanes["non-blocking"])
            values = read_elsewhere(src, caller.other)
            fake.release(lanes["non-blocking"])
            lanes["non-blocking"].synchronize()
            assert cupy_of(waste).get().tolist() == [1, 1, 1]
            return values

        for values in team.must(body, team.launch()):
            assert values.tolist() == [3] * 9


# ------------------------------------------------------------------------------- beside a capture


def test_another_threads_capture_and_collectives_do_not_disturb_each_other() -> None:
    """CUDA refuses queries and allocations of other threads, but for those that say that they know."""
    with team_on_gpus(2) as (fake, team):
        operands: list[Any] = [None, None]

        def prepare(communicator: Communicator) -> None:
            operands[communicator.rank] = pending(np.full(9, communicator.rank + 1, np.int16), "every other")

        def body(communicator: Communicator, launch: Launch) -> None:
            mark = streams.mark(info(operands[communicator.rank]))
            with streams.after(mark):
                run_launch(communicator, launch, sums(operands[communicator.rank]))

        team.must(prepare)
        with fake.capturing():
            team.must(body, team.launch())
            with pytest.raises(fake.cupy.cuda.runtime.CUDARuntimeError), ThreadPoolExecutor(1) as others:
                others.submit(fake.cupy.empty, 3).result(WAIT_S)
            for communicator in team.communicators:
                communicator.close()
        assert [cupy_of(array).get().tolist() for array in operands] == [[3] * 9] * 2


# ------------------------------------------------------------------------------- without cupy


class TorchStreams:
    """What is asked of `torch.cuda`: the current stream of this process, and which one waits for which."""

    def __init__(self, current: str) -> None:
        self.cuda = self
        self._current = current
        self.waited: list[tuple[str, str]] = []

    def is_initialized(self) -> bool:
        return True

    def default_stream(self, device: int) -> Any:
        return TorchStream(f"default of {device}", self.waited)

    def current_stream(self, device: int) -> Any:
        return TorchStream(f"{self._current} of {device}", self.waited)


@dataclass(frozen=True)
class TorchStream:
    name: str
    waited: list[tuple[str, str]] = field(compare=False)

    def wait_stream(self, other: TorchStream) -> None:
        self.waited.append((self.name, other.name))


@pytest.mark.parametrize(("current", "waited"), [("default", []), ("own", [("default of 1", "own of 1")])])
def test_torchs_streams_are_settled_where_cupy_is_not_imported(
    current: str, waited: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    torch = TorchStreams(current)
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
    info = TensorInfo(shape=(3,), dtype="float32", itemsize=4, device="cuda:1", library="torch")
    streams.settle([info])
    assert torch.waited == waited
    assert "cupy" not in sys.modules


# ------------------------------------------------------------------------------- what it costs


def test_no_call_makes_a_stream_or_an_event_or_waits_for_the_device() -> None:
    with team_on_gpus(2) as (fake, team):
        callers = [Caller(), Caller()]

        def body(communicator: Communicator, launches: list[Launch], turns: int) -> None:
            with callers[communicator.rank]["non-blocking"]:
                src, dst = (pending(np.ones(100, np.float32)) for _ in range(2))
                short = pending(np.ones(100, np.int16), "every other")
                for launch in launches[:turns]:
                    mark = streams.mark(info(src, dst))
                    with streams.after(mark):
                        run_launch(communicator, launch, sums(src, dst), sums(short))
                    del mark
                    streams.settle(info(dst))

        def costs() -> dict[str, int]:
            return {
                name: fake.counts[name]
                for name in fake.counts
                if name.startswith(("eventCreate", "streamCreate", "deviceSynchronize", "streamSynchronize"))
            }

        callers.clear()
        for rank in team.everyone:
            with team.device_of(rank):
                callers.append(Caller())
        team.must(body, [team.launch() for _ in range(2)], 2)
        before, events, held = costs(), fake.events, (fake.streams,)
        team.must(body, [team.launch() for _ in range(20)], 20)
        after = costs()
        waits = {name for name in after if after[name] != before[name]}
        assert waits <= {"streamSynchronize"}, (before, after)  # that of `pending`
        assert after["streamSynchronize"] - before["streamSynchronize"] <= 6
        assert (fake.events, fake.streams) == (events, *held)
        assert not fake.counts["deviceSynchronize"]


@pytest.mark.parametrize("how", ["plain", "column"])
@pytest.mark.parametrize("dtype", ["int16", "float32"])
def test_memory_is_kept_until_it_was_used_and_no_longer(how: str, dtype: str) -> None:
    """The fake tells of memory that goes while somebody refers to it."""
    with team_on_gpus(2) as (fake, team):

        def body(communicator: Communicator, launch: Launch) -> np.ndarray:
            mine = Caller()["non-blocking"]
            with mine:
                src, dst = (pending(np.ones(1000, dtype), how) for _ in range(2))
            before = fake.allocated(communicator.rank)
            fake.hold(stream_of(communicator))
            with mine:
                under_way = begun(communicator, launch, sums(src, dst))
            del src
            fake.drain()
            fake.release(stream_of(communicator))
            under_way()
            del under_way
            values = read_elsewhere(dst, mine)
            used = cupy_of(dst).base
            own = dst.nbytes if used is None else used.nbytes
            assert fake.allocated(communicator.rank) <= before - own, "it holds memory when it is done"
            return values

        for values in team.must(body, team.launch()):
            assert (values == 2).all()


# ------------------------------------------------------------------------------- many kernels, one group


def body_together(
    communicator: Communicator, launch: Launch, dtypes: list[str], fake: Fake, op: ReduceOp
) -> tuple[list[np.ndarray], dict[str, int]]:
    mine = Caller()["non-blocking"]
    assert isinstance(communicator, NcclCommunicator)
    with mine:
        values = [operand(communicator.rank, dtype, 50 + at, at) for at, dtype in enumerate(dtypes)]
        given = [pending(array, "every other") for array in values]
        kernels = [Kernel(kind=OpKind.ALLREDUCE, src=array, dst=array, op=op) for array in given]
        communicator.agree(launch, b"")
        communicator.launch(launch, kernels)
        communicator.end(launch, True)
    return [read_elsewhere(array, mine) for array in given], dict(fake.counts)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtypes", [["int32"] * 20, ["int16"] * 5, ["int32", "int16", "uint8", "int64"] * 5])
def test_kernels_together_are_one_group_of_nccl(monkeypatch: pytest.MonkeyPatch, dtypes: list[str], seed: int) -> None:
    with team_on_gpus(3, seed=seed) as (fake, team):
        groups: list[str] = []
        for name in ("groupStart", "groupEnd"):
            counted = getattr(fake.cupy.cuda.nccl, name)
            monkeypatch.setattr(
                fake.cupy.cuda.nccl, name, lambda counted=counted, name=name: (groups.append(name), counted())[1]
            )
        results = team.must(body_together, team.launch(), dtypes, fake, ReduceOp.SUM)
        assert groups.count("groupStart") == groups.count("groupEnd") == 3
        for at, dtype in enumerate(dtypes):
            expected = left_fold(ReduceOp.SUM, [operand(rank, dtype, 50 + at, at) for rank in range(3)])
            for arrays, _ in results:
                assert bits(arrays[at]) == bits(expected), (at, dtype)


def test_without_cupy_the_default_stream_of_torch_follows_the_caller_of_another_threads_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    torch = TorchStreams("own")
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
    info = TensorInfo(shape=(3,), dtype="float32", itemsize=4, device="cuda:1", library="torch")
    assert streams.mark([info]) is None
    assert torch.waited == [("default of 1", "own of 1")]
