"""Versions of weights between tensors of real GPUs and of the host, in one process and without Ray."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("ml_dtypes", reason="raycollect needs ml_dtypes")
pytest.importorskip("msgpack", reason="raycollect needs msgpack")
pytest.importorskip("xxhash", reason="digests need it")

import numpy as np

from raycollect.member.participant import Participant
from tests.pure.weights.sides import AMONG, V1, entered_here, holder, receiver, source, tensors
from tests.support.values import replace

from . import devices
from .cases import LIBRARIES, placed, to_host

FLOAT = np.dtype(np.float32)
PLACES = ("host", *LIBRARIES)


@pytest.fixture
def here() -> Iterator[Participant]:
    """The actor of both ranks; what reads from it has its store."""
    with entered_here() as actor:
        yield actor


def _put(value: float, where: str) -> dict[str, Any]:
    """Three tensors of one value, two of them with gaps."""
    if where == "host":
        return tensors(value)
    devices.need(where)
    (first, *others) = tensors(value).items()
    return {
        first[0]: placed(first[1].reshape(-1), "plain", where).reshape(first[1].shape),
        **{name: _cut(one, where) for name, one in others},
    }


def _cut(values: np.ndarray, library: str) -> Any:
    wide = placed(np.repeat(values.reshape(-1), 2), "plain", library)
    return wide.reshape(values.shape[0], -1)[:, ::2]


def _held(tensor: Any) -> np.ndarray:
    return tensor.reshape(-1) if isinstance(tensor, np.ndarray) else to_host(tensor, FLOAT)


@pytest.mark.parametrize("there", PLACES)
@pytest.mark.parametrize("mine", PLACES)
def test_versions_go_from_any_device_to_any_other(here: Participant, there: str, mine: str) -> None:
    trainer, rollout = _put(0, there), _put(0, mine)
    src, dst = source(here, trainer), receiver(here, rollout)
    for number in (1, 2, 3):
        for tensor in trainer.values():
            tensor += 1
        version = replace(V1, number=number, count=number)
        key, digests = src.seal(version, AMONG, bytes([number]))
        dst.stage(replace(version, digests=digests), [holder(key)], 1.0)
        assert all((_held(tensor) == number - 1).all() for tensor in rollout.values())
        assert dst.show(version)
        assert all((_held(tensor) == number).all() for tensor in rollout.values())
