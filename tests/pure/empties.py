"""Collectives of tensors of which any may be empty, by chance: one or several calls as one plan, on any backend.

A `Scene` is what all ranks do; each makes its own operands of it, runs its half of the plan twice (the second time as
it is remembered), and compares what it holds afterwards with numpy's meaning.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, seed, settings

from raycollect.backends import arrays
from raycollect.core.model import PREFIXES, GroupSpec, Key, OpKind, task_key
from raycollect.core.protocols import Communicator
from raycollect.engine import device_staging
from raycollect.engine.device_staging import memory_of
from raycollect.engine.execution import Execution, Outcome
from raycollect.engine.fusion_buffer import FusionPool
from raycollect.engine.instruments import Instruments
from raycollect.observe import Recorder
from raycollect.planner import Membership, Plan, Request, Topology, decode_program, encode_program, plan
from raycollect.pos import Container, Store, tensors
from tests.pure.communicators import ProcessTeam, Team, ThreadTeam, Worker
from tests.pure.conformance import BACKENDS, is_absent, put_in_place
from tests.pure.empty_scenes import WORLDS, Call, Scene, Shape, Side, arranged, in_order, scenes, value_of, values_of
from tests.pure.fleet import WAIT_S, contain
from tests.pure.meaning import takers
from tests.pure.on_gpu import GpuTeam, gpus
from tests.pure.on_one_gpu import OLD, SharingTeam

ON_GPUS, ON_ONE_GPU = "nccl", "nccl on one GPU"
BACKENDS_HERE = (*BACKENDS, ON_GPUS, ON_ONE_GPU)
"""All, the last two on the fake of cupy."""


# ------------------------------------------------------------------------------- tensors of one rank


class Placed:
    """Where a rank's tensors lie: makes them, writes and reads them.

    Args:
        layout: One of `LAYOUTS`.
        cupy: The fake of cupy, for tensors on the current device; None: they lie in the host's memory.
    """

    def __init__(self, layout: str, cupy: Any = None) -> None:
        self._layout = layout
        self._cupy = cupy

    def make(self, values: Sequence[Any], *, gaps: bool = True) -> list[Any]:
        """Tensors with these values; perhaps with gaps."""
        if self._layout.startswith("one"):
            made = self._cut(values)
        elif self._layout == "every other" and gaps:
            made = [self._zeros((*one.shape, 2), one.dtype)[..., 0] for one in values]
        else:
            made = [self._zeros(one.shape, one.dtype) for one in values]
        if self._layout == "torch" and self._cupy is None:
            made = [arrays.restore(one, "torch") for one in made]
        for tensor, value in zip(made, values, strict=True):
            self.write(tensor, value)
        return made

    def _cut(self, values: Sequence[Any]) -> list[Any]:
        """Cut from one base, one behind the other."""
        room = [-(-one.nbytes // 8) * 8 for one in values]
        shared = self._layout == "one shared base" and self._cupy is None
        base = tensors.zeros(sum(room), "uint8") if shared else self._zeros((sum(room),), np.dtype("uint8"))
        starts = [sum(room[:at]) for at in range(len(room))]
        pairs = zip(starts, values, strict=True)
        return [base[at : at + one.nbytes].view(one.dtype).reshape(one.shape) for at, one in pairs]

    def _zeros(self, shape: Shape, dtype: Any) -> Any:
        return (self._cupy or np).zeros(shape, dtype)

    def write(self, tensor: Any, value: Any) -> None:
        if self._cupy is not None:
            tensor[...] = self._cupy.asarray(value)
        elif math.prod(tensor.shape):
            arrays.memory(tensor)[...] = value  # type: ignore[index]

    def read(self, tensor: Any) -> Any:
        return np.array(tensor.get() if hasattr(tensor, "get") else arrays.memory(tensor))


class Part:
    """One rank's operands of one call: made, written again for the next run, and compared."""

    def __init__(self, call: Call, rank: int, values: tuple[list[Side], list[Side]], placed: Placed) -> None:
        self.call, self._placed = call, placed
        self._given, self._taken = values[0][rank], values[1][rank]
        self._is_root = rank == call.root
        takes = rank in takers(call.kind, len(values[0]), call.root, call.peer) and self._taken is not None
        blank = arranged(self._taken, [np.ones_like(one) for one in in_order(self._taken)]) if takes else None
        self._blank = blank if call.into != "made" else None
        self.src, self._gives = self._made(self._given)
        self.dst, self._takes = self._made(self._blank)
        self._shared: list[Any] = []
        if call.into == "in place":
            self._overlay(rank)

    def _made(self, side: Side) -> tuple[Any, Side]:
        """A value, and its tensors."""
        if side is None:
            return None, None
        if self.call.into == "one tensor" and type(side[0]) is tuple:
            (whole,) = self._placed.make([np.stack(side[0])], gaps=False)
            return whole, [tuple(whole[at : at + 1] for at in range(len(side[0])))]
        made = arranged(side, self._placed.make(in_order(side)))
        return value_of(made, self.call.structure), made

    def _overlay(self, rank: int) -> None:
        """Lets what is written be what is read, where that is allowed."""
        if self._gives is None or (self._takes is None and self._taken is None):
            return
        if self.call.kind in (OpKind.ALLREDUCE, OpKind.REDUCE, OpKind.SCAN, OpKind.EXSCAN):
            self._takes, self._shared = self._gives, in_order(self._gives)
            return
        if self._takes is None:
            return
        pairs = zip(self._gives, self._takes, strict=True)
        found = [put_in_place(self.call.kind, rank, src, dst) for src, dst in pairs]
        self._takes = [dst for dst, _ in found]
        self._shared = [one for _, shared in found for one in shared]
        self.dst = value_of(self._takes, self.call.structure)

    def reset(self) -> None:
        """Writes all of it as it was."""
        for side, values in ((self._takes if self.dst is not None else None, self._blank), (self._gives, self._given)):
            for tensor, value in zip(in_order(side), in_order(values) if side is not None else [], strict=True):
                self._placed.write(tensor, value.reshape(tuple(tensor.shape)))

    def wrong(self, made: Container | None) -> str:
        """What is not as it must be, or ""."""
        for tensor, value in zip(in_order(self._gives), in_order(self._given), strict=True):
            if not any(tensor is other for other in self._shared) and not self._is(tensor, value):
                return "what was only to be read was written"
        taken = list(made.tensors) if made is not None else in_order(self._takes)
        for at, (tensor, value) in enumerate(zip(taken, in_order(self._taken), strict=True) if taken else ()):
            if not self._is(tensor, value):
                return f"tensor {at} is {self._placed.read(tensor).tolist()}, not {value.tolist()}"[:500]
            if made is not None and self.call.into != "one tensor" and tuple(tensor.shape) != value.shape:
                return f"tensor {at} has shape {tuple(tensor.shape)}, not {value.shape}"
        if self._taken is not None and not taken and self.call.kind not in (OpKind.BROADCAST, OpKind.SEND):
            return "nothing was taken"
        return ""

    def _is(self, tensor: Any, value: Any) -> bool:
        found = self._placed.read(tensor)
        return found.dtype == value.dtype and found.reshape(-1).tolist() == value.reshape(-1).tolist()


# ------------------------------------------------------------------------------- what each rank does


def _planned(scene: Scene, spec: GroupSpec) -> Plan:
    """The plan, which all ranks make alike."""
    membership = Membership(
        spec=replace(spec, memory=memory_of(spec.backend)),
        participants=tuple(map(str, range(scene.world))),
        topology=Topology(hosts=(0,) * scene.world),
    )
    requests = []
    for at, call in enumerate(scene.calls):
        gives, takes = values_of(call, scene, at)
        ranks = sorted({call.root, call.peer}) if call.kind is OpKind.SEND else range(scene.world)
        into = takers(call.kind, scene.world, call.root, call.peer) if call.into != "made" else []
        operands = tuple(
            (
                rank,
                None if gives[rank] is None else _key(at, 0),
                _key(at, 1) if rank in into and takes[rank] is not None else None,
            )
            for rank in ranks
        )
        is_inplace = call.into == "in place" and call.kind in (
            OpKind.ALLREDUCE,
            OpKind.REDUCE,
            OpKind.SCAN,
            OpKind.EXSCAN,
        )
        requests.append(
            Request(
                kind=call.kind,
                group=membership.spec,
                operands=operands,
                op=call.op,
                root=call.root,
                peer=call.peer,
                inplace=is_inplace,
                timeout_s=WAIT_S,
            )
        )
    return plan(requests, [membership] * len(requests), staging=scene.staging)


def _key(call: int, side: int) -> Key:
    return task_key((2 * call + side + 1).to_bytes(24, "little"), 1)


def body_scene(communicator: Communicator, scene: Scene, spec: GroupSpec, seqs: Sequence[int]) -> str:
    """Runs a scene on one rank, as often as there are numbers; what is wrong with it, or ""."""
    rank, planned = communicator.rank, _planned(scene, spec)
    if str(rank) not in planned.participants:
        return ""
    position, cupy = planned.participants.index(str(rank)), None
    if spec.backend == "nccl" and rank not in scene.on_host:
        import cupy
    placed = Placed(scene.layout, cupy)
    mine = {at for at, part in enumerate(planned.parts) if rank in part.ranks}
    parts = {at: Part(scene.calls[at], rank, values_of(scene.calls[at], scene, at), placed) for at in sorted(mine)}
    store = Store()
    for at, part in parts.items():
        for side, value in enumerate((part.src, part.dst)):
            if value is not None:
                store.put(_key(at, side), contain(value))
    instruments = Instruments(
        store=store,
        recorder=Recorder(time.monotonic),
        clock=time.monotonic,
        allocate=tensors.allocate,
        staging=FusionPool(),
    )
    wrong = []
    for seq in seqs:  # to the last, whatever is wrong: the others are there, too
        for part in parts.values():
            part.reset()
        outcome = _run(communicator, planned, position, instruments, seq, is_call=scene.is_call)
        if outcome.error is not None:
            raise outcome.error
        made = iter(outcome.outputs)
        for at, part in parts.items():
            said = part.wrong(next(made) if planned.parts[at].outputs(rank) else None)
            wrong += [f"call {at}, run {seqs.index(seq)}: {said}"] if said else []
    return "; ".join(wrong)


def _run(
    communicator: Communicator, planned: Plan, position: int, instruments: Instruments, seq: int, *, is_call: bool
) -> Outcome:
    keys: Any = planned.sources(position)
    store = instruments.store
    return Execution(
        decode_program(encode_program(planned.program(position))),
        keys,
        lambda group_id: communicator,
        instruments,
        seq=seq,
        aborted=lambda: None,
        operands=[store.look(key) for key in keys] if is_call else None,  # type: ignore[misc]
    ).run()


# ------------------------------------------------------------------------------- on all ranks


TeamOf = Callable[[int], Team]


class Teams:
    """The teams of a backend, by their world size."""

    def __init__(self, backend: str, stack: ExitStack) -> None:
        self.backend = backend
        self._stack = stack
        self._workers: list[Worker] = []
        self._made: dict[int, Team] = {}
        if backend in (ON_GPUS, ON_ONE_GPU):
            device_staging._idle.clear()
            stack.callback(device_staging._idle.clear)
            made = gpus(max(WORLDS)) if backend == ON_GPUS else gpus(1, nccl_version=OLD)
            self._fake = stack.enter_context(made)
            stack.callback(self._fake.drain)
        stack.callback(self._close)

    def __getitem__(self, world: int) -> Team:
        if world not in self._made:
            self._made[world] = self._make(world)
        return self._made[world]

    def _make(self, world: int) -> Team:
        if self.backend == ON_GPUS:
            return GpuTeam(world)
        if self.backend == ON_ONE_GPU:
            return SharingTeam(self._fake, world)
        if self.backend != "gloo":  # which holds the GIL while it blocks
            return ThreadTeam(self.backend, world)
        while len(self._workers) < world:
            self._workers.append(Worker())
        return ProcessTeam(self.backend, world, self._workers)

    def forget(self, world: int) -> None:
        """Ends a team in which something went wrong."""
        self._made.pop(world).close()

    def _close(self) -> None:
        for team in self._made.values():
            team.close()
        for worker in self._workers:
            worker.close()


@contextmanager
def teams(backend: str) -> Iterator[Teams]:
    """The teams of a backend; skips the test where it is not there."""
    if backend in BACKENDS and (absent := is_absent(backend)):
        pytest.skip(absent)
    with ExitStack() as stack:
        yield Teams(backend, stack)


def check(found: Teams, scene: Scene) -> None:
    """Runs a scene on all ranks."""
    team = found[scene.world]
    width = _planned(scene, team.spec).width
    seqs = [team.launch().seq for _ in range(2 * width)][::width]
    try:
        said = team.must(body_scene, scene, team.spec, seqs)
    except BaseException:
        found.forget(scene.world)
        raise
    assert not any(said), {rank: text for rank, text in enumerate(said) if text}


def check_draws(found: Teams, examples: int, worlds: Sequence[int]) -> None:
    """Draws so many scenes, the same ones every time, and runs them.

    One that fails is told as it was drawn: where ranks wait for one that has failed, shrinking would take minutes.
    """

    @seed(zlib.crc32(found.backend.encode()))
    @settings(max_examples=examples, database=None, phases=[Phase.generate])
    @given(scene=scenes(worlds, PREFIXES if "nccl" in found.backend else ()))
    def holds(scene: Scene) -> None:
        check(found, scene)

    holds()
