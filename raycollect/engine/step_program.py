"""What one participant does in each run of a captured step; sent to it once, when the step is captured.

A run works on slots. The first ones hold what does not change from run to run: the values of refs, which the
participant pins. The run fills the others: from its arguments, from what methods return, and from what collectives
make. Actions run in order; every participant has the plans of a step in the same order, so no two can deadlock.
"""

from __future__ import annotations

from raycollect.core.codec import Codec, Wire
from raycollect.core.model import Key, Segment

CAPTURE_NBYTES = 16  # the bytes of a capture's id
VERSION = 4


def captured_key(capture: bytes, step: int) -> Key:
    """The key of what one call of a capture makes, as plans have it; a run puts its number in place of the 8 zeros.

    It names the value in errors, and is unique. `step` is the place of the call in the capture.
    """
    return Key(capture + bytes(8) + step.to_bytes(4, "little"))


class Given(Wire, frozen=True):
    """An argument of a method that is the same in each run, as `pack_value` wrote it."""

    packed: bytes


class Invocation(Wire, frozen=True, kw_only=True, tag=0):
    """A method call; arguments are slots, or `Given`."""

    step: int  # its place among all calls of the capture, from 0
    method: str
    args: tuple[int | Given, ...]
    kwargs: tuple[tuple[str, int | Given], ...]
    slot: int  # for what it returns


class Collective(Wire, frozen=True, kw_only=True, tag=1):
    """This participant's half of a plan: one collective, or several that were recorded with no method call between."""

    step: int  # the place of its first call among all calls of the capture
    offset: int  # its launches count from the run's number plus this
    first: int  # the place of its first request among those of all plans of the capture
    program: bytes  # as `planner.encode_program` wrote it
    inputs: tuple[int, ...]  # slots of its operands, in the order of the program's keys
    outputs: tuple[int, ...]  # slots of what it makes, in the order of `Outcome.outputs`


class StepProgram(Wire, frozen=True, kw_only=True):
    """The actions of one participant in each run."""

    capture: bytes  # the capture's id, 16 random bytes
    actions: tuple[Invocation | Collective, ...]
    slots: int  # how many there are
    refs: int  # how many slots, from the first on, hold the values of refs
    arguments: tuple[int, ...]  # slots of the run's arguments, in order
    returns: tuple[int, ...]  # slots whose values are given back, in order
    kept: tuple[int, ...]  # slots whose values are kept after each run, until `StepRunner.take_kept`
    keys: tuple[Key, ...]  # of each slot; run 0 where it differs from run to run
    numbered: bool  # the capture has several requests, so that violations say in which one


CAPTURES = Codec[tuple[StepProgram, Segment | None, int]](
    tuple[StepProgram, Segment | None, int], "capture", version=VERSION
)
"""What captures a step: its program, the doorbell's segment or None, the slot in it."""
