"""The capability table: what each built-in backend can do."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from raycollect.core.model import BY_RINGS, RANK_ORDER, GroupSpec, OpKind, Pricing, ReduceOp
from raycollect.core.operations import ALL_KERNELS, USUAL
from raycollect.core.protocols import CommunicatorFactory
from raycollect.errors import InvalidGroupError
from raycollect.errors.text import listed, shown

TORCH_PREFIX = "torch:"  # The prefix of `torch.distributed` backends
_NAME = re.compile(r"(torch:)?[a-z0-9][a-z0-9_.-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend can do.

    Attributes:
        name: What users call it, in lower case.
        module: The module with its factory `create`; or
        factory: the factory itself.
        libraries: Modules of which it needs one; empty if it needs none.
        install: The command that installs the missing library, or its name.
        probe: Names another missing requirement of this machine, or "".
        ops: The operations it runs itself; the planner builds others from these. The default lacks SCAN and EXSCAN.
        reduce_ops: The reduce ops it runs.
        devices: Where its tensors may live, as torch calls it: ``"cpu"``, ``"cuda"``; ``"any"`` if unknown.
        interruptible: Whether an abort wakes a rank inside a kernel.
        bitwise: Whether each element is the left fold in rank order; else bits are only equal across ranks.
        cross_host: Whether members may be on several machines.
        one_process: Whether all ranks must be in one process.
        coalesces: Whether its `launch` runs several kernels with fewer synchronizations of the ranks than one by one.
        chunk_nbytes: The most memory that its chunks take on a rank, in bytes; -1 if unknown.
        by_host_nbytes: The same where it goes host by host (`GroupSpec.hosts`).
        resumes: Whether its communicator survives a launch that has failed on some ranks, if the next launch has a
            higher number than any that a rank has seen; else the ranks create a new communicator.
        pairs: The backend of communicators of two ranks for point-to-point calls; empty: itself.
        pricing: How it moves data, for the choice of algorithms and predicted times; by default by rings, as most
            libraries do.
        own_tensors: Whether, on devices, it takes tensors of its library only, so that others can't be staged.
        chip_map: Whether it takes the option ``chip_map`` of a rank table.
        tested: Whether this project's own tests run it.

    Raises:
        ValueError: The name is invalid, or not exactly one of module and factory is given.
    """

    name: str
    module: str = ""
    factory: CommunicatorFactory | None = None
    libraries: tuple[str, ...] = ()
    install: str = ""
    probe: Callable[[], str] | None = field(default=None, compare=False)
    ops: frozenset[OpKind] = USUAL
    reduce_ops: frozenset[ReduceOp] = frozenset(ReduceOp)
    devices: frozenset[str] = frozenset({"cpu"})
    interruptible: bool
    bitwise: bool
    cross_host: bool
    one_process: bool = False
    coalesces: bool = False
    chunk_nbytes: int = -1
    by_host_nbytes: int = -1
    resumes: bool = False
    pairs: str = ""
    pricing: Pricing = BY_RINGS
    own_tensors: bool = False
    chip_map: bool = False
    tested: bool = False

    @property
    def is_experimental(self) -> bool:
        """Whether this project has never run it on its devices."""
        return not self.tested and "cpu" not in self.devices

    @property
    def memory(self) -> str:
        """The memory in which its kernels work, as in `GroupSpec.memory`."""
        if len(self.devices) > 1 or (self.own_tensors and self.devices != _CPU):
            return ""
        return next((kind for kind in ("cpu", "cuda") if kind in self.devices), "")

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or self.name == "auto":
            raise ValueError(
                f"{self.name!r} can't name a backend: lower-case letters, digits, '_', '-', '.'; not 'auto'"
            )
        if bool(self.module) == (self.factory is not None):
            raise ValueError(f"backend {self.name!r} has a module, or a factory")


def torch_line(name: str) -> Capabilities:
    """Makes the entry of a `torch.distributed` backend that the table lacks; raises ValueError for invalid names."""
    plain = name.removeprefix(TORCH_PREFIX)
    install = f"pip install torch, and the package that registers {plain!r} with torch.distributed; import that package"
    return _torch(plain, install=install, devices=frozenset({"any"}))


def _torch(name: str, *, devices: frozenset[str], library: str = "torch", **others: Any) -> Capabilities:
    return Capabilities(
        name=TORCH_PREFIX + name,
        module="raycollect.backends.torch_dist.communicator",
        libraries=(library,),
        probe=lambda: _not_in_torch(name, on_gpu=devices == _CUDA),
        devices=devices,
        bitwise=False,
        cross_host=True,
        chunk_nbytes=32 << 20,
        own_tensors=True,
        **{"interruptible": False, **others},
    )


def _not_in_torch(name: str, *, on_gpu: bool) -> str:
    # Says what torch lacks: distributed, the backend, or a GPU.
    try:
        distributed = import_module("torch.distributed")
    except (ImportError, OSError) as exc:
        return f"torch.distributed: {exc}"
    if not distributed.is_available():
        return "this torch was built without torch.distributed"
    if not distributed.is_backend_available(name):
        return f"this torch has no distributed backend {name!r}"
    return "a GPU: torch sees none" if on_gpu and not import_module("torch").cuda.is_available() else ""


def no_gpu() -> str:
    """Says why NCCL can't be used here though cupy is installed, or ""."""
    try:
        cupy, nccl = import_module("cupy"), import_module("cupy.cuda.nccl")
        count = int(cupy.cuda.runtime.getDeviceCount())
    except Exception as exc:  # noqa: BLE001 - no driver, or an old one: cupy raises many kinds
        return f"a GPU: {exc}"
    if not nccl.available:
        return "NCCL: cupy does not find its library"
    return "" if count else "a GPU: this process sees none"


_CPU, _CUDA = frozenset({"cpu"}), frozenset({"cuda"})
_MEMORY = Pricing(transport="memory")

RINGS_OF_GLOO = frozenset({OpKind.ALLREDUCE, OpKind.REDUCE, OpKind.BROADCAST})
"""The operations of backend `gloo` that the library runs, on large arrays in CPU memory."""

RINGS_OF_TORCH = frozenset({OpKind.ALLREDUCE, OpKind.BROADCAST})
"""The same for torch's backends."""

_LINES = (
    Capabilities(
        name="local",
        module="raycollect.backends.local",
        ops=ALL_KERNELS,
        interruptible=True,
        bitwise=True,
        cross_host=False,
        pricing=_MEMORY,
        one_process=True,
        chunk_nbytes=0,
        tested=True,
    ),
    Capabilities(
        name="shm",
        module="raycollect.backends.shm.communicator",
        ops=ALL_KERNELS,
        interruptible=True,
        bitwise=True,
        cross_host=False,
        pricing=_MEMORY,
        coalesces=True,
        chunk_nbytes=2 << 20,
        resumes=True,
        tested=True,
    ),
    Capabilities(
        name="tcp",
        module="raycollect.backends.tcp.communicator",
        ops=ALL_KERNELS,
        interruptible=True,
        bitwise=True,
        cross_host=True,
        pricing=Pricing(transport="mesh", by_host=True),
        chunk_nbytes=12 << 20,
        by_host_nbytes=34 << 20,
        resumes=True,
        tested=True,
    ),
    Capabilities(
        name="gloo",
        module="raycollect.backends.gloo.communicator",
        ops=ALL_KERNELS,
        libraries=("raycollect.backends.gloo.library",),
        # Installs pygloo for Python 3.10, the last with its wheels, and xoscar for later versions.
        install="pip install 'raycollect[gloo]'",
        interruptible=False,
        bitwise=False,
        cross_host=True,
        pricing=Pricing(transport="mesh", rings=RINGS_OF_GLOO, by_host=True),
        pairs="tcp",  # between two ranks it uses plain sockets anyway
        chunk_nbytes=12 << 20,
        by_host_nbytes=34 << 20,
        tested=True,
    ),
    Capabilities(
        name="nccl",
        module="raycollect.backends.nccl.communicator",
        libraries=("cupy.cuda.nccl",),
        # cupy's wheels are by the CUDA of the driver.
        install="pip install 'raycollect[cuda12]' or 'raycollect[cuda13]'",
        probe=lambda: no_gpu(),
        devices=_CUDA,
        interruptible=True,
        bitwise=False,
        cross_host=True,
    ),
    _torch(
        "gloo",
        install="pip install torch",
        devices=_CPU,
        ops=ALL_KERNELS,
        interruptible=True,
        pricing=Pricing(transport="mesh", rings=RINGS_OF_TORCH, by_host=True),
        by_host_nbytes=34 << 20,
        pairs="tcp",
        tested=True,
    ),
    _torch(
        "mpi",
        install="a torch that was built from source with MPI; the wheels have none",
        devices=_CPU,
        ops=USUAL - {OpKind.REDUCESCATTER},
    ),
    _torch("nccl", install="a CUDA build of torch (pip install torch, on Linux)", devices=_CUDA),
    _torch(
        "xccl",
        install="the build of torch for Intel XPU, from the XPU index of its site",
        devices=frozenset({"xpu"}),
    ),
    _torch(
        "hccl",
        library="torch_npu",
        install="pip install torch_npu, the version that goes with your torch and CANN",
        devices=frozenset({"npu"}),
    ),
    _torch(
        "sccl",
        library="torch_tpu",
        install="the torch_tpu wheel of SOPHGO's SDK",
        devices=frozenset({"tpu"}),
        ops=USUAL - {OpKind.SEND, OpKind.RECV, OpKind.REDUCESCATTER},
        chip_map=True,
    ),
)

# Name -> entry, in the order of the documentation
BUILT_IN: dict[str, Capabilities] = {line.name: line for line in _LINES}


# ------------------------------------------------------------------------------- options

OF_NCCL = ("device",)
"""The options (`pg_options`) of `nccl`."""

_KNOWN = (RANK_ORDER[0], *OF_NCCL)
"""The options of all backends that ``"auto"`` picks from."""


def refuse_unknown(spec: GroupSpec) -> None:
    """Raises InvalidGroupError for options that no backend of ``"auto"`` has, for a group of `local` or `shm`.

    These backends have no options, and ignore those of the others, as a program may run on any number of hosts. A
    backend of another package may be built on one of them, and have its own options.
    """
    unknown = [name for name, _ in spec.options if name not in _KNOWN]
    if unknown and spec.backend in ("local", "shm"):
        detail = f"there is no option {listed(map(shown, unknown))}; there are {listed(map(repr, _KNOWN))}"
        raise InvalidGroupError(group_name=spec.name, detail=f"backend {spec.backend!r}: {detail}")
