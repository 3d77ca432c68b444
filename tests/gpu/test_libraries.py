"""Memory of GPUs as other libraries have it: what is read-only or known by DLPack, and graphs of torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest

pytest.importorskip("ml_dtypes", reason="raycollect needs ml_dtypes")

import numpy as np

from raycollect.backends import arrays
from raycollect.core.model import Kernel, Launch, OpKind, ReduceOp
from raycollect.core.protocols import Communicator
from raycollect.pos.store import weak
from tests.pure.communicators import Team
from tests.pure.conformance import run_launch

from . import devices
from .cases import placed, seen, to_host

TeamOf = Callable[[int], Team]

FLOAT = np.dtype(np.float32)
WAIT_S = 60.0

real_only = pytest.mark.skipif(devices.FAKE, reason="the fake has no such library")


def _summed(array: Any) -> Kernel:
    return Kernel(kind=OpKind.ALLREDUCE, src=seen(array), dst=seen(array), op=ReduceOp.SUM)


# ---------------------------------------------------------------------------------------------- whose memory it is


def test_the_owner_of_memory_is_the_same_for_all_views_and_goes_with_it() -> None:
    """The store refers to it weakly: after a failed plan it must keep no memory on the GPU."""
    array = placed(np.ones(1000, FLOAT), "plain", "cupy")
    view = array[10:20]
    owner = weak(arrays.owner(array))
    assert owner() is not None
    assert arrays.owner(view) is owner()
    del array
    assert owner() is not None, "the view has the memory yet"
    del view
    assert owner() is None


@real_only
def test_an_array_of_jax_is_read_only() -> None:
    jax = pytest.importorskip("jax")
    made = jax.numpy.ones(8, jax.numpy.float32)
    if next(iter(made.devices())).platform != "gpu":
        pytest.skip("JAX sees no GPU")
    assert not arrays.is_writeable(seen(made))


class OnlyDlpack:
    """An array of which all that is known is DLPack."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **given: Any) -> Any:
        return self._array.__dlpack__(**given)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_an_array_known_by_dlpack_is_worked_on_in_place(team_of: TeamOf, library: str) -> None:
    devices.need(library)
    team, own = team_of(1), placed(np.arange(1000, dtype=FLOAT), "plain", library)
    lent = OnlyDlpack(own)
    assert seen(lent).address == seen(own).address
    assert arrays.is_writeable(seen(lent))
    team.must(run_launch, team.launch(), _summed(lent))
    np.testing.assert_array_equal(to_host(own, FLOAT), np.arange(1000, dtype=FLOAT))


# ---------------------------------------------------------------------------------------------- a rank that leaves


def body_leaves(communicator: Communicator, launch: Launch, size: int) -> np.ndarray | None:
    """Rank 0 sends and closes its communicator; rank 1 may still be receiving."""
    if communicator.rank == 0:
        mine = placed(np.arange(size, dtype=FLOAT), "plain", "cupy")
        run_launch(communicator, launch, Kernel(kind=OpKind.SEND, src=seen(mine), peer=1))
        communicator.close()
        return None
    taken = placed(np.zeros(size, FLOAT), "plain", "cupy")
    run_launch(communicator, launch, Kernel(kind=OpKind.RECV, dst=seen(taken), peer=0))
    return to_host(taken, FLOAT)


@pytest.mark.parametrize("size", [1, 250_001, 16_000_000])
def test_a_rank_that_leaves_after_its_send_has_sent_it(fresh_team_of: TeamOf, size: int) -> None:
    if devices.FAKE and size > 1 << 20:
        pytest.skip("the fake moves it at once, whatever its size")
    team = fresh_team_of(2)
    found = team.must(body_leaves, team.launch(), size)
    np.testing.assert_array_equal(found[1], np.arange(size, dtype=FLOAT))


# ---------------------------------------------------------------------------------------------- graphs of torch


@contextmanager
def _collectives_beside(team: Team) -> Iterator[None]:
    """Another thread runs collectives, one after the other; the first has ended when the block begins."""
    kernel = _summed(placed(np.zeros(1 << 20, FLOAT), "plain", "cupy"))
    begun, stop, failed = threading.Event(), threading.Event(), list[BaseException]()

    def collect() -> None:
        try:
            while not stop.is_set():
                team.must(run_launch, team.launch(), kernel)
                begun.set()
        except BaseException as exc:
            failed.append(exc)
            begun.set()

    thread = threading.Thread(target=collect)
    thread.start()
    try:
        assert begun.wait(WAIT_S)
        yield
    finally:
        stop.set()
        thread.join(WAIT_S)
    assert not failed, failed[0]


@real_only
@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_torch_captures_a_graph_beside_a_collective(team_of: TeamOf, mode: str) -> None:
    """The queries of the collective's thread must not spoil the capture, and the capture not the collective."""
    devices.need("torch")
    torch = import_module("torch")
    x = torch.zeros(1000, device="cuda")
    x += 1
    torch.cuda.synchronize()
    with _collectives_beside(team_of(1)):
        for _ in range(20):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode=mode):
                for _ in range(50):
                    x += 1
            graph.replay()
        torch.cuda.synchronize()
    assert float(x[0]) == 1 + 20 * 50
