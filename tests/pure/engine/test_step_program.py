"""Routines on the wire: what was written is read, and bytes of nobody raise."""

from __future__ import annotations

import random

import pytest

from raycollect.core.model import KEY_NBYTES, Key
from raycollect.engine.step_program import (
    CAPTURE_NBYTES,
    VERSION,
    Collective,
    Given,
    Invocation,
    StepProgram,
    captured_key,
    decode_step_program,
    encode_step_program,
)
from raycollect.engine.value_codec import pack_value
from raycollect.errors import ProtocolError
from tests.support.values import replace

CAPTURE = bytes(range(CAPTURE_NBYTES))


def made(seed: int) -> StepProgram:
    """A routine of some actions; it need not make sense as a whole."""
    rng = random.Random(seed)
    slots = rng.randrange(1, 9)

    def argument() -> int | Given:
        return rng.randrange(slots) if rng.random() < 0.5 else Given(pack_value(rng.random()))

    def action(step: int) -> Invocation | Collective:
        if rng.random() < 0.5:
            return Invocation(
                step=step,
                method=rng.choice(("apply", "läuft", "_")),
                args=tuple(argument() for _ in range(rng.randrange(3))),
                kwargs=tuple((f"k{at}", argument()) for at in range(rng.randrange(3))),
                slot=rng.randrange(slots),
            )
        return Collective(
            step=step,
            offset=rng.randrange(5),
            first=rng.randrange(5),
            program=rng.randbytes(rng.randrange(40)),
            inputs=tuple(rng.randrange(slots) for _ in range(rng.randrange(4))),
            outputs=tuple(rng.randrange(slots) for _ in range(rng.randrange(4))),
        )

    return StepProgram(
        capture=CAPTURE,
        actions=tuple(map(action, range(rng.randrange(7)))),
        slots=slots,
        refs=rng.randrange(slots),
        arguments=tuple(range(rng.randrange(3))),
        kept=tuple(range(rng.randrange(3))),
        returns=tuple(range(rng.randrange(3))),
        keys=tuple(Key(rng.randbytes(KEY_NBYTES)) for _ in range(slots)),
        numbered=rng.random() < 0.5,
    )


@pytest.mark.parametrize("seed", range(40))
def test_what_was_written_is_read(seed: int) -> None:
    step_program = made(seed)
    assert decode_step_program(encode_step_program(step_program)) == step_program


def test_a_key_tells_capture_and_step() -> None:
    keys = {captured_key(CAPTURE, step) for step in (0, 1, 2**20)}
    assert len(keys) == 3
    assert {len(key) for key in keys} == {KEY_NBYTES}
    assert all(key[:CAPTURE_NBYTES] == CAPTURE for key in keys)


@pytest.mark.parametrize("seed", range(6))
def test_bytes_of_nobody_raise_or_are_read(seed: int) -> None:
    rng = random.Random(seed)
    refused = 0
    for turn in range(300):
        data = bytearray(encode_step_program(made(turn)))
        if rng.random() < 0.5:
            del data[rng.randrange(len(data)) :]
        else:
            data[rng.randrange(min(len(data), 12))] = rng.randrange(256)
        try:
            assert isinstance(decode_step_program(bytes(data)), StepProgram)
        except ProtocolError:
            refused += 1
    assert refused > 100


def test_another_version_is_told() -> None:
    with pytest.raises(ProtocolError, match=f"version {VERSION + 1}"):
        decode_step_program(bytes([VERSION + 1]) + encode_step_program(made(1))[1:])


def test_routines_are_values() -> None:
    step_program = made(3)
    assert replace(step_program, numbered=not step_program.numbered) != step_program
    assert hash(step_program) == hash(made(3))
