"""The contents of an explanation as plain values; `explain` makes them, `render` shows them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """What some ranks do for a call: their steps, in order."""

    ranks: tuple[int, ...]
    steps: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One algorithm that a call may take.

    Attributes:
        name: Its name.
        at_least: The least bytes per rank from which it is taken.
        time_s: Its time for the bytes of the call and those that travel with it, in seconds.
        nbytes_inside: The bytes that all ranks together would move inside hosts for this call.
        nbytes_between: The same between hosts.
    """

    name: str
    at_least: int
    time_s: float
    nbytes_inside: int
    nbytes_between: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Brought:
    """What some ranks copy to the memory where the backend works, and back, as their tensors lie elsewhere.

    Attributes:
        ranks: The ranks, ascending.
        device: Where their tensors lie: ``"cuda:0"``.
        memory: Where the backend works: ``"cpu"``, ``"cuda"``.
        nbytes_there: The bytes that each of them copies there.
        nbytes_back: The bytes that each of them copies back.
    """

    ranks: tuple[int, ...]
    device: str
    memory: str
    nbytes_there: int
    nbytes_back: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One call.

    Attributes:
        call: Its place in the batch, from 0.
        op: The operation, with its reduce op and root.
        group: The group's name.
        backend: Its backend.
        chosen: Why the group has this backend, if nobody named one; or empty.
        ranks: The ranks that take part.
        tensors: How many tensors a rank gives.
        dtypes: Their distinct dtypes.
        nbytes: The most bytes that a rank gives.
        after: The calls that must run before it, because one of the two writes what the other uses.
        bundle: Its place in the execution order; calls with the same place run together.
        packed: How many tensors of its bundle travel packed, of how many, and in how many kernels.
        together: How many tensors of its bundle the backend runs with one synchronization of the ranks.
        algorithm: The name of the algorithm taken.
        why: Why it is taken.
        bits: What is promised about the bits of a reduction (P7); empty for other operations.
        ways: All algorithms that it could take, in the planner's order.
        launches: The launches of the plan in which it runs; 0 is that of the agreement.
        acts: What the ranks do.
        made_nbytes: The most bytes of output that are made on a rank.
        scratch_nbytes: The most bytes of scratch that are made on a rank.
        brought: What is copied to where the backend works, and back.
        begins_s: When its bundle begins, in seconds after the agreement.
        time_s: How long its bundle takes, in seconds.
    """

    call: int
    op: str
    group: str
    backend: str
    chosen: str
    ranks: tuple[int, ...]
    tensors: int
    dtypes: tuple[str, ...]
    nbytes: int
    after: tuple[int, ...]
    bundle: int
    packed: tuple[int, int, int]
    together: int
    algorithm: str
    why: str
    bits: str
    ways: tuple[Way, ...]
    launches: tuple[int, ...]
    acts: tuple[Act, ...]
    made_nbytes: int
    scratch_nbytes: int
    brought: tuple[Brought, ...]
    begins_s: float
    time_s: float

    @property
    def way(self) -> Way:
        """The algorithm that is taken."""
        return next(way for way in self.ways if way.name == self.algorithm)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A bundle on the time line; times are in seconds after the agreement."""

    label: str
    calls: tuple[int, ...]
    begins_s: float
    ends_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """The time line of participants (by position) that take part in the same bundles."""

    participants: tuple[int, ...]
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The most memory that a participant needs beyond the operands, in bytes.

    Attributes:
        outputs: What is made for the user.
        scratch: What is made for the steps only.
        packing: The staging of tensors that travel packed.
        stand_ins: Copies, where the backends work, of tensors that lie elsewhere.
        chunks: For each group: (its name, the chunks of its backend; -1: unknown).
    """

    outputs: int
    scratch: int
    packing: int
    stand_ins: int
    chunks: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a call or a batch will do, as plain values.

    Attributes:
        name: The operation, or ``"batch"``.
        participants: How many processes take part; each gets one message.
        door: Where they agree: the name of a group, or ``"the controller"``.
        rounds: How many rounds of agreement there are.
        launches: How many launches there are, that of the agreement included.
        staging: The bytes in which tensors may travel packed; 0: none does.
        rows: The calls.
        lanes: The time line: when the bundles run.
        memory: The memory needed beyond the operands.
        time_s: The time of all calls after the agreement, in seconds.
        nbytes_inside: The bytes moved inside hosts, by all ranks together.
        nbytes_between: The same between hosts.
    """

    name: str
    participants: int
    door: str
    rounds: int
    launches: int
    staging: int
    rows: tuple[Row, ...]
    lanes: tuple[Lane, ...]
    memory: Memory
    time_s: float
    nbytes_inside: int
    nbytes_between: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Invoked:
    """A method call of a captured step.

    Attributes:
        call: Its place among all calls of the step, from 0.
        actor: The actor.
        method: The method's name.
        after: The calls whose results it takes.
    """

    call: int
    actor: str
    method: str
    after: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Methods:
    """A stage of a captured step: method calls with no collective between them.

    Attributes:
        calls: The calls, in order; those of different actors run at the same time.
        fixed: How many refs are among their arguments.
    """

    calls: tuple[Invoked, ...]
    fixed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What a run of a captured step will do, as plain values.

    Attributes:
        participants: How many processes take part; each gets one message per run.
        calls: How many calls there are, of methods and of collectives.
        stages: In order: method calls, or the report of a plan; calls are numbered over the whole step.
        fixed: For each stage, how many refs are its operands and arguments: they are the same in every run.
        launches: How many launches the plans have.
        memory: The most that a run needs beyond the operands: outputs stay until the next run.
        time_s: The time of all plans, each after its agreement, in seconds; without the methods.
        nbytes_inside: The bytes moved inside hosts, by all ranks together.
        nbytes_between: The same between hosts.
    """

    participants: int
    calls: int
    stages: tuple[Methods | Report, ...]
    fixed: tuple[int, ...]
    launches: int
    memory: Memory
    time_s: float
    nbytes_inside: int
    nbytes_between: int
