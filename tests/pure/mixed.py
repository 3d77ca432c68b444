"""Fleets whose tensors lie on devices of different kinds, on a fake of cupy."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import ml_dtypes  # noqa: F401 - numpy knows bfloat16 by it
import numpy as np
import pytest

from raycollect import backends
from raycollect.backends import arrays
from raycollect.backends.arrays import DeviceArray
from raycollect.backends.nccl import communicator as nccl
from raycollect.core.model import Kernel, Launch, OpKind, ReduceOp
from raycollect.core.protocols import Communicator, Joining
from raycollect.engine import device_staging
from raycollect.engine.device_staging import StagingBuffers
from raycollect.planner import Domain
from tests.fake_cupy import Fake, installed
from tests.pure.closing import closing_all
from tests.pure.communicators import MemoryExchange, ThreadTeam
from tests.pure.fleet import Fleet
from tests.pure.meaning import REDUCTIONS, gives_of, meaning
from tests.support.values import replace

WORLD = 3
KINDS = (
    OpKind.ALLREDUCE,
    OpKind.REDUCE,
    OpKind.BROADCAST,
    OpKind.ALLGATHER,
    OpKind.REDUCESCATTER,
    OpKind.GATHER,
    OpKind.SCATTER,
    OpKind.ALLTOALL,
    OpKind.SEND,
)
ROOT, PEER = 1, 2
DTYPES = ("float32", "float64", "int8", "int32", "uint16", "bool", "complex64", "float16")
Device = int | None
"""The number of a GPU; None: the host."""


@contextmanager
def faked(seed: int = 0) -> Iterator[Fake]:
    """A fake of cupy, with a GPU for each rank."""
    device_staging._idle.clear()
    with installed(WORLD, seed=seed) as made:
        yield made
        made.drain()
    device_staging._idle.clear()


class Mixed:
    """A fleet whose backend works in one memory, whatever lies where.

    Args:
        fake: The fake of cupy.
        backend: ``"local"``, ``"nccl"`` with rank r on GPU r, or another one, whose ranks are threads.
    """

    def __init__(self, fake: Fake, backend: str) -> None:
        self.cupy = fake.cupy
        self.fleet = Fleet(WORLD)
        self.fleet.spec = replace(self.fleet.spec, backend=backend, memory=backends.get(backend).memory)
        self._team: ThreadTeam | None = None
        if backend == "nccl":
            team = self._team = ThreadTeam("local", WORLD)
            with ThreadPoolExecutor(WORLD) as threads:
                self.fleet.communicators = list(threads.map(lambda rank: self._nccl(team, rank), range(WORLD)))
        elif backend != "local":
            self._team = ThreadTeam(backend, WORLD)
            self.fleet.communicators = list(self._team.communicators)

    def _nccl(self, team: ThreadTeam, rank: int) -> Communicator:
        with self.cupy.cuda.Device(rank):
            spec = replace(team.spec, backend="nccl")
            return nccl.create(Joining(spec, rank, team.rendezvous, MemoryExchange(team.server, rank)))

    def close(self) -> None:
        self.fleet.close()
        if self._team is not None:
            self._team.close()

    def put(self, value: Any, device: Device, *, gaps: bool = False) -> Any:
        """A tensor of these elements on a device, perhaps every other element of a longer one."""
        if isinstance(value, (list, tuple)):
            return type(value)(self.put(one, device, gaps=gaps) for one in value)
        whole = np.zeros((*value.shape[:-1], value.shape[-1] * 2), value.dtype) if gaps else value.copy()
        if gaps:
            whole[..., ::2] = value
        if device is None:
            return whole[..., ::2] if gaps else whole
        with self.cupy.cuda.Device(device):
            made = self.cupy.asarray(whole)
        return made[..., ::2] if gaps else made


def mixing(fake: Fake) -> AbstractContextManager[Callable[[str], Mixed]]:
    """Makes mixed fleets by the names of their backends, and closes them."""
    return closing_all(partial(Mixed, fake))


def host(value: Any) -> Any:
    """What a value holds, in numpy."""
    if isinstance(value, (list, tuple)):
        return [host(one) for one in value]
    return value if isinstance(value, np.ndarray) else value.get()


def is_on_gpu(value: Any) -> bool:
    return isinstance(arrays.view(value), DeviceArray)


def same(found: Any, expected: Any) -> None:
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    else:
        np.testing.assert_array_equal(host(found), expected)


def numbers(rng: np.random.Generator, dtype: str) -> Callable[[int], Any]:
    """Makes arrays of small whole numbers, whose sums are exact in every order."""
    return lambda size: rng.integers(0, 2 if dtype == "bool" else 9, size).astype(dtype)


def collective(kind: OpKind, rng: np.random.Generator, dtype: str, largest: int = 40) -> tuple[list[Any], list[Any]]:
    """What each rank gives, and what each shall have afterwards."""
    odd = rng.integers(1, largest, (WORLD, WORLD))
    given = gives_of(kind, WORLD, numbers(rng, dtype), lambda a, b: int(odd[a, b]), ROOT)
    arguments = named(kind)
    arguments.pop("peer", None)
    return given, meaning(kind, given, root=ROOT, peer=PEER, op=arguments.get("op"))


def named(kind: OpKind) -> dict[str, Any]:
    """The arguments of an operation."""
    found: dict[str, Any] = {"op": ReduceOp.SUM} if kind in REDUCTIONS else {}
    if kind in (OpKind.REDUCE, OpKind.BROADCAST, OpKind.GATHER, OpKind.SCATTER, OpKind.SEND):
        found["root"] = ROOT
    if kind is OpKind.SEND:
        found["peer"] = PEER
    return found


def empty_like(value: Any) -> Any:
    return [empty_like(one) for one in value] if isinstance(value, list) else np.full_like(value, 1)


def devices_of(seed: int, home: Sequence[Device]) -> list[Device]:
    """A device for each rank, not all of them where they would be at home."""
    rng = random.Random(seed)
    while True:
        found = [rng.choice((None, rank)) for rank in range(WORLD)]
        if found != list(home):
            return found


BACKENDS = ("local", "shm", "nccl")
SOCKETS = ("tcp", "torch:gloo")
"""Those whose ranks can be threads of one process."""
HOMES: dict[str, list[Device]] = {
    **dict.fromkeys((*BACKENDS, *SOCKETS), [None] * WORLD),
    "nccl": list(range(WORLD)),
}


seeds = pytest.mark.parametrize("fake", range(3), indirect=True)
"""Runs a test with several seeds of the fake."""


def body_staged(communicator: Communicator, launches: Sequence[Launch], on_gpu: int) -> list[list[float]]:
    """Each operation once, by kernels on stand-ins where this rank's tensors are on a GPU; what it then holds.

    For ranks that are processes, each with a fake of its own.
    """
    rank, ranks = communicator.rank, tuple(range(communicator.world_size))
    domain = Domain.of("g", rank, ranks, "cpu")
    found = []
    with installed(1) as fake:

        def made(size: int, value: float) -> Any:
            array = np.full(size, value)
            return arrays.memory(fake.cupy.asarray(array) if rank == on_gpu else array)

        kernels = {
            "allreduce": (one := made(6, rank + 1.0), one, {"op": ReduceOp.SUM}),
            "broadcast": (made(3, 7.0) if rank == 1 else None, made(3, 0.0), {"peer": 1}),
            "allgather": (made(2, rank + 1.0), tuple(made(2, 0.0) for _ in ranks), {"most": 2}),
        }
        for launch, (kind, (src, dst, others)) in zip(launches, kernels.items(), strict=True):
            staging_buffers = StagingBuffers({domain: "cpu"})
            sides = staging_buffers.side(src, domain), staging_buffers.side(dst, domain)
            staging_copies = staging_buffers.staging_copies([sides])
            assert (staging_copies is not None) == (rank == on_gpu)
            communicator.agree(launch, b"")
            if staging_copies is not None:
                staging_copies.load(lambda: None)
            kernel = Kernel(kind=OpKind(kind), src=sides[0], dst=sides[1], **others)
            communicator.launch(launch, (kernel,))
            if staging_copies is not None:
                staging_copies.unload(lambda: None)
            communicator.end(launch, True)
            for one in dst if type(dst) is tuple else (dst,):
                found.append(np.ravel(one.tensor.get() if rank == on_gpu else one).tolist())
    return found
