"""The reasons for missing operands of programs and captured steps."""

from __future__ import annotations

from dataclasses import dataclass

from raycollect.pos import Absence, State


@dataclass(frozen=True, slots=True)
class MissingOperand:
    """The reason for a missing operand: the fields of the violation."""

    kind: str
    actual: str
    expected: str


# State of the store -> (kind of violation, actual, expected).
_ABSENCES: dict[State, tuple[str, str, str]] = {
    State.ABSENT: (
        "lost",
        "not there: its method never ran here, in this process (a restarted actor has lost what it held)",
        "a value that its method returned",
    ),
    State.FAILED: ("producer_failed", "missing: its method raised {}", "a value"),
    State.BY_VALUE: ("not_tensor", "{}, returned by value", "a tensor, or a list, tuple or dict of tensors"),
    State.FREED: ("freed", "freed", "a tensor that is still held"),
    State.REPLACED: ("replaced", "changed: {}", "tensors of the names, shapes and types that the ref stands for"),
}


def missing(absence: Absence) -> MissingOperand:
    """The reason of an absence from a store."""
    kind, text, expected = _ABSENCES[absence.state]
    return MissingOperand(kind, text.format(absence.detail or "a value that is not kept"), expected)
