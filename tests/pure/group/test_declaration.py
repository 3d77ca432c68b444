"""The arguments of a declared group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raycollect.core.driver_handle import DriverHandle
from raycollect.errors import InvalidGroupError
from raycollect.group.declaration import Declaration


def declare(*, world_size: Any = None, **how: Any) -> Declaration:
    actor = DriverHandle(SimpleNamespace(hex=lambda: "a"), "A", dict, object)
    return Declaration.of([actor], world_size, None, "tcp", "g", environ={}, **how)


def test_the_world_size_may_be_a_number_of_numpy() -> None:
    assert len(declare(world_size=np.int64(1)).actors) == 1
    for wrong in (np.int64(2), True, 1.0, np.ones(2)):
        with pytest.raises(InvalidGroupError, match=r"world_size is .*, but there are 1 actors"):
            declare(world_size=wrong)


def test_a_time_limit_that_is_too_long_is_told_how_long_it_may_be() -> None:
    with pytest.raises(InvalidGroupError, match="not a positive number of seconds, at most 1e") as caught:
        declare(timeout_s=1e10, gloo_timeout=1e13)
    assert "not a positive number of milliseconds, at most 1e+12" in str(caught.value)
    with pytest.raises(InvalidGroupError, match=r"seconds, at most 1e\+09"):
        declare().over(None, 1e10)
