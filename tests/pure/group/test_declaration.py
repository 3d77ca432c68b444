"""The arguments of a declared group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raycollect.core.model import GroupSpec
from raycollect.errors import InvalidGroupError
from raycollect.group.declaration import Declaration
from raycollect.group.membership import on_backend, placed
from raycollect.ray_bridge.driver_handle import DriverHandle


def declare(*, world_size: Any = None, **how: Any) -> Declaration:
    actor = DriverHandle(SimpleNamespace(hex=lambda: "a"), "A", dict, object)
    return Declaration.of([actor], world_size, None, "tcp", "g", environ={}, **how)


def test_the_world_size_may_be_a_number_of_numpy() -> None:
    assert len(declare(world_size=np.int64(1)).actors) == 1
    for wrong in (np.int64(2), 0, -1, 3, True, 1.0, np.ones(2), [2]):
        with pytest.raises(InvalidGroupError, match=r"world_size is .*, but there are 1 actors"):
            declare(world_size=wrong)


def test_all_that_is_wrong_is_told() -> None:
    pair = [DriverHandle(SimpleNamespace(hex=lambda name=name: name), name, dict, object) for name in "ab"]
    assert Declaration.of(pair, 2, [1, 0], "tcp", "g", environ={}).actors == (pair[1], pair[0])
    for ranks in ([0, 2], [0, -1], [0, 0], [0], [0, 1, 2], [0, None], "01", 7):
        with pytest.raises(InvalidGroupError, match="permutation of 0 to 1"):
            Declaration.of(pair, 2, ranks, "tcp", "g", environ={})
    for actors, said in (
        ([], "empty"),
        ([pair[0]] * 2, "more than once"),
        ([object], "handle"),
        (pair[0], "not a list"),
    ):
        with pytest.raises(InvalidGroupError, match=said):
            Declaration.of(actors, None, None, "tcp", "g", environ={})
    for name in ("", "\ud800", "x" * 1001, b"x", None, 3):
        with pytest.raises(InvalidGroupError, match="group_name is"):
            Declaration.of(pair, None, None, "tcp", name, environ={})
    with pytest.raises(InvalidGroupError, match=r"world_size.*permutation.*group_name.*backend is 3.*gloo_timeout"):
        Declaration.of(pair, 4, [1, 1], 3, "", gloo_timeout=0, environ={})


def test_a_time_limit_that_is_too_long_is_told_how_long_it_may_be() -> None:
    with pytest.raises(InvalidGroupError, match="not a positive number of seconds, at most 1e") as caught:
        declare(timeout_s=1e10, gloo_timeout=1e13)
    assert "not a positive number of milliseconds, at most 1e+12" in str(caught.value)
    with pytest.raises(InvalidGroupError, match=r"seconds, at most 1e\+09"):
        declare().over(None, 1e10)


# ---------------------------------------------------------------------------------------------- the spec of a group


@pytest.mark.parametrize(
    ("backend", "machines", "hosts"),
    [
        ("tcp", "aabb", (0, 0, 1, 1)),
        ("tcp", "abcd", ()),
        ("tcp", "aaaa", ()),
        ("gloo", "abcd", (0, 1, 2, 3)),
        ("torch:gloo", "aabb", (0, 0, 1, 1)),
        ("gloo", "aaaa", ()),
        ("shm", "aaaa", ()),
        ("torch:mpi", "aabb", ()),
    ],
)
def test_a_backend_hears_of_hosts_where_it_goes_by_host(backend: str, machines: str, hosts: tuple[int, ...]) -> None:
    spec = GroupSpec(name="g", group_id="1", backend=backend, world_size=len(machines))
    assert placed(spec, list(machines)).hosts == hosts


def test_a_spec_has_what_the_planner_must_know_of_its_backend() -> None:
    spec = GroupSpec(name="g", group_id="1", backend="tcp", world_size=2)
    of_shm, of_nccl = on_backend(spec, "shm"), on_backend(spec, "nccl")
    assert (of_shm.coalesces, of_shm.memory, "scan" in of_shm.ops) == (True, "cpu", True)
    assert (of_nccl.coalesces, of_nccl.memory, "scan" in of_nccl.ops) == (False, "cuda", False)
