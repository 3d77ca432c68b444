"""What brings the runs of captured steps: a real doorbell, and payloads as bytes."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgpack
import numpy as np
import pytest

from raycollect.channel.doorbell import Doorbell
from raycollect.channel.messages import Run
from raycollect.core import threads
from raycollect.core.model import Segment
from raycollect.engine.step_program import CAPTURES
from raycollect.engine.step_runner import StepRunner
from raycollect.engine.value_codec import pack_values, unpack_values
from raycollect.errors import ProtocolError
from raycollect.member.captured_steps import CapturedStep, open_doorbell
from tests.pure.member.step_bench import Bench, MakeBench, bench, echo, no_group
from tests.pure.teams import CAPTURE, WAIT_S

__all__ = ["bench"]  # fixtures


def test_with_a_real_doorbell() -> None:
    try:
        doorbell = Doorbell(1)
    except OSError as exc:
        pytest.skip(str(exc))
    post = open_doorbell(doorbell.segment, 0, keeps_core=True)
    assert post is not None
    one = Bench(echo(), None, note=lambda value: value)
    one.captured.close("another is made")
    runner = StepRunner(echo().step_program, [], one.actor.invoke, one.runner.instruments, no_group)
    tell = one.send, one.fail, one.wait_for_call
    shared = threads.pool("raycollect-capture", 1)
    captured = CapturedStep(runner, post, one.sequencer, None, *tell, shared)
    for seq in range(1, 40):
        number, value = doorbell.begin(), "x" * (10_000 if seq % 5 == 0 else seq)
        if not doorbell.runs[0].write(number, seq, seq - 1, pack_values([value])):
            payload = pack_values([value])
            captured.received(Run(capture=CAPTURE, seq=seq, predecessor=seq - 1, payload=payload, after=b""))
        doorbell.ring(number)
        until_s = time.monotonic() + WAIT_S
        while (found := doorbell.answers(number, [0])[0]) is None and seq not in one.ran and time.monotonic() < until_s:
            doorbell.wait(0.05)
        assert (one.ran[seq] if found is None else unpack_values(found)) == (value,)
    assert set(one.ran) == set(range(5, 40, 5)), "the long ones"
    captured.close("closed")
    assert captured.join(WAIT_S)
    doorbell.close()


def test_a_doorbell_out_of_reach_is_none() -> None:
    assert open_doorbell(None, 0, keeps_core=True) is None
    assert open_doorbell(Segment(1 << 22, 3, b"t" * 16, 4096), 0, keeps_core=True) is None


def test_payloads_are_read() -> None:
    step_program = echo().step_program
    segment = Segment(7, 8, b"t" * 16, 4096)
    for brought in (None, segment):
        assert CAPTURES.decode(CAPTURES.encode((step_program, brought, 3))) == (step_program, brought, 3)


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", msgpack.packb(3), msgpack.packb((b"", None)), msgpack.packb([1] * 4)]
)
def test_malformed_payloads(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        CAPTURES.decode(payload)


def test_sequences_and_arrays_come_back(bench: MakeBench) -> None:
    one = bench(note=lambda value: (value, np.arange(3)))
    one.run(1, 0, [1, (2,)])
    one.heard(1)
    ((value, array),) = one.ran[1]
    assert isinstance(value, Sequence)
    assert value == [1, (2,)]
    np.testing.assert_array_equal(array, np.arange(3))
