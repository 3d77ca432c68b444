"""Programs of captured steps on the wire; `tests/pure/core/test_codec.py` has what any value does there."""

from __future__ import annotations

import pytest

from raycollect.core.model import KEY_NBYTES
from raycollect.engine.step_program import (
    CAPTURE_NBYTES,
    VERSION,
    captured_key,
    decode_step_program,
    encode_step_program,
)
from raycollect.errors import ProtocolError
from tests.pure.teams import Script


def test_a_key_tells_capture_and_step() -> None:
    capture = bytes(range(CAPTURE_NBYTES))
    keys = {captured_key(capture, step) for step in (0, 1, 2**20)}
    assert len(keys) == 3
    assert {len(key) for key in keys} == {KEY_NBYTES}
    assert all(key[:CAPTURE_NBYTES] == capture for key in keys)


def test_another_version_is_told() -> None:
    script = Script(0)
    script.call("method")
    packed = encode_step_program(script.step_program)
    assert decode_step_program(packed) == script.step_program
    with pytest.raises(ProtocolError, match=f"version {VERSION + 1}"):
        decode_step_program(bytes([VERSION + 1]) + packed[1:])
