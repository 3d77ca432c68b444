"""Ranks on the GPUs of `tests.fake_cupy`: a thread and a device each; what they are given, and what came out.

Operands are still being written when a collective is called, on a stream of the caller, and results are read at once on
another one: what is not in order comes out wrong, in some order of the streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import cycle, permutations, product
from typing import Any

import numpy as np

from raycollect import backends
from raycollect.backends import arrays
from raycollect.backends.device_arrays import DeviceArray, device_id
from raycollect.backends.nccl.ops import reduction_of
from raycollect.core.model import Launch, OpKind
from raycollect.core.protocols import Communicator, Joining
from tests.fake_cupy import Fake, installed
from tests.gpu.cases import LAYOUTS as ON_DEVICE
from tests.pure import conformance
from tests.pure.communicators import MemoryExchange, ThreadTeam
from tests.pure.conformance import (
    Case,
    as_read,
    check_outcomes,
    checksum_of,
    how_far,
    listed,
    made,
    other_values,
    put_in_place,
    ranks_of,
    run_kernel,
    sides,
    what_is_wrong,
)
from tests.pure.operands import NARROW
from tests.support.values import replace

LAYOUTS = tuple(ON_DEVICE)
LIBRARIES = ("cupy", "torch")
STREAMS = ("default", "blocking", "non-blocking")

# ------------------------------------------------------------------------------- teams


@contextmanager
def gpus(count: int, *, seed: int = 0, **how: Any) -> Iterator[Fake]:
    """So many GPUs."""
    with installed(count, seed=seed, **how) as fake:
        yield fake


class GpuTeam(ThreadTeam):
    """Ranks in threads, each on the device of its number (modulo those that there are), which is current in its body.

    Args:
        world_size: The number of ranks.
        options: Of the group.
    """

    def __init__(self, world_size: int, **options: Any) -> None:
        self._devices = import_module("cupy").cuda.runtime.getDeviceCount()
        self._options = tuple(sorted(options.items()))
        super().__init__("nccl", world_size)

    def _create(self, rank: int) -> Communicator:
        create = backends.load(self.backend, self.spec.name)
        spec = replace(self.spec, options=self._options)
        with self.device_of(rank):
            return create(Joining(spec, rank, self.rendezvous, MemoryExchange(self.server, rank)))

    def device_of(self, rank: int) -> Any:
        """A rank's device, as a context manager."""
        return import_module("cupy").cuda.Device(rank % self._devices)

    def _on(self, rank: int, body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        with self.device_of(rank):
            return super()._on(rank, body, args)


@contextmanager
def team_on_gpus(world_size: int, *, seed: int = 0, **how: Any) -> Iterator[tuple[Fake, GpuTeam]]:
    """A team, each rank on a GPU of its own."""
    with gpus(world_size, seed=seed, **how) as fake:
        team = GpuTeam(world_size)
        try:
            yield fake, team
        finally:
            team.close()


# ------------------------------------------------------------------------------- tensors


@dataclass(frozen=True)
class TorchLike:
    """What `DeviceArray` asks of a torch tensor, over the memory of a cupy array without negative strides."""

    array: Any

    @property
    def dtype(self) -> str:
        return f"torch.{self.array.dtype.name}"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    @property
    def device(self) -> str:
        return f"cuda:{self.array.device.id}"

    def element_size(self) -> int:
        return int(self.array.itemsize)

    def stride(self) -> tuple[int, ...]:
        return tuple(stride // self.array.itemsize for stride in self.array.strides)

    def data_ptr(self) -> int:
        return int(self.array.data.ptr)


_MADE = {**ON_DEVICE, "0-d": lambda make, _: make(())}
"""Layout -> an array of so many elements that lie so, given how arrays of a shape are made."""


def pending(values: np.ndarray, how: str = "plain", library: str = "cupy") -> DeviceArray:
    """An array on the current device, [n]; its elements are written by work that the caller's stream has yet to do."""
    cupy = import_module("cupy")
    made = _MADE[how](lambda shape: cupy.empty(shape, values.dtype), values.size)
    made[...] = cupy.asarray(other_values(np.ascontiguousarray(values))).reshape(made.shape)
    cupy.cuda.get_current_stream().synchronize()
    made[...] = cupy.asarray(values).reshape(made.shape)
    if library == "torch":
        return DeviceArray(TorchLike(made))
    found = arrays.view(made) if made.dtype not in arrays.NARROW else DeviceArray(made)
    assert isinstance(found, DeviceArray)
    return found


def cupy_of(array: DeviceArray) -> Any:
    """The cupy array that a tensor is, or is over."""
    return array.tensor.array if array.library == "torch" else array.tensor


def read_elsewhere(array: DeviceArray, stream: Any) -> np.ndarray:
    """The elements, [n], C order, as whoever uses that stream next finds them."""
    with import_module("cupy").cuda.Device(device_id(array.device)):
        return np.ascontiguousarray(cupy_of(array).get(stream)).reshape(-1)


# ------------------------------------------------------------------------------- what each rank does


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCase:
    """A case on GPUs.

    Attributes:
        case: What is done; its layout is one of `LAYOUTS`.
        library: Whose tensors they are.
        stream: On which stream the caller has them written.
        staged: Whether the kernel is shown to the communicator before the check.
    """

    case: Case
    library: str = "cupy"
    stream: str = "non-blocking"
    staged: bool = False


class Caller:
    """The streams of a rank's caller."""

    def __init__(self) -> None:
        cuda = import_module("cupy").cuda
        self.other = cuda.Stream(non_blocking=True)
        self._made = {
            "default": cuda.Stream.null,
            "blocking": cuda.Stream(),
            "non-blocking": cuda.Stream(non_blocking=True),
        }

    def __getitem__(self, name: str) -> Any:
        return self._made[name]


def body_cases(communicator: Communicator, launches: Sequence[Launch], cases: Sequence[GpuCase]) -> list[Any]:
    """As `conformance.body_cases`, with the streams of one caller."""
    return conformance.body_cases(communicator, launches, cases, _run, Caller())


def _run(communicator: Communicator, launch: Launch, found: GpuCase, caller: Caller) -> tuple[str, int]:
    case, rank, world = found.case, communicator.rank, communicator.world_size
    given, expected, most = sides(case, rank, world)
    with caller[found.stream]:
        make = partial(pending, how=case.layout, library=found.library)
        src, dst = made(given, make), made(expected, make, blank=True)
        shared: tuple[Any, ...] = ()
        if case.inplace:
            dst, shared = put_in_place(case.kind, rank, src, dst)
        try:
            run_kernel(communicator, launch, case, (src, dst, most), staged=found.staged)
        except Exception as exc:
            raise AssertionError(f"{found} on rank {rank}: {exc!r}") from exc
    host = {id(one): read_elsewhere(one, caller.other) for one in (*listed(src), *listed(dst))}
    src, dst, shared = (as_read(side, host) for side in (src, dst, shared))
    # Folded by cupy, in rank order and bit by bit; but its kernels take subnormal numbers of 32 bits for zeros.
    is_folded = case.op is not None and reduction_of(case.op, case.dtype, _version()) is None
    is_folded = world == 1 or (is_folded and case.dtype != "complex64")
    if case.op is not None and case.dtype in NARROW and world > 1:
        return how_far(case, expected, dst, world), checksum_of(dst)
    return what_is_wrong(case, given, src, expected, dst, shared, is_folded), checksum_of(dst)


def _version() -> int:
    return int(import_module("cupy.cuda.nccl").get_version())


def sends(world: int) -> list[GpuCase]:
    """Everyone sends to everyone, in several sizes and layouts."""
    turns = cycle(LAYOUTS)
    pairs = permutations(range(world), 2)
    sent = [
        Case(kind=OpKind.SEND, dtype="int16", size=size, root=one, peer=two, layout=next(turns))
        for size, (one, two) in product((0, 1, 1000), list(pairs))
    ]
    return [GpuCase(case=case) for case in sent]


def check(team: GpuTeam, cases: Sequence[GpuCase], *, timeout_s: float = 30.0) -> None:
    """Runs cases on all ranks, compares their results and names every case that failed."""
    assert cases
    launches = [team.launch(ranks_of(one.case, team), timeout_s) for one in cases]
    results = team.must(body_cases, launches, list(cases))
    check_outcomes(cases, [one.case.kind for one in cases], results, f"with {team.world_size} ranks")
