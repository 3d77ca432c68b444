"""A member communicator as one call sees it: ranks are those of the group."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from raycollect.core.model import Kernel, Launch, OpKind
from raycollect.core.protocols import Communicator
from raycollect.errors import KernelError, RefusedError, Violation, refusal
from raycollect.group.call_communicator import CallCommunicator
from raycollect.group.coordinator_client import ActiveCall, CoordinatorClient


class Failing:
    """The second of two ranks of a backend whose kernels fail."""

    rank, world_size = 1, 2

    def launch(self, launch: Launch, kernels: Sequence[Kernel]) -> None:
        assert (launch.ranks, [kernel.peer for kernel in kernels]) == ((0, 1), [0])
        raise KernelError(rank=self.rank, detail=f"after {launch.timeout_s:g} s")

    def agree(self, launch: Launch, *_: object) -> Sequence[bytes]:
        raise refusal("recv", "", (Violation(kind="unsupported", rank=self.rank, field="operand", found="too long"),))

    def end(self, launch: Launch, ok: bool, owed: Sequence[Kernel]) -> tuple[int, ...]:
        assert (launch.ranks, ok, [kernel.peer for kernel in owed]) == ((0, 1), False, [0])
        return (0,)


LAUNCH, KERNEL = Launch(seq=1, ranks=(2, 5), timeout_s=7.0), Kernel(kind=OpKind.RECV, peer=2)


@pytest.fixture
def call() -> CallCommunicator:
    client = SimpleNamespace(ranks=(2, 5), epoch="1", is_off=lambda call: False)
    return CallCommunicator(cast(CoordinatorClient, client), cast(Communicator, Failing()))


def test_an_error_of_a_kernel_names_the_rank_of_the_group(call: CallCommunicator) -> None:
    with pytest.raises(KernelError, match="after 7 s") as caught:
        call.launch(LAUNCH, (KERNEL,))
    assert caught.value.rank == 5


def test_a_refusal_names_the_rank_of_the_group(call: CallCommunicator) -> None:
    call.call = ActiveCall(1, "recv", time.monotonic(), 60.0)
    with pytest.raises(RefusedError) as caught:
        call.agree(LAUNCH, b"")
    assert [one.rank for one in caught.value.violations] == [5]


def test_the_backend_hears_which_kernels_are_owed_among_its_own_ranks(call: CallCommunicator) -> None:
    assert call.end(LAUNCH, False, (KERNEL,)) == (2,)
