"""The program of one participant for each run of a captured step; sent once, when the step is captured.

A run works on slots. The first slots hold the values of refs, which don't change between runs, and which the
participant pins. The run fills the other slots: from its arguments, the return values of methods, and the outputs of
collectives. Actions run in order; all participants have the plans of a step in the same order, so plans can't deadlock.
"""

from __future__ import annotations

from raycollect.core.codec import Codec, Wire
from raycollect.core.model import Key, Segment

CAPTURE_NBYTES = 16  # the bytes of a capture's id
VERSION = 4


def captured_key(capture: bytes, step: int) -> Key:
    """The key of the output of a call in a capture, for plans; a run replaces the 8 zeros by its number.

    The key names the value in errors, and is unique. `step` is the index of the call in the capture.
    """
    return Key(capture + bytes(8) + step.to_bytes(4, "little"))


class Given(Wire, frozen=True):
    """A constant argument of a method, packed by `pack_value`."""

    packed: bytes


class Invocation(Wire, frozen=True, kw_only=True, tag=0):
    """A method call; arguments are slots, or `Given`."""

    step: int  # its index among all calls of the capture
    method: str
    args: tuple[int | Given, ...]
    kwargs: tuple[tuple[str, int | Given], ...]
    slot: int  # for the return value


class Collective(Wire, frozen=True, kw_only=True, tag=1):
    """This participant's part of a plan: one collective, or several without a method call in between."""

    step: int  # the index of its first call among all calls of the capture
    offset: int  # its launches count from the run's number plus this
    first: int  # the index of its first request among the requests of all plans of the capture
    program: bytes  # from `planner.encode_program`
    inputs: tuple[int, ...]  # slots of its operands, in the order of the program's keys
    outputs: tuple[int, ...]  # slots of its outputs, in the order of `Outcome.outputs`


class StepProgram(Wire, frozen=True, kw_only=True):
    """The actions of one participant in each run."""

    capture: bytes  # the capture's id, 16 random bytes
    actions: tuple[Invocation | Collective, ...]
    slots: int  # the number of slots
    refs: int  # the number of slots, from the first, with the values of refs
    arguments: tuple[int, ...]  # slots of the run's arguments, in order
    returns: tuple[int, ...]  # slots of the returned values, in order
    keeps: tuple[int, ...]  # slots whose values are kept after each run, until `StepRunner.take_kept`
    keys: tuple[Key, ...]  # of each slot; with run 0 if the key depends on the run
    numbered: bool  # whether the capture has several requests, so that violations name the request


CAPTURES = Codec[tuple[StepProgram, Segment | None, int]](
    tuple[StepProgram, Segment | None, int], "capture", version=VERSION
)
"""The payload that captures a step: its program, the doorbell's segment or None, the slot in it."""
