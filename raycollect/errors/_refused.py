"""Refusals: nothing ran, every tensor is untouched, the group works on."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from numbers import Integral

from raycollect.errors._base import RaycollectError
from raycollect.errors.text import listed, shown

MOST_S = 1e9
"""The longest time limit, in seconds. The system's own is about nine times that."""

MOST_VIOLATIONS = 100
"""How many violations the message of a refusal lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One reason why a plan was refused.

    Attributes:
        kind: A key of the table `REFUSALS`, such as ``"mismatch"``.
        rank: The rank whose operand is at fault; -1 for none.
        field: The property at fault: ``"shape"``, ``"dtype"``, ``"ref"``, ...
        found: The actual value, as text.
        expected: The expected value, as text.
        actor: The actor of that rank, as ``Class(id)``.
        ref: The hexadecimal id of the ObjectRef.
        call: The call of a batch or captured step, from 0; -1 if there is only one.
        is_step: Whether calls are counted over a captured step, methods included.
        value: The value at fault if it has no ref: the result of a call of a captured step.
    """

    kind: str
    rank: int = -1
    field: str
    found: str
    expected: str = ""
    actor: str = ""
    ref: str = ""
    call: int = -1
    is_step: bool = False
    value: str = ""

    def __str__(self) -> str:
        who = f"rank {self.rank}" if self.rank >= 0 else "the call"
        who += f" ({self.actor})" if self.actor else ""
        who += f", ref {self.ref}" if self.ref else ""
        who += f", {self.value}" if self.value else ""
        if self.call >= 0:
            who = f"call {self.call} of the {'step' if self.is_step else 'batch'}, {who}"
        text = f"{who}: {self.field} is {self.found}"
        return f"{text}, expected {self.expected}" if self.expected else text


class RefusedError(RaycollectError):
    """The plan was refused before anything ran; tensors are untouched and the group stays usable.

    Attributes:
        op: The operation, such as ``"allreduce"``.
        group_name: The group of the call.
        violations: All reasons.
    """

    op: str
    group_name: str
    violations: tuple[Violation, ...]
    cure = "correct the operands and call again; no tensor was touched"

    def _text(self) -> str:
        reasons = listed(self.violations, "\n  - ", MOST_VIOLATIONS)
        where = f" on group {self.group_name!r}" if self.group_name else ""
        return f"{self.op}{where} was refused:\n  - {reasons}"


class ForeignRefError(RefusedError):
    """A ref that was not returned by an actor method."""

    cure = (
        "pass the ObjectRef that a method of a CollectiveParticipant returned: not its value, and no ref of ray.put or "
        "of a task"
    )


class NotAParticipantError(RefusedError):
    """An actor without the mixin."""

    cure = "let the actor's class inherit raycollect.CollectiveParticipant"


class NotAMemberError(RefusedError):
    """A ref whose actor is outside the group."""

    cure = "pass refs of the group's members, or declare a group that holds this actor"


class DuplicateActorError(RefusedError):
    """Two refs of one actor where each rank has one operand."""

    cure = "pass exactly one ref per actor"


class MissingMemberError(RefusedError):
    """A member of the group without a ref."""

    cure = "pass one ref for each rank of the group, or declare a smaller group"


class NotATensorError(RefusedError):
    """A ref whose value is no tensor kept in the Python Object Store."""

    cure = (
        "give a numpy array or a torch tensor, or a list, tuple or dict of them; where a ref is given, its method has "
        "to return that alone, and must not be marked by_value: return a loss beside it from another method"
    )

    def _advice(self) -> str:
        return "give what was expected, and call again" if self.op.endswith("_object") else self.cure


class MismatchError(RefusedError):
    """The ranks' operations or arguments differ."""

    cure = "make op, reduce op, root, dtype and shape equal on all ranks; no tensor was touched"

    def _advice(self) -> str:
        if not any(" of output" in violation.field or " of input" in violation.field for violation in self.violations):
            return self.cure
        shapes = "each output the shape of what is given to it: output i of a list that of what rank i gives"
        return f"give all pieces one dtype, and {shapes}; no tensor was touched"


class ReadOnlyError(RefusedError):
    """An operand that would be written is read-only."""

    cure = (
        "use a writable array, such as a copy by np.array(x): what Ray passes to a method or gives for a ref is a "
        "read-only view of a shared object; with inplace=False calls that take refs leave it as it is"
    )


class AliasError(RefusedError):
    """Operands overlap in memory, so that the result would be undefined."""

    cure = "use separate buffers for operands that the plan writes"


class InvalidArgumentError(RefusedError, ValueError):
    """An invalid argument: a root, a rank, a reduce op, a time limit; a ValueError as well."""

    cure = "correct that argument and call again; no tensor was touched"


class LayoutError(RefusedError):
    """Layouts that do not fit each other, or tensors that do not fit their layouts."""

    cure = "correct the layouts, or give tensors that fit them; no tensor was touched"


class ConcurrentCallError(RefusedError):
    """Several threads of a rank called a group at once, so that the order of calls may differ between ranks."""

    cure = (
        "let each thread use a group of its own; or let a call begin after those of other threads have ended, in an "
        "order that is the same on all ranks; no tensor was touched"
    )


class UnsupportedError(RefusedError):
    """Neither the backend nor numpy supports it."""

    cure = "use what was expected, or another operation, reduce op, dtype, device or backend"


class TensorFreedError(RefusedError):
    """A tensor that was used after it was freed."""

    cure = "call the producing method again, or free it later"


class TensorLostError(RefusedError):
    """A tensor whose holder has died, was restarted, or never ran the method."""

    cure = "keep a handle of the actor as long as its refs are used; call the producing method again"


class TensorDirtyError(RefusedError):
    """A tensor that a failed collective left half-written."""

    cure = "write it whole again (a collective that overwrites it, or raycollect.mark_written inside its actor)"


class TensorReplacedError(RefusedError):
    """A list or dict of tensors whose names, shapes or types have changed since its ref was made."""

    cure = "return it from a method again and use the new ref, or write into its tensors: w['a'] += 1"


class ProducerFailedError(RefusedError):
    """The method that should have returned an operand raised; its exception is the cause of this one."""

    cure = "see the cause; the other ranks did nothing and stay usable"


class AllocationError(RefusedError):
    """An output or a staging buffer could not be allocated."""

    cure = "free memory on that participant, or use smaller tensors"


REFUSALS: dict[str, type[RefusedError]] = {
    "foreign": ForeignRefError,
    "not_participant": NotAParticipantError,
    "not_member": NotAMemberError,
    "duplicate": DuplicateActorError,
    "missing": MissingMemberError,
    "not_tensor": NotATensorError,
    "mismatch": MismatchError,
    "read_only": ReadOnlyError,
    "alias": AliasError,
    "argument": InvalidArgumentError,
    "layout": LayoutError,
    "concurrent": ConcurrentCallError,
    "unsupported": UnsupportedError,
    "freed": TensorFreedError,
    "lost": TensorLostError,
    "dirty": TensorDirtyError,
    "replaced": TensorReplacedError,
    "producer_failed": ProducerFailedError,
    "allocation": AllocationError,
}
"""Maps a kind to the error that is raised if all violations are of that kind."""


def wrong_argument(field: str, actual: str, expected: str) -> Violation:
    """Returns a violation caused by an argument of the call itself."""
    return Violation(kind="argument", field=field, found=actual, expected=expected)


def wrong_time_limit(timeout_s: object, *, also: Collection[float | None] = (None,)) -> list[Violation]:
    """Returns the violation by a time limit that is neither a positive, finite number of seconds nor one of `also`."""
    if is_time_limit(timeout_s) or (isinstance(timeout_s, (int, float, type(None))) and timeout_s in also):
        return []
    if not isinstance(timeout_s, int) and isinstance(timeout_s, Integral):  # numpy's; last, as that takes longer
        return wrong_time_limit(int(timeout_s), also=also)
    return [wrong_argument("timeout_s", shown(timeout_s), f"a positive, finite number of seconds, at most {MOST_S:g}")]


def wrong_wait(timeout_s: object) -> list[Violation]:
    """Returns the violation by the time limit of a wait. None and inf wait without a limit; 0 and less only look."""
    is_over = isinstance(timeout_s, (int, float)) and -math.inf < timeout_s <= 0  # a deadline minus the time now
    return [] if is_over else wrong_time_limit(timeout_s, also=(None, math.inf))


def is_time_limit(value: object, per_s: int = 1) -> bool:
    """Returns whether a value is a time limit in units of which a second has `per_s`."""
    return isinstance(value, (int, float)) and 0 < value <= MOST_S * per_s


def refuse(op: str, violations: Iterable[Violation]) -> None:
    """Raises the error of these violations, if there are any."""
    if reasons := tuple(violations):
        raise refusal(op, "", reasons)


def wrong_flags(**flags: object) -> list[Violation]:
    """Returns the violations caused by flags, given by name, that are not True, False, 0, 1 or None."""
    return [wrong_argument(name, shown(value), "True or False") for name, value in flags.items() if not _is_flag(value)]


def _is_flag(value: object) -> bool:
    if isinstance(value, (int, Integral)):
        return value in (0, 1)
    return value is None or type(value).__name__ in ("bool", "bool_")  # numpy's, which this module does not import


def wrong_layout(field: str, actual: str, expected: str, rank: int = -1) -> Violation:
    """Returns a violation caused by a layout, or by a tensor that does not fit one."""
    return Violation(kind="layout", rank=rank, field=field, found=actual, expected=expected)


def refusal(op: str, group_name: str, violations: tuple[Violation, ...]) -> RefusedError:
    """Builds the most specific error of the table `REFUSALS` for one or more violations."""
    kinds = {violation.kind for violation in violations}
    cls = REFUSALS[kinds.pop()] if len(kinds) == 1 else RefusedError
    return cls(op=op, group_name=group_name, violations=violations)
