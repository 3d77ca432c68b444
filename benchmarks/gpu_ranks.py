"""What each rank of `benchmarks.gpu` does: checks of results, and times of ours beside bare NCCL and a copy."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from raycollect.backends.nccl.group import connected, unique_id
from raycollect.cli.harness import interleave, timed
from raycollect.core.model import Kernel, Launch, OpKind, ReduceOp
from raycollect.core.protocols import Communicator
from raycollect.engine.device_staging import StagingBuffers, transfer
from raycollect.errors import UnsupportedError
from raycollect.planner import Domain
from tests.gpu.cases import run_once, seen
from tests.pure.conformance import Case, bits
from tests.pure.operands import operand

TIMEOUT_S = 15.0
"""The limit of one launch of ours."""

OPS = ("allreduce", "allgather", "reducescatter", "broadcast")
OURS, BARE, COPY, CHECK = "raycollect", "NCCL", "copy", "raycollect and its consistency check"

SMALL_NBYTES = 1 << 10
WARM_UP = 3
"""How many calls go before those that count."""

_FLOAT32, _SUM, _NCCL_BYTES = 7, 0, 1  # NCCL's codes
_PERIOD = 1000  # operands repeat themselves, in whole numbers that float32 has


# ---------------------------------------------------------------------------------------------- checks


def body_check(communicator: Communicator, launches: Sequence[Launch], cases: Sequence[Case]) -> list[str]:
    """Runs cases on one rank; says of each that went wrong how."""
    found = []
    for launch, case in zip(launches, cases, strict=True):
        try:
            ran = run_once(communicator, launch, case)
        except UnsupportedError as exc:
            found.append(f"{case}: {exc}")
            continue
        if ran.dst is not None and (why := _off(case, communicator, ran.expected, ran.dst)):
            found.append(f"rank {communicator.rank}, {case}: {why}")
    return found


def _off(case: Case, communicator: Communicator, expected: Any, got: Any) -> str:
    """What is wrong with what a rank holds, or ""."""
    kind = "f" if case.dtype == "bfloat16" else np.dtype(case.dtype).kind
    pieces = [(expected, got)] if type(expected) is not tuple else list(zip(expected, got, strict=True))
    if case.op is None or kind not in "fc":
        wrong = [at for at, (wanted, piece) in enumerate(pieces) if bits(wanted) != bits(piece)]
        return f"piece {wrong[0]} has other bits" if wrong else ""
    world, wide = communicator.world_size, "complex128" if kind == "c" else "float64"
    parts = [operand(rank, case.dtype, case.size, case.seed).astype(wide) for rank in range(world)]
    if case.kind is OpKind.REDUCESCATTER:
        size = case.size // world
        parts = [part[communicator.rank * size :][:size] for part in parts]
    wanted = reference(case.op, parts)
    near = np.abs(parts).prod(axis=0) if case.op is ReduceOp.PRODUCT else np.abs(parts).sum(axis=0)
    eps, least = _spacing(case.dtype)
    most = 0 if case.op in (ReduceOp.MIN, ReduceOp.MAX) else 2 * world * (eps * near + least)
    beyond = np.abs(got.astype(wide) - wanted) > most
    return f"{beyond.sum()} of {beyond.size} elements are beyond rounding" if beyond.any() else ""


def reference(op: ReduceOp, parts: Sequence[np.ndarray]) -> np.ndarray:
    """What a reduction must come near to, of the wide values of all ranks, [ranks, n]."""
    fold = {ReduceOp.PRODUCT: np.prod, ReduceOp.MIN: np.min, ReduceOp.MAX: np.max}.get(op, np.sum)
    total: np.ndarray = fold(parts, axis=0)
    return total / len(parts) if op is ReduceOp.AVG else total


def _spacing(dtype: str) -> tuple[float, float]:
    """How far numbers are apart: in proportion to them, and at the least, where they are subnormal."""
    known = import_module("ml_dtypes").finfo(np.zeros(1, dtype).real.dtype)
    return float(known.eps), float(known.smallest_subnormal)


# ---------------------------------------------------------------------------------------------- times


class Bare:
    """One rank's communicator of `cupy.cuda.nccl`, with a stream and an event: what a program without us would have."""

    def __init__(self, communicator: Communicator, launch: Launch) -> None:
        self.cupy, self.nccl = import_module("cupy"), import_module("cupy.cuda.nccl")
        drawn = unique_id(self.nccl) if communicator.rank == 0 else b""
        unique = bytes(communicator.agree(launch, drawn)[0])
        self.comm = connected(self.nccl, communicator.world_size, unique, communicator.rank)
        self.stream = self.cupy.cuda.Stream(non_blocking=True)
        self.event = self.cupy.cuda.Event(disable_timing=True)

    def done(self, call: Callable[[], Any]) -> Callable[[], None]:
        """A call, and a wait until the GPU has done it."""

        def once() -> None:
            call()
            self.event.record(self.stream)
            self.event.synchronize()

        return once

    def close(self) -> None:
        """Ends the communicator."""
        self.comm.destroy()


@dataclass(frozen=True, slots=True)
class Operands:
    """One rank's float32 arrays for one operation; what each holds is known for every element."""

    op: str
    rank: int
    ranks: int
    src: Any
    dst: Any

    @classmethod
    def make(cls, op: str, communicator: Communicator, nbytes: int) -> Operands:
        """Makes them of so many bytes on the larger side."""
        cupy, rank, ranks = import_module("cupy"), communicator.rank, communicator.world_size
        piece = max(1, nbytes // 4 // ranks)
        given = piece if op == "allgather" else piece * ranks
        taken = piece if op == "reducescatter" else piece * ranks
        values = np.resize(np.arange(_PERIOD, dtype=np.float32), given) + np.float32(rank)
        return cls(op, rank, ranks, cupy.asarray(values), cupy.zeros(taken, np.float32))

    def kernel(self) -> Kernel:
        """The operation as our kernel."""
        src, dst = seen(self.src), seen(self.dst)
        if self.op == "allgather":
            return Kernel(kind=OpKind.ALLGATHER, src=src, dst=self._pieces(self.dst), most=self.src.size)
        if self.op == "reducescatter":
            given = self._pieces(self.src)
            return Kernel(kind=OpKind.REDUCESCATTER, src=given, dst=dst, op=ReduceOp.SUM, most=self.dst.size)
        if self.op == "broadcast":
            return Kernel(kind=OpKind.BROADCAST, src=None if self.rank else src, dst=dst, peer=0)
        return Kernel(kind=OpKind.ALLREDUCE, src=src, dst=dst, op=ReduceOp.SUM)

    def _pieces(self, whole: Any) -> tuple[Any, ...]:
        size = whole.size // self.ranks
        return tuple(seen(whole[at * size : (at + 1) * size]) for at in range(self.ranks))

    def call(self, bare: Bare) -> Callable[[], Any]:
        """The operation as NCCL's own call, on the bare stream."""
        comm, stream = bare.comm, bare.stream.ptr
        src, dst, given, taken = self.src.data.ptr, self.dst.data.ptr, self.src.size, self.dst.size
        calls: dict[str, Callable[[], Any]] = {
            "allreduce": lambda: comm.allReduce(src, dst, given, _FLOAT32, _SUM, stream),
            "allgather": lambda: comm.allGather(src, dst, given, _FLOAT32, stream),
            "reducescatter": lambda: comm.reduceScatter(src, dst, taken, _FLOAT32, _SUM, stream),
            "broadcast": lambda: comm.broadcast(src, dst, given * 4, _NCCL_BYTES, 0, stream),
        }
        return calls[self.op]

    def blank(self) -> None:
        """Forgets the result."""
        self.dst.fill(-1)
        import_module("cupy").cuda.get_current_stream().synchronize()

    def check(self) -> None:
        """Looks at the beginning, the middle and the end of the result.

        Raises:
            AssertionError: It is wrong.
        """
        size = self.dst.size
        for start in {0, size // 2, max(0, size - _PERIOD)}:
            at = np.arange(start, min(size, start + _PERIOD))
            found = self.dst[start : start + _PERIOD].get()
            if not np.array_equal(found, self._expected(at)):
                raise AssertionError(f"{self.op} on rank {self.rank}: wrong from element {start} on")

    def _expected(self, at: np.ndarray) -> np.ndarray:
        if self.op == "broadcast":
            return at % _PERIOD
        if self.op == "allgather":
            piece = self.src.size
            return at % piece % _PERIOD + at // piece
        begins = self.rank * self.dst.size if self.op == "reducescatter" else 0
        return self.ranks * ((begins + at) % _PERIOD) + sum(range(self.ranks))


class Contender:
    """Somebody who does an operation on operands, as `interleave` takes it."""

    def __init__(self, name: str, once: Callable[[], Any], operands: Operands, *, copies: bool = False) -> None:
        self.name, self._once, self._operands, self._copies = name, once, operands, copies

    def prepare(self, nbytes: int) -> None:
        """Nothing: the operands are there."""

    def fill(self) -> None:
        """Forgets the last result."""
        self._operands.blank()

    def run(self, count: int) -> list[float]:
        """Seconds for each of so many."""
        return timed(self._once, count)

    def check(self, runs: int) -> None:
        """Looks at the result, once more by itself: the others have the same arrays."""
        if not self._copies:
            self._operands.blank()
            self._once()
            self._operands.check()

    def close(self) -> None:
        """Nothing: arrays go by themselves."""


def body_bandwidth(
    communicator: Communicator, launch: Launch, nbytes: int, runs: int
) -> dict[str, dict[str, list[float]]]:
    """Times the operations at one size on one rank: operation -> contender -> seconds."""
    bare = Bare(communicator, launch)
    found = {op: _interleaved(communicator, launch, bare, Operands.make(op, communicator, nbytes), runs) for op in OPS}
    communicator.end(launch, True)
    bare.close()
    return found


def _interleaved(
    communicator: Communicator, launch: Launch, bare: Bare, operands: Operands, runs: int
) -> dict[str, list[float]]:
    kernel, runtime = operands.kernel(), bare.cupy.cuda.runtime
    large = max(operands.src, operands.dst, key=lambda one: one.size)
    target = bare.cupy.empty(large.size, np.float32)
    copied = (target.data.ptr, large.data.ptr, large.nbytes, runtime.memcpyDeviceToDevice, bare.stream.ptr)
    contenders = [
        Contender(OURS, lambda: communicator.launch(launch, (kernel,)), operands),
        Contender(BARE, bare.done(operands.call(bare)), operands),
        Contender(COPY, bare.done(lambda: runtime.memcpyAsync(*copied)), operands, copies=True),
    ]
    return interleave(contenders, nbytes=large.nbytes, runs=runs)


def body_overhead(communicator: Communicator, launches: Sequence[Launch]) -> dict[str, list[float]]:
    """Times small calls on one rank, one launch each, and bare ones in turn: contender -> seconds."""
    bare = Bare(communicator, launches[0])
    communicator.end(launches[0], True)
    operands = Operands.make("allreduce", communicator, SMALL_NBYTES)
    kernel, call = operands.kernel(), bare.done(operands.call(bare))
    times: dict[str, list[float]] = {CHECK: [], OURS: [], BARE: []}
    for launch in launches[1:]:
        began_s = time.perf_counter()
        communicator.agree(launch, b"")
        inside_s = time.perf_counter()
        communicator.launch(launch, (kernel,))
        ended_s = time.perf_counter()
        communicator.end(launch, True)
        times[CHECK].append(time.perf_counter() - began_s)
        times[OURS].append(ended_s - inside_s)
        times[BARE] += timed(call, 1)
    operands.check()
    bare.close()
    return {name: found[WARM_UP:] for name, found in times.items()}


def body_staging(communicator: Communicator, nbytes: int, runs: int) -> dict[str, dict[str, list[float]]]:
    """Times copies of one size between a rank's GPU and the host, in turn: direction -> the host's side -> seconds."""
    domain, array = Domain.of("staging", 0, (0,), "cpu"), import_module("cupy").zeros(nbytes, np.uint8)
    tensor, pageable = seen(array), np.zeros(nbytes, np.uint8)
    buffer = StagingBuffers({domain: "cpu"}).side(tensor, domain)

    def set_array() -> None:
        array.set(pageable)
        import_module("cupy").cuda.get_current_stream().synchronize()

    ways: dict[str, dict[str, Callable[[], Any]]] = {
        "from the GPU": {
            "staging buffer": lambda: transfer(buffer, tensor, _go_on),
            "other memory": lambda: transfer(pageable, tensor, _go_on),
            "cupy": lambda: array.get(out=pageable),
        },
        "to the GPU": {
            "staging buffer": lambda: transfer(tensor, buffer, _go_on),
            "other memory": lambda: transfer(tensor, pageable, _go_on),
            "cupy": set_array,
        },
    }
    times: dict[str, dict[str, list[float]]] = {way: {name: [] for name in calls} for way, calls in ways.items()}
    for _ in range(WARM_UP + runs):
        for way, calls in ways.items():
            for name, call in calls.items():
                times[way][name] += timed(call, 1)
    return {way: {name: found[WARM_UP:] for name, found in calls.items()} for way, calls in times.items()}


def _go_on() -> None:
    """Ends no wait for a copy."""
