"""All tasks of one program on this participant: their operands, what is wrong, and what they bring to the door."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from raycollect.agreement import encode_arrivals, is_batch
from raycollect.backends import arrays
from raycollect.backends.arrays import DeviceArray
from raycollect.door import Arrival, Side, Spec, Verdict, encode_arrival
from raycollect.errors import RaycollectError, Violation
from raycollect.gpu_operands import GpuOperands
from raycollect.model import PIECES, Kernel, Key, OpKind
from raycollect.operands import Operands
from raycollect.packing import Item, room
from raycollect.planner import Domain, Program, Role
from raycollect.pos import Container, Range, Store
from raycollect.pos.extents import Extents
from raycollect.staging import CUDA, StandIns

__all__ = ["Missing", "Tasks"]

_EVERYWHERE = [(0, 1 << 64)]


@dataclass(frozen=True, slots=True)
class Missing:
    """Why there is no operand.

    Attributes:
        kind: The kind of the violation.
        found: What was found.
        expected: What would have been right.
    """

    kind: str
    found: str
    expected: str


class Tasks:
    """The tasks of one run of a program.

    Args:
        program: The program.
        allocate: Makes a tensor; see `Instruments`.
        keys: The keys of the program.
        given: Whether an imperative call gave the operands itself.
        home_of: Says where a group works, see `staging.home_of`.

    Attributes:
        operands: Those of each task.
        stand_ins: What stands for tensors that lie elsewhere than the backends work; None: all lie there.
    """

    def __init__(
        self, program: Program, allocate: Any, keys: Sequence[Key], *, given: bool, home_of: Callable[[Domain], str]
    ) -> None:
        self.program = program
        self._home_of = home_of
        self._batch = is_batch(program)
        self._whole: dict[int, list[Range]] = {}  # what each task writes whole, where anything is half-written
        self.operands: list[Operands] = []
        self.stand_ins: StandIns | None = None
        for task in program.tasks:
            refs = () if given else tuple(keys[n] if n >= 0 else None for n in task.inputs)
            share = program.shares[task.share]
            if share.template.is_listed:
                home = partial(home_of, share.domains[0])
                self.operands.append(GpuOperands(share, allocate, home, given=given, keys=refs))
            else:
                self.operands.append(Operands(share, allocate, given=given, keys=refs))

    @property
    def has_violations(self) -> bool:
        """Whether anything is wrong so far."""
        return any(operands.violations for operands in self.operands)

    def violate(self, violations: Sequence[Violation]) -> None:
        """Notes that something is wrong, for the first task to tell."""
        self.operands[0].violations += violations

    def made(self) -> tuple[Container, ...]:
        """What was made for the user, in the order of the tasks."""
        return tuple([one for operands in self.operands for one in operands.made()])

    # ------------------------------------------------------------------------------------------ before the door

    def ready(self, turn: int, found: Sequence[Container | Missing], store: Store) -> None:
        """Binds, makes and checks the buffers of the tasks that are first brought in a round of the door."""
        dirt = self._batch and store.is_dirty(_EVERYWHERE)
        for at, (task, operands) in enumerate(zip(self.program.tasks, self.operands, strict=True)):
            if task.round != turn:
                continue
            inputs = iter(task.inputs)
            for index, buffer in enumerate(operands.share.template.buffers):
                if buffer.role is not Role.OPERAND:
                    operands.make(index)
                    continue
                n = next(inputs)
                one = found[n] if n >= 0 else next(iter(self.operands[-1 - n].made()), None)
                if isinstance(one, Missing):
                    operands.violate(one.kind, "operand", one.found, one.expected, index)
                    one = None
                operands.bind(index, one)
            operands.check(store, self._written_before(at) if dirt else None)
            if 0 < self.program.staging < _LARGEST_ELEMENT:
                operands.check_staging(self.program.staging)
            if dirt:
                self._whole[at] = operands.dense()

    def _written_before(self, at: int) -> Extents:
        """What tasks before one write whole, by the order of the calls: the rounds of the door have another."""
        return Extents(*(span for other, spans in self._whole.items() if other < at for span in spans))

    def learn(self, turn: int, verdicts: Mapping[int, Verdict]) -> None:
        """Makes the outputs that follow from what was brought to a round."""
        for task, operands in zip(self.program.tasks, self.operands, strict=True):
            if task.round == turn and operands.share.template.is_learned:
                _learn(operands, verdicts[task.request].specs)

    def arrival(self, turn: int) -> bytes:
        """What this participant brings to a round."""
        if not self._batch:
            return _arrival(self.operands[0])
        brought = {
            task.request: _arrival(operands)
            for task, operands in zip(self.program.tasks, self.operands, strict=True)
            if task.round == turn
            or (task.round == turn - 1 and operands.share.template.is_learned)
            or operands.violations  # found between the rounds
        }
        return encode_arrivals(brought, conflict=self._conflict())

    def _conflict(self) -> bool:
        """Whether keys that the plan took for different memory are not, and tasks of them could be reordered."""
        if len(self.operands) < 2:
            return False
        users: dict[int, list[tuple[int, bool]]] = {}  # key -> who uses it, and whether it is written there
        spans = []
        for number, (task, operands) in enumerate(zip(self.program.tasks, self.operands, strict=True)):
            inputs = iter(task.inputs)
            for index, bound, written in operands.uses:
                if operands.share.template.buffers[index].role is not Role.OPERAND:
                    continue  # made for this plan, so nobody else's
                key = next(inputs)
                if key not in users:
                    spans += [(*arrays.byte_range(array), key, array) for array in bound.arrays]
                users.setdefault(key, []).append((number, written))
        spans.sort(key=_start)
        for at, (_, stop, key, array) in enumerate(spans):
            for later in range(at + 1, len(spans)):
                start, _, other, overlapping = spans[later]
                if start >= stop:
                    break
                if key != other and self._may_swap(users[key], users[other]) and arrays.overlap(array, overlapping):
                    return True
        return False

    def _may_swap(self, some: Sequence[tuple[int, bool]], others: Sequence[tuple[int, bool]]) -> bool:
        """Whether a task of the first and one of the second, one of which writes, are in no order of the plan's."""
        return any(
            one != other and (writes or also_writes) and not self._are_ordered(*sorted((one, other)))
            for one, writes in some
            for other, also_writes in others
        )

    def _are_ordered(self, first: int, second: int) -> bool:
        """Whether the plan knows by itself that the second task comes after the first."""
        tasks = self.program.tasks
        if -1 - first in tasks[second].inputs:
            return True
        shared = set(tasks[first].inputs) & set(tasks[second].inputs)
        return any(key in shared for at in (first, second) for key in self._written_by(at))

    def _written_by(self, at: int) -> list[int]:
        operands, buffers = self.operands[at], self.program.shares[self.program.tasks[at].share].template.buffers
        indices = [index for index, buffer in enumerate(buffers) if buffer.role is Role.OPERAND]
        written = {index for index, _, is_written in operands.uses if is_written}
        return [n for n, index in zip(self.program.tasks[at].inputs, indices, strict=True) if index in written]

    # ------------------------------------------------------------------------------------------ staging

    def lift(self) -> None:
        """Makes what stands for tensors that lie elsewhere than the backends work, where there are any.

        Raises:
            MemoryError: There is no memory for it.
        """
        if not any(map(_may_be_elsewhere, self.operands)):
            return
        domains = {domain for share in self.program.shares for domain in share.domains if domain.memory}
        if not domains:
            return
        stand_ins = StandIns({domain: self._home_of(domain) for domain in domains})
        for operands in self.operands:
            share = operands.share
            for step in (step for way in share.template.ways for step in way):
                domain = share.domains[step.level]
                if isinstance(step.kind, OpKind) and domain.rank in (step.ranks or domain.ranks):
                    for src, dst in operands.pairs(step):
                        stand_ins.side(src, domain)
                        stand_ins.side(dst, domain)
        self.stand_ins = stand_ins if len(stand_ins) else None

    def first(self) -> Kernel | None:
        """The kernel that the backend may prepare before the door: what runs first whatever the others bring."""
        program = self.program
        if self._batch or program.rounds > 1 or len(program.bundles[0].base) > 1 or program.bundles[0].base[0]:
            return None
        (operands,) = self.operands
        steps = operands.share.template.steps
        if not steps or steps[0].at:
            return None
        step, pairs = steps[0], operands.pairs(steps[0])
        if len(pairs) != 1:  # several are packed, or run together
            return None
        src, dst = pairs[0]
        if not isinstance(step.kind, OpKind) or not operands.fit(src, dst):
            return None
        if self.stand_ins is not None:
            domain = operands.share.domains[step.level]
            src, dst = self.stand_ins.side(src, domain), self.stand_ins.side(dst, domain)
        return Kernel(kind=step.kind, src=src, dst=dst, op=step.op, peer=step.peer)

    def room(self) -> int:
        """The bytes of staging that the tasks may take here at a time, by what they hold here; 0: none is packed."""
        if not self.program.staging or (not self._batch and self.operands[0].is_one):
            return 0
        most = 0
        for bundle in self.program.bundles:
            tasks = [self.operands[at] for at in bundle.tasks]
            for step in (step for way in tasks[0].share.template.ways for step in way):
                kind, pairs = step.kind, [pair for operands in tasks for pair in operands.pairs(step)]
                if len(pairs) < 2 or not isinstance(kind, OpKind):
                    continue
                if self.stand_ins is not None:
                    side, domain = self.stand_ins.side, tasks[0].share.domains[step.level]
                    pairs = [(side(src, domain), side(dst, domain)) for src, dst in pairs]
                most = max(most, sum(room(kind, Item(src, dst)) for src, dst in pairs))
        return min(most, self.program.staging)

    @property
    def ranges(self) -> list[Range]:
        """The addresses of all that the tasks use."""
        bounds = [bound for operands in self.operands for _, bound, _ in operands.uses]
        return [arrays.byte_range(array) for bound in bounds for array in bound.arrays]

    @property
    def is_repeatable(self) -> bool:
        """Whether nothing is made: then a run on the same operands does the same again."""
        shares = self.program.shares
        return self.program.rounds == 1 and all(
            buffer.role is Role.OPERAND for share in shares for buffer in share.template.buffers
        )


_LARGEST_ELEMENT = 16
"""The bytes of the widest element that there is: a complex128."""


def _arrival(operands: Operands) -> bytes:
    spec = operands.spec()
    if not operands.share.domains[0].memory:
        spec = replace(spec, one_device=True)
    if operands.violations:
        return encode_arrival(Arrival(spec=spec, violations=tuple(operands.violations)))
    return _ready_arrival(spec)


@lru_cache(maxsize=256)
def _ready_arrival(spec: Spec) -> bytes:
    return encode_arrival(Arrival(spec=spec))


def _may_be_elsewhere(operands: Operands) -> bool:
    """Whether a task may have a tensor that does not lie where its backend works."""
    for domain in operands.share.domains:
        if domain.memory == CUDA:
            return True
    for bound in operands.buffers:
        if bound is not None:
            for array in bound.arrays:
                if type(array) is DeviceArray:
                    return True
    return False


def _learn(operands: Operands, specs: Sequence[Spec]) -> None:
    """Makes outputs that follow from what others give: on the devices of what this rank gives, if it gives anything."""
    mine = operands.spec().gives
    try:
        operands.learn([_brought_to(spec, mine) for spec in specs] if mine is not None else specs)
    except RaycollectError:
        raise
    except Exception as exc:  # noqa: BLE001 - a device that is not here: of the library that makes the tensor
        index = next(at for at, one in enumerate(operands.share.template.buffers) if one.role is Role.LEARNED)
        expected = "the giver's kind of device here too, or an output that is there already"
        operands.violate("allocation", "output", f"{type(exc).__name__}: {exc}", expected, index)


def _brought_to(spec: Spec, mine: Side) -> Spec:
    """What a rank gives, as if it lay where another rank's tensors do: each tensor where that one's of its place is."""
    gives = spec.gives
    if gives is None or len({one.device for side in (gives, mine) for one in side.tensors}) < 2:
        return spec
    pieces = len(mine.structure.items) if PIECES.get(OpKind(spec.op), (False, False))[0] else 1
    row = mine.tensors[: len(mine.tensors) // pieces]
    infos = tuple([info.beside(row[at % len(row)]) for at, info in enumerate(gives.tensors)])
    return replace(spec, gives=replace(gives, tensors=infos))


def _start(span: tuple[int, int, int, Any]) -> tuple[int, int]:
    return span[:2]
