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
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

from raycollect.backends import arrays
from raycollect.core.model import PIECES, GroupSpec, Key, OpKind, ReduceOp, task_key
from raycollect.core.protocols import Communicator
from raycollect.engine import device_staging
from raycollect.engine.device_staging import memory_of
from raycollect.engine.execution import Execution, Outcome
from raycollect.engine.fusion_buffer import FusionPool
from raycollect.engine.instruments import Instruments
from raycollect.observe import Recorder
from raycollect.planner import Plan, Request, Roster, Topology, decode_program, encode_program, plan
from raycollect.pos import Container, Store, tensors
from tests.pure.communicators import ProcessTeam, Team, ThreadTeam, Worker
from tests.pure.conformance import BACKENDS, is_absent, put_in_place
from tests.pure.fleet import WAIT_S, contain
from tests.pure.meaning import KINDS, REDUCTIONS, ROOTED, gives_of, meaning, takers
from tests.pure.mixed import numbers
from tests.pure.on_gpu import GpuTeam, gpus
from tests.pure.on_one_gpu import OLD, SharingTeam

__all__ = ["BACKENDS_HERE", "check_draws", "teams"]

ON_GPUS, ON_ONE_GPU = "nccl", "nccl on one GPU"
BACKENDS_HERE = (*BACKENDS, ON_GPUS, ON_ONE_GPU)
"""All, the last two on the fake of cupy."""

WORLDS = (1, 2, 3, 5)

EMPTY = ((0,), (0, 3), (2, 0))
FULL = ((), (1,), (3,), (7,), (2, 3), (5, 1, 1), (4_999,), (17_011,))
"""The last but one is large enough for kernels in place, the last one too large to be packed."""
DTYPES = ("float64", "float32", "int8", "int32")
OPS = (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX)
LAYOUTS = ("own", "one base", "one shared base", "every other", "torch")
"""How the tensors of a rank lie; of those with one base an empty one begins where another one does."""

STRUCTURES: dict[str, Callable[[Sequence[Any]], Any]] = {
    "list": list,
    "dict": lambda row: {f"name {at}": one for at, one in enumerate(row)},
    "nested": lambda row: {"first": row[0], "others": [tuple(row[1:])]} if row[1:] else [[row[0]]],
}

Shape = tuple[int, ...]
Side = list[Any] | None
"""For each tensor of one of a rank's values an array, or a tuple with one for each piece; None: there is no value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One collective.

    Attributes:
        kind: The operation.
        dtypes: Of each tensor of a value.
        shapes: For each tensor, by giver and taker; where only one of them counts, the other is 0.
        structure: How the tensors make a value; empty: there is one, and it is the value.
        op: For reductions.
        root: The root, or the sender.
        peer: The receiver.
        into: Where results go: ``"made"``, ``"given"``, ``"in place"``; or ``"one tensor"`` that is given, of which
            all pieces are cut, as those are that are read.
    """

    kind: OpKind
    dtypes: tuple[str, ...]
    shapes: tuple[dict[tuple[int, int], Shape], ...]
    structure: str
    op: ReduceOp | None
    root: int
    peer: int
    into: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What all ranks do.

    Attributes:
        world: The number of ranks.
        calls: The calls of one plan.
        layout: How tensors lie.
        staging: See `plan`.
        is_call: Whether ranks give the operands of the only call themselves; else a store has them.
        on_host: The ranks whose tensors lie in the host's memory, of a backend that works on GPUs.
        number: Other values.
    """

    world: int
    calls: tuple[Call, ...]
    layout: str
    staging: int
    is_call: bool
    on_host: frozenset[int]
    number: int


# ------------------------------------------------------------------------------- by chance


@st.composite
def scenes(draw: st.DrawFn, worlds: Sequence[int]) -> Scene:
    """Draws scenes of these world sizes."""
    world = draw(st.sampled_from(worlds))
    possible = [kind for kind in KINDS if kind is not OpKind.BARRIER and (kind is not OpKind.SEND or world > 1)]
    kinds = draw(st.lists(st.sampled_from(possible), min_size=1, max_size=2))
    if draw(st.booleans()):
        kinds += kinds[:1] * 2
    dtypes = draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=2))  # few, so that tensors travel together
    calls = tuple([draw(_calls(kind, world, dtypes)) for kind in kinds])
    return Scene(
        world=world,
        calls=calls,
        layout=draw(st.sampled_from(LAYOUTS)),
        staging=draw(st.sampled_from([32 << 20, 32 << 20, 256, 0])),
        is_call=len(calls) == 1 and draw(st.booleans()),
        on_host=draw(st.frozensets(st.integers(0, world - 1))),
        number=draw(st.integers(0, 99)),
    )


@st.composite
def _calls(draw: st.DrawFn, kind: OpKind, world: int, dtypes: Sequence[str]) -> Call:
    structure = draw(st.sampled_from([*STRUCTURES, ""]))
    count = draw(st.integers(2, 4)) if structure else 1
    root, peer = draw(st.permutations(range(world)))[:2] if world > 1 else (0, -1)
    into = draw(st.sampled_from(_places_of(kind, structure)))
    return Call(
        kind=kind,
        dtypes=tuple(draw(st.lists(st.sampled_from(dtypes), min_size=count, max_size=count))),
        shapes=tuple([draw(_shapes(kind, world, into)) for _ in range(count)]),
        structure=structure,
        op=draw(st.sampled_from(OPS)) if kind in REDUCTIONS else None,
        root=root if kind in (*ROOTED, OpKind.SEND) else -1,
        peer=peer if kind is OpKind.SEND else -1,
        into=into,
    )


def _places_of(kind: OpKind, structure: str) -> list[str]:
    if kind is OpKind.BROADCAST:
        return ["given"]
    if kind in (OpKind.ALLREDUCE, OpKind.REDUCE):
        return ["in place", "made"]
    if kind is OpKind.SEND:
        return ["given", "made"]
    return ["made", "given", "in place", *([] if structure else ["one tensor"])]


@st.composite
def _shapes(draw: st.DrawFn, kind: OpKind, world: int, into: str) -> dict[tuple[int, int], Shape]:
    gives, takes = PIECES.get(kind, (False, False))
    of_one = (kind is OpKind.ALLTOALL or takes, kind is OpKind.ALLTOALL or gives)  # whether the giver, the taker counts
    places = [(a, b) for a in range(world if of_one[0] else 1) for b in range(world if of_one[1] else 1)]
    one = st.one_of(st.sampled_from(EMPTY), st.sampled_from(FULL))
    if into == "one tensor":
        return dict.fromkeys(places, draw(one))
    found = dict(zip(places, draw(st.lists(one, min_size=len(places), max_size=len(places))), strict=True))
    if kind is OpKind.ALLTOALL and into == "in place":  # what i gives j has the shape of what j gives i
        return {(a, b): found[min(a, b), max(a, b)] for a, b in places}
    return found


# ------------------------------------------------------------------------------- values of all ranks


def _values(call: Call, scene: Scene, at: int) -> tuple[list[Side], list[Side]]:
    """By rank what is given, and what is to be taken, in numpy."""
    given, taken = [], []
    for number, (dtype, shapes) in enumerate(zip(call.dtypes, call.shapes, strict=True)):
        make = numbers(np.random.default_rng([scene.number, at, number]), dtype)
        gives = gives_of(call.kind, scene.world, make, lambda a, b, shapes=shapes: shapes[a, b], call.root)
        takes = meaning(call.kind, gives, root=call.root, peer=call.peer, op=call.op)
        given.append([_pieces(one) for one in gives])
        taken.append([_pieces(one) for one in takes])
    return _by_rank(given), _by_rank(taken)


def _pieces(value: Any) -> Any:
    return tuple(map(np.asarray, value)) if isinstance(value, list) else None if value is None else np.asarray(value)


def _by_rank(by_tensor: Sequence[Sequence[Any]]) -> list[Side]:
    rows = [list(row) for row in zip(*by_tensor, strict=True)]
    return [None if row[0] is None else row for row in rows]


def _in_order(side: Side) -> list[Any]:
    """The tensors of a side as they are in its value."""
    if side is None or type(side[0]) is not tuple:
        return list(side or ())
    return [one for row in zip(*side, strict=True) for one in row]


def _as(side: Side, flat: Sequence[Any]) -> Side:
    """Others in the places of a side's tensors; the inverse of `_in_order`."""
    if side is None or type(side[0]) is not tuple:
        return list(flat) if side is not None else None
    return [tuple(flat[at :: len(side)]) for at in range(len(side))]


def _value(side: Side, structure: str) -> Any:
    build = STRUCTURES[structure] if structure else lambda row: row[0]
    assert side is not None
    return [build(row) for row in zip(*side, strict=True)] if type(side[0]) is tuple else build(side)


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
        blank = _as(self._taken, [np.ones_like(one) for one in _in_order(self._taken)]) if takes else None
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
        made = _as(side, self._placed.make(_in_order(side)))
        return _value(made, self.call.structure), made

    def _overlay(self, rank: int) -> None:
        """Lets what is written be what is read, where that is allowed."""
        if self._gives is None or (self._takes is None and self._taken is None):
            return
        if self.call.kind in (OpKind.ALLREDUCE, OpKind.REDUCE):
            self._takes, self._shared = self._gives, _in_order(self._gives)
            return
        if self._takes is None:
            return
        pairs = zip(self._gives, self._takes, strict=True)
        found = [put_in_place(self.call.kind, rank, src, dst) for src, dst in pairs]
        self._takes = [dst for dst, _ in found]
        self._shared = [one for _, shared in found for one in shared]
        self.dst = _value(self._takes, self.call.structure)

    def reset(self) -> None:
        """Writes all of it as it was."""
        for side, values in ((self._takes if self.dst is not None else None, self._blank), (self._gives, self._given)):
            for tensor, value in zip(_in_order(side), _in_order(values) if side is not None else [], strict=True):
                self._placed.write(tensor, value.reshape(tuple(tensor.shape)))

    def wrong(self, made: Container | None) -> str:
        """What is not as it must be, or ""."""
        for tensor, value in zip(_in_order(self._gives), _in_order(self._given), strict=True):
            if not any(tensor is other for other in self._shared) and not self._is(tensor, value):
                return "what was only to be read was written"
        taken = list(made.tensors) if made is not None else _in_order(self._takes)
        for at, (tensor, value) in enumerate(zip(taken, _in_order(self._taken), strict=True) if taken else ()):
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
    roster = Roster(
        spec=replace(spec, memory=memory_of(spec.backend)),
        members=tuple(map(str, range(scene.world))),
        topology=Topology(hosts=(0,) * scene.world),
    )
    requests = []
    for at, call in enumerate(scene.calls):
        gives, takes = _values(call, scene, at)
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
        is_inplace = call.into == "in place" and call.kind in (OpKind.ALLREDUCE, OpKind.REDUCE)
        requests.append(
            Request(
                kind=call.kind,
                group=roster.spec,
                operands=operands,
                op=call.op,
                root=call.root,
                peer=call.peer,
                inplace=is_inplace,
                timeout_s=WAIT_S,
            )
        )
    return plan(requests, [roster] * len(requests), staging=scene.staging)


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
    parts = {at: Part(scene.calls[at], rank, _values(scene.calls[at], scene, at), placed) for at in sorted(mine)}
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
    @settings(max_examples=examples, deadline=None, database=None, phases=[Phase.generate])
    @given(scene=scenes(worlds))
    def holds(scene: Scene) -> None:
        check(found, scene)

    holds()
