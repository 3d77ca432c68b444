"""Why a participant has no operand where a program or a captured step needs one."""

from __future__ import annotations

from dataclasses import dataclass

from raycollect.pos import Absence, State


@dataclass(frozen=True, slots=True)
class MissingOperand:
    """Why there is no operand: the fields of the violation."""

    kind: str
    found: str
    expected: str


# State of the store -> (kind of violation, what was found, what was expected).
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


def missing(found: Absence) -> MissingOperand:
    """Why a store has no operand."""
    kind, text, expected = _ABSENCES[found.state]
    return MissingOperand(kind, text.format(found.detail or "a value that is not kept"), expected)
