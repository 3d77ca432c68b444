"""Backends by name: those of the package, of torch, and of the program."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from raycollect import backends
from raycollect.backends import Capabilities
from raycollect.core.model import GroupSpec, OpKind
from raycollect.core.operations import USUAL
from raycollect.core.protocols import Joining
from raycollect.errors import (
    BackendNotInstalledError,
    BackendUnavailableError,
    UnknownBackendError,
)
from tests.pure.communicators import MemoryExchange, MemoryRendezvous, MemoryStar


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    monkeypatch.setattr(backends, "BACKENDS", dict(backends.BACKENDS))


MINE = Capabilities(name="mine", module="raycollect.backends.local", interruptible=True, bitwise=True, cross_host=True)

# ------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "meant"),
    [("GLOO", "gloo"), ("torch_gloo", "torch:gloo"), ("Shm", "shm"), ("Torch:GLOO", "torch:gloo"), ("NCCL", "nccl")],
)
def test_names_have_no_case_and_ray_has_another_for_gloo(name: str, meant: str) -> None:
    assert backends.canonical(name) == meant
    assert backends.get(name) is backends.get(meant)
    assert backends.is_known(name)


def test_nccl_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert not backends.is_available("nccl")
    with pytest.raises(
        BackendNotInstalledError, match=r"a requirement is missing .*cupy.*Install it: pip install .*cuda12"
    ):
        backends.load("NCCL", "g")
    assert backends.ops_of("nccl") == tuple(kind.value for kind in OpKind if kind in USUAL)


# ------------------------------------------------------------------------------- the program


def test_a_line_whose_module_is_not_there_is_named() -> None:
    backends.register(dataclasses.replace(MINE, name="pigeon", module="pigeon.loft"))
    with pytest.raises(
        BackendNotInstalledError, match=r"backend 'pigeon': its module pigeon\.loft has no working factory"
    ):
        backends.load("pigeon")


def test_an_unknown_name_lists_what_is_registered() -> None:
    backends.register(MINE)
    with pytest.raises(UnknownBackendError, match=r"no backend 'owl'; there are local, .*mine.*torch:<any.*'auto'"):
        backends.get("owl")


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "Mine"},
        {"name": "auto"},
        {"name": ""},
        {"name": "a:b"},
        {"module": ""},
        {"factory": print},
    ],
)
def test_a_line_is_valid_from_birth(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"backend|factory"):
        dataclasses.replace(MINE, **wrong)


# ------------------------------------------------------------------------------- what fits


def test_a_missing_library_comes_with_its_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "raycollect.backends.gloo.library", raising=False)
    for library in ("pygloo", "xoscar"):
        monkeypatch.setitem(sys.modules, library, None)
    assert not backends.is_available("gloo")
    with pytest.raises(BackendNotInstalledError, match=r"pip install 'raycollect\[gloo\]'.*backend='auto'") as caught:
        backends.load("gloo", "g")
    assert "pygloo: import of pygloo halted" in str(caught.value)
    assert "xoscar.collective.xoscar_pygloo: not installed" in str(caught.value)
    assert caught.value.group_name == "g"


@pytest.mark.parametrize("name", ["local", "shm", "tcp"])
def test_backends_without_libraries_are_always_there(name: str) -> None:
    assert backends.is_available(name)
    assert callable(backends.load(name))


@pytest.mark.parametrize(("name", "machines"), [("local", ["a", "a"]), ("shm", ["a", "b"])])
def test_members_that_are_too_far_apart_are_refused(name: str, machines: list[str]) -> None:
    with pytest.raises(BackendUnavailableError, match="auto"):
        backends.check_placement(name, machines, "g")


def test_local_is_for_one_process() -> None:
    create = backends.load("local")
    exchange = MemoryExchange(MemoryStar(), 0)
    spec = GroupSpec(name="g", group_id="1", backend="local", world_size=2)
    with pytest.raises(BackendUnavailableError):
        create(Joining(spec, 0, MemoryRendezvous(), exchange))
