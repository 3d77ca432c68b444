"""What ranks of one GPU show of their memory, and what they have opened of others', on the fake of cupy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from raycollect.backends import cuda_driver
from raycollect.backends.nccl.ipc_memory import ExportedSpans, Exports, IpcListing
from raycollect.core.model import Kernel, Launch, OpKind
from raycollect.core.protocols import Communicator
from tests.fake_cupy import Fake
from tests.pure.backends.streams import sums
from tests.pure.on_gpu import Caller, cupy_of, gpus, pending, read_elsewhere
from tests.pure.on_one_gpu import SharingTeam, sharing


@pytest.fixture
def pair() -> Iterator[tuple[Fake, SharingTeam]]:
    with sharing(2) as team:
        yield team


@pytest.fixture
def fake() -> Iterator[Fake]:
    with gpus(1) as fake_cupy:
        yield fake_cupy


def shown(fake: Fake, array: Any, process: int = 1) -> IpcListing:
    """What a process lists that shows an array to be read."""
    with fake.as_process(process):
        return Exports(0).listing([ExportedSpans(((array.data.ptr, array.nbytes),), ())])


# ------------------------------------------------------------------------------- what is opened


def test_what_a_rank_has_opened_is_closed_before_the_others_go_on(pair: tuple[Fake, SharingTeam]) -> None:
    """They may free it then; the fake takes what is freed while it is open for a violation."""
    fake, team = pair

    def body(communicator: Communicator, launches: list[Launch]) -> list[int]:
        opened = []
        for at, launch in enumerate(launches):
            array = pending(np.ones(100), ("plain", "every other")[at % 2])
            communicator.launch(launch, (sums(array),))
            opened.append(fake.opened)  # nobody opens anything more before this rank comes to the next launch
            communicator.end(launch, True)
            del array
        return opened

    before = fake.counts["ipcOpenMemHandle"]
    assert team.must(body, [team.launch() for _ in range(6)]) == [[0] * 6] * 2
    assert fake.counts["ipcOpenMemHandle"] - before == 12
    assert not fake.violations


# ------------------------------------------------------------------------------- what can't be shown


def body_without(communicator: Communicator, launches: list[Launch], fake: Fake) -> list[list[int]]:
    """A sum, then pieces, of memory that has no handle."""
    rank, caller, read = communicator.rank, Caller(), []
    with fake.without_handles():
        array, into = pending(np.full(500, rank + 1)), pending(np.zeros(500, np.int64))
        pieces = tuple(pending(np.zeros(500, np.int64)) for _ in range(2))
    communicator.launch(launches[0], (sums(array, into),))
    communicator.end(launches[0], True)
    communicator.launch(launches[1], (Kernel(kind=OpKind.ALLGATHER, src=array, dst=pieces, most=500),))
    communicator.end(launches[1], True)
    read += [read_elsewhere(array, caller.other) for array in (array, into, *pieces)]
    return [sorted(set(array.tolist())) for array in read]


def test_memory_without_a_handle_is_copied(pair: tuple[Fake, SharingTeam]) -> None:
    fake, team = pair
    results = team.must(body_without, [team.launch(), team.launch()], fake)
    assert results == [[[rank + 1], [3], [1], [2]] for rank in range(2)]


def test_where_the_driver_can_not_be_asked_all_is_copied(
    pair: tuple[Fake, SharingTeam], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But rooms are allocations of their own, of which that is known."""
    fake, team = pair
    monkeypatch.setattr(cuda_driver, "allocation", lambda pointer: None)

    def body(communicator: Communicator, launch: Launch) -> list[int]:
        array = pending(np.full(500, communicator.rank + 1))
        communicator.launch(launch, (sums(array),))
        communicator.end(launch, True)
        return sorted(set(cupy_of(array).get().tolist()))

    assert team.must(body, team.launch()) == [[3]] * 2
    assert not fake.opened
