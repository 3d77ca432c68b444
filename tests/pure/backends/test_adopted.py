"""Groups in the shape of `ray.util.collective`'s `BaseGroup` as backends, and the options that they are given."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from raycollect import backends, types
from raycollect.backends.adopted import REDUCE_OPS, AdoptedCommunicator, adopt, register_collective_backend
from raycollect.core.model import GroupSpec, Kernel, Launch, OpKind, ReduceOp
from raycollect.core.protocols import Joining
from raycollect.errors import (
    BackendNotInstalledError,
    BackendUnavailableError,
    GroupBrokenError,
    KernelError,
    PlanAbortedError,
    UnsupportedError,
)
from tests.pure.backends.adopted_groups import Threads, table
from tests.pure.communicators import ThreadTeam
from tests.pure.conformance import LAYOUTS, check_cases, every_case, run_launch
from tests.support.values import replace

__all__ = ["table"]  # a fixture


@pytest.fixture(params=[1, 2, 3])
def team(request: pytest.FixtureRequest) -> Iterator[ThreadTeam]:
    register_collective_backend("Threads", Threads)
    started = ThreadTeam("threads", request.param)
    yield started
    started.close()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["int64", "float32"])
def test_every_kernel_of_such_a_group(team: ThreadTeam, layout: str, dtype: str) -> None:
    ops = backends.get("threads").ops
    cases = [case for case in every_case(dtype, team.world_size, (0, 1, 7)) if case.kind in ops]
    chosen = [case for case in cases if case.op in (None, *REDUCE_OPS)]
    assert {case.kind for case in chosen} >= ops - {OpKind.BARRIER, OpKind.RECV, OpKind.SEND}
    check_cases(team, [replace(case, layout=layout) for case in chosen])


def test_one_calls_reduce_op_is_not_the_next_calls_default() -> None:
    """Defect 1 of `ray.util.collective`: its `allreduce` stores the op on the options class."""
    register_collective_backend("threads", Threads)
    team = ThreadTeam("threads", 2)
    a, b = np.array([1, 5]), np.array([3, 2])
    for op, expected in ((ReduceOp.MAX, [3, 5]), (ReduceOp.SUM, [6, 10])):
        kernels = [Kernel(kind=OpKind.ALLREDUCE, src=array, dst=array, op=op) for array in (a, b)]
        launch = team.launch()
        team.must(lambda mine, launch=launch, kernels=kernels: run_launch(mine, launch, kernels[mine.rank]))
        np.testing.assert_array_equal(a, expected)
    first, second = (call.reduceOp for call in Threads.instances[0].calls)
    assert (first, second) == (ReduceOp.MAX, ReduceOp.SUM)
    assert types.AllReduceOptions().reduceOp is ReduceOp.SUM
    assert Threads.instances[0].calls[0].timeout_ms == timedelta(seconds=20)
    team.close()


# ------------------------------------------------------------------------------- registering


class Base(abc.ABC):
    """As abstract as Ray's."""

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        self.rank = rank

    @classmethod
    @abc.abstractmethod
    def check_backend_availability(cls) -> bool: ...

    @abc.abstractmethod
    def allreduce(self, tensor: Any, options: Any) -> None: ...

    @abc.abstractmethod
    def send(self, tensor: Any, options: Any) -> None: ...


class OnlyAllreduce(Base):
    """Leaves an abstract method out, as the example in Ray's documentation does."""

    available: ClassVar[bool] = True

    @classmethod
    def check_backend_availability(cls) -> bool:
        return cls.available

    def allreduce(self, tensor: Any, options: Any) -> None:
        if tensor[0].dtype != np.int64:
            raise NotImplementedError("whole numbers only")
        tensor[0] *= 2


def communicator(cls: type[Any], **options: Any) -> AdoptedCommunicator:
    register_collective_backend("mine", cls)
    spec = GroupSpec(name="g", group_id="a/0>1/b", backend="mine", world_size=1, options=tuple(options.items()))
    exchange = SimpleNamespace(abort=lambda seq: None)
    return backends.load("MINE", "g")(Joining(spec, 0, None, exchange))  # type: ignore[arg-type, return-value]


LAUNCH = Launch(seq=1, ranks=(0,), timeout_s=5)


def test_only_what_the_class_overrides_is_in_its_line() -> None:
    adopted = communicator(OnlyAllreduce)
    assert backends.ops_of("mine") == ("allreduce",)
    array = np.arange(3)
    adopted.launch(LAUNCH, (Kernel(kind=OpKind.ALLREDUCE, src=array, dst=array, op=ReduceOp.SUM),))
    np.testing.assert_array_equal(array, [0, 2, 4])
    for refuse in (lambda kernel: adopted.agree(LAUNCH, b"", kernel), lambda kernel: adopted.launch(LAUNCH, (kernel,))):
        with pytest.raises(UnsupportedError, match=r"op is send, expected what backend 'mine' runs: allreduce"):
            refuse(Kernel(kind=OpKind.SEND, src=array, peer=1))
        with pytest.raises(UnsupportedError, match=r"reduce op is BXOR, .*SUM, PRODUCT, MIN, MAX, AVG"):
            refuse(Kernel(kind=OpKind.ALLREDUCE, src=array, dst=array, op=ReduceOp.BXOR))
    np.testing.assert_array_equal(array, [0, 2, 4])
    adopted.launch(LAUNCH, (Kernel(kind=OpKind.ALLREDUCE, src=array, dst=array, op=ReduceOp.SUM),))


def test_a_subset_of_the_ranks_is_refused() -> None:
    register_collective_backend("threads", Threads)
    team = ThreadTeam("threads", 2)
    kernel = Kernel(kind=OpKind.BARRIER)
    with pytest.raises(UnsupportedError, match=r"ranks is \[0\], expected .*all of the group"):
        team.communicators[0].launch(LAUNCH, (kernel,))
    team.close()


def test_a_failure_in_the_class_is_named_and_breaks_the_group() -> None:
    adopted = communicator(OnlyAllreduce)
    array = np.zeros(2)
    kernel = Kernel(kind=OpKind.ALLREDUCE, src=array, dst=array, op=ReduceOp.SUM)
    with pytest.raises(KernelError, match="NotImplementedError: whole numbers only") as caught:
        adopted.launch(LAUNCH, (kernel,))
    assert (caught.value.op, caught.value.group_name, caught.value.rank) == ("allreduce", "g", 0)
    with pytest.raises(GroupBrokenError, match="whole numbers only"):
        adopted.agree(LAUNCH, b"")


def test_an_aborted_launch_does_not_start() -> None:
    adopted = communicator(OnlyAllreduce)
    adopted.abort(1)
    array = np.arange(2)
    with pytest.raises(PlanAbortedError, match="launch 1 was aborted"):
        adopted.launch(LAUNCH, (Kernel(kind=OpKind.ALLREDUCE, src=array, dst=array, op=ReduceOp.SUM),))
    np.testing.assert_array_equal(array, [0, 1])


def test_the_group_gets_a_name_of_its_own_and_the_users_options() -> None:
    communicator(Threads, ring="left")
    (group,) = Threads.instances
    assert (group.world_size, group.rank, group.options) == (1, 0, {"ring": "left"})
    assert group.group_name == "g.a-0-1-b"


def test_a_constructor_that_fails_is_named() -> None:
    with pytest.raises(BackendUnavailableError, match=r"OnlyAllreduce\(1, 0, 'g\.a-0-1-b'\) failed: TypeError.*colour"):
        communicator(OnlyAllreduce, colour="red")


def test_availability_is_what_the_class_says(monkeypatch: pytest.MonkeyPatch) -> None:
    register_collective_backend("mine", OnlyAllreduce)
    assert backends.is_available("mine")
    monkeypatch.setattr(OnlyAllreduce, "available", False)
    assert not backends.is_available("mine")
    with pytest.raises(BackendNotInstalledError, match=r"OnlyAllreduce\.check_backend_availability\(\) says no"):
        backends.load("mine")
    monkeypatch.setattr(OnlyAllreduce, "check_backend_availability", lambda: 1 / 0)
    with pytest.raises(BackendNotInstalledError, match="ZeroDivisionError"):
        backends.load("mine")


def test_a_name_is_registered_once() -> None:
    register_collective_backend("MINE", OnlyAllreduce)
    register_collective_backend("mine", OnlyAllreduce)
    for taken in ("Mine", "GLOO", "torch_gloo", "shm", "NCCL"):
        with pytest.raises(ValueError, match=r"already registered|is taken"):
            register_collective_backend(taken, Threads)
    for impossible in ("auto", "torch:mine", "", "a b"):
        with pytest.raises(ValueError):
            register_collective_backend(impossible, Threads)


@pytest.mark.parametrize("thing", [object, "Threads", Threads.__init__, type("Nothing", (), {"allreduce": None})])
def test_what_is_no_group_is_a_type_error(thing: Any) -> None:
    with pytest.raises(TypeError, match="check_backend_availability"):
        adopt("mine", thing)


# ------------------------------------------------------------------------------- names


def test_backend_names_as_in_ray() -> None:
    assert types.Backend("gloo") == types.Backend.GLOO == "GLOO"
    assert types.Backend("Torch_Gloo") == "TORCH:GLOO"
    assert types.Backend("torch:hccl") == "TORCH:HCCL"
    assert types.Backend.NCCL == "NCCL"
    assert types.Backend.UNRECOGNIZED == "unrecognized"
    with pytest.raises(ValueError, match="Unrecognized backend: 'nlcc'"):
        types.Backend("nlcc")
    assert not hasattr(types.Backend, "MINE")
    register_collective_backend("mine", OnlyAllreduce)
    assert types.Backend.MINE == types.Backend("mine") == "MINE"
    assert types.ReduceOp is ReduceOp
