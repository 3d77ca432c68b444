"""The capability table, and what the backends know about arrays."""

from __future__ import annotations

import subprocess
import sys

import pytest

from raycollect import backends
from raycollect.core.model import GroupSpec
from raycollect.errors import BackendNotInstalledError, BackendUnavailableError, UnknownBackendError
from tests.pure.communicators import MemoryExchange, MemoryRendezvous, MemoryStar


def test_an_unknown_backend_lists_those_that_exist() -> None:
    for look in (backends.get, backends.load):
        with pytest.raises(UnknownBackendError, match="no backend 'nlcc'; there are local, shm, tcp, gloo"):
            look("nlcc", "g")


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


def test_importing_the_table_loads_no_library() -> None:
    code = "import sys, raycollect.backends; print(sorted({'ray', 'xoscar', 'pygloo', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("machines", "chosen"), [(["a"], "local"), (["a", "a"], "shm"), (["a", "b"], "tcp"), (["a", "b", "a"], "tcp")]
)
def test_auto(machines: list[str], chosen: str) -> None:
    assert backends.choose(machines).backend == chosen
    backends.check_placement(chosen, machines)


@pytest.mark.parametrize(("name", "machines"), [("local", ["a", "a"]), ("shm", ["a", "b"])])
def test_members_that_are_too_far_apart_are_refused(name: str, machines: list[str]) -> None:
    with pytest.raises(BackendUnavailableError, match="auto"):
        backends.check_placement(name, machines, "g")


def test_local_is_for_one_process() -> None:
    create = backends.load("local")
    exchange = MemoryExchange(MemoryStar(), 0)
    spec = GroupSpec(name="g", group_id="1", backend="local", world_size=2)
    with pytest.raises(BackendUnavailableError):
        create(spec, 0, MemoryRendezvous(), exchange)
