"""What one participant does in each run of a captured step: values that travel to it once, when the step is captured.

A run works on slots. The first ones hold what does not change from run to run: the values of refs, which the
participant pins. The others are filled in the run: by its arguments, by what methods return, and by what collectives
make. Actions are done in order; every participant has the plans of a step in the same order, so no two of them can wait
for each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgpack

from raycollect.errors import ProtocolError
from raycollect.model import Key

__all__ = [
    "CAPTURE_NBYTES",
    "Collective",
    "Given",
    "Invocation",
    "Routine",
    "captured_key",
    "decode_routine",
    "encode_routine",
]

CAPTURE_NBYTES = 16
"""The bytes of a capture's id."""

VERSION = 1


def captured_key(capture: bytes, run: int, step: int) -> Key:
    """The key of what one call of a capture gives in one run: it names the value in errors, and keys never meet.

    Args:
        capture: The capture's id.
        run: The run, from 1; 0: whatever the run, as in plans.
        step: The place of the call in the capture.
    """
    return Key(capture + run.to_bytes(8, "little") + step.to_bytes(4, "little"))


@dataclass(frozen=True, slots=True)
class Given:
    """An argument of a method that is the same in each run.

    Attributes:
        packed: What `payload.pack_value` made of it.
    """

    packed: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """A method call.

    Attributes:
        step: Its place among all calls of the capture, from 0.
        method: The method's name.
        args: The arguments: a slot, or `Given`.
        kwargs: (name, the same).
        slot: Where what it returns is put.
    """

    step: int
    method: str
    args: tuple[int | Given, ...]
    kwargs: tuple[tuple[str, int | Given], ...]
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """This participant's half of a plan: one collective, or several that were recorded with no method call between.

    Attributes:
        step: The place of its first call among all calls of the capture.
        offset: Its launches take the numbers from the run's own plus this.
        first: The place of its first request among those of all plans of the capture.
        program: What `planner.encode_program` made.
        inputs: The slots of its operands, in the order of the program's keys.
        outputs: The slots of what it makes, in the order of `Outcome.outputs`.
    """

    step: int
    offset: int
    first: int
    program: bytes
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Routine:
    """What one participant does in each run.

    Attributes:
        capture: The capture's id, 16 random bytes.
        actions: What it does, in order.
        slots: How many slots there are.
        refs: How many of them, the first ones, hold the values of refs.
        arguments: The slots that take the run's arguments, in the order in which they come.
        returns: The slots whose values are given back, in order.
        keys: The key of each slot; run 0 where it differs from run to run.
        numbered: Whether the capture has several requests, so that what is wrong says in which one.
    """

    capture: bytes
    actions: tuple[Invocation | Collective, ...]
    slots: int
    refs: int
    arguments: tuple[int, ...]
    returns: tuple[int, ...]
    keys: tuple[Key, ...]
    numbered: bool


def encode_routine(routine: Routine) -> bytes:
    """Writes a routine; the inverse of `decode_routine`."""
    r = routine
    actions = [_plain_invocation(one) if isinstance(one, Invocation) else _plain_collective(one) for one in r.actions]
    packed: bytes = msgpack.packb(
        (VERSION, r.capture, actions, r.slots, r.refs, r.arguments, r.returns, r.keys, r.numbered)
    )
    return packed


def decode_routine(data: bytes) -> Routine:
    """Reads a routine.

    Raises:
        ProtocolError: The bytes are no routine of this version.
    """
    try:
        values: list[Any] = msgpack.unpackb(data, use_list=False)
        if values[0] != VERSION:
            raise ProtocolError(
                detail=f"a captured step of version {values[0]}, this process reads {VERSION}: driver and actors must "
                "run the same raycollect"
            )
        _, capture, actions, slots, refs, arguments, returns, keys, numbered = values
        return Routine(
            capture=capture,
            actions=tuple(map(_action, actions)),
            slots=slots,
            refs=refs,
            arguments=arguments,
            returns=returns,
            keys=tuple(map(Key, keys)),
            numbered=numbered,
        )
    except (ValueError, TypeError, LookupError, msgpack.UnpackException) as exc:
        raise ProtocolError(detail=f"malformed routine: {exc}") from exc


def _plain_invocation(one: Invocation) -> Any:
    kwargs = [(name, _plain_argument(value)) for name, value in one.kwargs]
    return one.step, one.method, [_plain_argument(value) for value in one.args], kwargs, one.slot


def _plain_argument(value: int | Given) -> Any:
    return value.packed if isinstance(value, Given) else value


def _plain_collective(one: Collective) -> Any:
    return one.step, one.offset, one.first, one.program, one.inputs, one.outputs


def _action(values: Any) -> Invocation | Collective:
    if isinstance(values[1], str):
        step, method, args, kwargs, slot = values
        return Invocation(
            step=step,
            method=method,
            args=tuple(map(_argument, args)),
            kwargs=tuple((name, _argument(value)) for name, value in kwargs),
            slot=slot,
        )
    step, offset, first, program, inputs, outputs = values
    return Collective(step=step, offset=offset, first=first, program=program, inputs=inputs, outputs=outputs)


def _argument(value: Any) -> int | Given:
    return Given(value) if isinstance(value, bytes) else value
