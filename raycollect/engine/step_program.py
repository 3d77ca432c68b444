"""What one participant does in each run of a captured step; sent to it once, when the step is captured.

A run works on slots. The first ones hold what does not change from run to run: the values of refs, which the
participant pins. The run fills the others: from its arguments, from what methods return, and from what collectives
make. Actions run in order; every participant has the plans of a step in the same order, so no two can deadlock.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import msgpack

from raycollect.core.model import Key
from raycollect.errors import ProtocolError

CAPTURE_NBYTES = 16  # the bytes of a capture's id
VERSION = 1


def captured_key(capture: bytes, run: int, step: int) -> Key:
    """The key of what one call of a capture makes in one run: it names the value in errors, and is unique.

    Runs count from 1; 0: any run, as in plans. `step` is the place of the call in the capture.
    """
    return Key(capture + run.to_bytes(8, "little") + step.to_bytes(4, "little"))


@dataclass(frozen=True, slots=True)
class Given:
    """An argument of a method that is the same in each run, as `pack_value` wrote it."""

    packed: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """A method call; arguments are slots, or `Given`."""

    step: int  # its place among all calls of the capture, from 0
    method: str
    args: tuple[int | Given, ...]
    kwargs: tuple[tuple[str, int | Given], ...]
    slot: int  # for what it returns


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """This participant's half of a plan: one collective, or several that were recorded with no method call between."""

    step: int  # the place of its first call among all calls of the capture
    offset: int  # its launches count from the run's number plus this
    first: int  # the place of its first request among those of all plans of the capture
    program: bytes  # as `planner.encode_program` wrote it
    inputs: tuple[int, ...]  # slots of its operands, in the order of the program's keys
    outputs: tuple[int, ...]  # slots of what it makes, in the order of `Outcome.outputs`


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProgram:
    """The actions of one participant in each run."""

    capture: bytes  # the capture's id, 16 random bytes
    actions: tuple[Invocation | Collective, ...]
    slots: int  # how many there are
    refs: int  # how many slots, from the first on, hold the values of refs
    arguments: tuple[int, ...]  # slots of the run's arguments, in order
    returns: tuple[int, ...]  # slots whose values are given back, in order
    keys: tuple[Key, ...]  # of each slot; run 0 where it differs from run to run
    numbered: bool  # the capture has several requests, so that violations say in which one


def encode_step_program(step_program: StepProgram) -> bytes:
    """Writes a step program, its classes by their fields in order; the inverse of `decode_step_program`."""
    packed: bytes = msgpack.packb((VERSION, *_plain(step_program)), default=_plain)
    return packed


def decode_step_program(data: bytes) -> StepProgram:
    """Reads a step program; raises ProtocolError on other bytes, or another version."""
    try:
        values: list[Any] = msgpack.unpackb(data, use_list=False)
        if values[0] != VERSION:
            raise ProtocolError(
                detail=f"a captured step of version {values[0]}, this process reads {VERSION}: driver and actors must "
                "run the same raycollect"
            )
        named = _named(StepProgram, values[1:])
        named["actions"] = tuple(map(_action, named["actions"]))
        named["keys"] = tuple(map(Key, named["keys"]))
        return StepProgram(**named)
    except (ValueError, TypeError, LookupError, msgpack.UnpackException) as exc:
        raise ProtocolError(detail=f"malformed captured step: {exc}") from exc


def _plain(one: Any) -> Any:
    return one.packed if isinstance(one, Given) else [getattr(one, field.name) for field in fields(one)]


def _named(cls: Any, values: Any) -> dict[str, Any]:
    return dict(zip((field.name for field in fields(cls)), values, strict=True))


def _action(values: Any) -> Invocation | Collective:
    if not isinstance(values[1], str):
        return Collective(**_named(Collective, values))
    named = _named(Invocation, values)
    named["args"] = tuple(map(_argument, named["args"]))
    named["kwargs"] = tuple((name, _argument(value)) for name, value in named["kwargs"])
    return Invocation(**named)


def _argument(value: Any) -> int | Given:
    return Given(value) if isinstance(value, bytes) else value
