"""`"auto"` picks `nccl` where all members have a GPU: what each has, on a fake of cupy, and what follows from it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raycollect import backends
from raycollect.backends import Gpu, gpus
from raycollect.errors import BackendUnavailableError
from raycollect.member import init
from raycollect.member import operations as imperative
from tests.fake_cupy import installed
from tests.pure.member.gpu_ranks import Ranks, ranks  # noqa: F401 - a fixture
from tests.pure.on_gpu import GpuTeam


def gpu(name: str = "0000:10:00.0", version: int = 22803, may_share: bool = True) -> Gpu:
    return Gpu(name=name, version=version, may_share=may_share)


A, B = gpu("a"), gpu("b")
NEW, B_NEW, UNWILLING = gpu("a", 23000), gpu("b", 23000), gpu("a", 23000, may_share=False)


# ---------------------------------------------------------------------------------------------- what is picked


@pytest.mark.parametrize(
    ("machines", "present", "options", "backend", "why"),
    [
        ("mm", [A, B], (), "nccl", "each of 2 ranks has a GPU"),
        ("mno", [A, A, A], (), "nccl", "each of 3 ranks has a GPU"),
        ("mm", [NEW, NEW], (), "nccl", "each of 2 ranks has a GPU"),
        ("mnn", [NEW, NEW, NEW], (), "nccl", "each of 3 ranks has a GPU"),
        ("mmmm", [B_NEW, NEW, NEW, NEW], (), "shm", "ranks [1, 2, 3] share the GPU m/a; NCCL's documentation allows 2"),
        ("mm", [A, B], ("device",), "nccl", "each of 2 ranks has a GPU"),
        ("m", [A], (), "local", "1 rank is alone"),
        ("mm", [], (), "shm", "2 ranks are on one machine"),
        ("mm", [A, None], (), "shm", "2 ranks are on one machine"),
        ("mn", [None, None], (), "tcp", "2 ranks are on 2 machines"),
        ("mm", [A, A], (), "shm", "each has a GPU, but ranks [0, 1] share the GPU m/a, which needs NCCL 2.30"),
        (
            "mnn",
            [A, B, B],
            (),
            "tcp",
            "each has a GPU, but ranks [1, 2] share the GPU n/b, which needs NCCL 2.30",
        ),
        ("mmm", [NEW, UNWILLING, B_NEW], (), "shm", "share a GPU, and NCCL_MULTI_RANK_GPU_ENABLE forbids it"),
        ("mm", [A, gpu("b", 22901)], (), "shm", "but the ranks have different releases of NCCL"),
        ("mm", [A, B], ("chip_map",), "shm", "but nccl has no option 'chip_map'"),
    ],
)
def test_what_auto_picks(
    machines: str, present: Sequence[Gpu | None], options: tuple[str, ...], backend: str, why: str
) -> None:
    choice = backends.choose(list(machines), present, options)
    assert choice.backend == backend
    assert why in choice.why
    backends.check_placement(choice.backend, list(machines))


# ---------------------------------------------------------------------------------------------- what there is


def test_parts_of_one_gpu_by_mig_are_not_the_same_gpu() -> None:
    """They have its PCI bus id in common."""
    with installed(2) as fake:
        fake.split(bytes(range(16)), bytes(range(1, 17)))
        parts = []
        for device in range(2):
            with fake.cupy.cuda.Device(device):
                parts.append(gpus.here())
    assert parts[0] != parts[1]
    assert "each of 2 ranks has a GPU" in backends.choose(["m", "m"], parts).why


def test_what_nccl_has_read_is_not_changed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(gpus.SHARING, raising=False)
    with installed(2, nccl_version=23000):
        GpuTeam(1).close()
        assert gpus.may_share()
        GpuTeam(2).close()  # NCCL has read its environment
        assert not gpus.may_share()
        monkeypatch.setenv(gpus.SHARING, "1")
        assert not gpus.may_share()
        with pytest.raises(BackendUnavailableError, match="before that first uses NCCL"):
            GpuTeam(3)


def test_there_is_none_where_the_driver_sees_none() -> None:
    with installed(0):
        assert gpus.here() is None


@pytest.mark.parametrize("lack", ["given", "visible", "driver", "cupy"])
def test_who_has_none_does_not_import_cupy(lack: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither what is missing nor what is there: only where all else is, is it worth a second."""
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(gpus, "_DRIVER", (tmp_path / "none", tmp_path) if lack != "driver" else (tmp_path / "none",))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "" if lack == "visible" else "0")
    monkeypatch.setattr(gpus, "find_spec", lambda name: None if lack == "cupy" else name)
    imports: list[str] = []
    monkeypatch.setattr(gpus, "no_gpu", lambda: imports.append("cupy") or "there is no GPU in the end")
    assert gpus.here(given=False if lack == "given" else None) is None
    assert not imports
    monkeypatch.setattr(gpus, "_DRIVER", (tmp_path,))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(gpus, "find_spec", lambda name: name)
    assert gpus.here() is None
    assert imports == ["cupy"]


def test_a_device_that_fails_is_none(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with installed(1) as fake:
        runtime = fake.cupy.cuda.runtime

        def fail(device: int) -> str:
            raise runtime.CUDARuntimeError(1)

        monkeypatch.setattr(runtime, "deviceGetPCIBusId", fail)
        assert gpus.here() is None
    assert "cudaErrorInvalidValue" in caplog.text


# ---------------------------------------------------------------------------------------------- groups of members


def _on_own_gpu(ranks: Ranks, rank: int) -> None:  # noqa: F811
    ranks.cupy.cuda.Device(rank).use()


def test_members_that_have_gpus_meet_on_them(ranks: Ranks) -> None:  # noqa: F811
    """With tensors of the host and of GPUs, in one call."""
    ranks.must(3, lambda rank: _on_own_gpu(ranks, rank))
    name = ranks.group(3, "auto")

    def body(rank: int) -> tuple[str, Any]:
        mine = np.full(5, rank + 1, np.float32)
        tensor = mine if rank == 1 else ranks.put(rank, mine)
        imperative.allreduce(tensor, name)
        return init.get_group_handle(name).backend, (tensor if rank == 1 else tensor.get()).tolist()

    assert ranks.must(3, body) == [("nccl", [6.0] * 5)] * 3
    assert ranks.fake.counts["nccl.allReduce"] == 6  # each works on its own GPU, so NCCL connects them


def test_members_of_which_one_has_none_meet_elsewhere(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    assigned = iter([A, None])
    monkeypatch.setattr(gpus, "here", lambda given: next(assigned))
    name = ranks.group(2, "auto")
    assert ranks.must(2, lambda rank: init.get_group_handle(name).backend) == ["shm"] * 2


def test_a_group_for_tensors_of_the_host_has_a_backend_of_the_host(ranks: Ranks) -> None:  # noqa: F811
    ranks.must(2, lambda rank: _on_own_gpu(ranks, rank))
    name = ranks.host_group(2, "auto")
    assert ranks.must(2, lambda rank: init.get_group_handle(name).backend) == ["shm"] * 2
