"""Makes a `torch.distributed` backend for one group, from torch's own classes but outside its process groups.

`torch.distributed.init_process_group` and its default group belong to the user, and are not used here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch.distributed
from torch.distributed import distributed_c10d

from raycollect.backends.capabilities import BUILT_IN, TORCH_PREFIX, torch_line
from raycollect.core.model import GroupSpec
from raycollect.core.protocols import Rendezvous
from raycollect.errors import (
    BackendNotInstalledError,
    BackendUnavailableError,
    CollectiveTimeoutError,
    InternalError,
    InvalidGroupError,
    RaycollectError,
)
from raycollect.errors.text import listed

c10d: Any = distributed_c10d  # its type hints are partial, and differ between releases

# Backend -> module and class of its options, for creators that take them
VENDOR_OPTIONS = {
    "sccl": ("torch_tpu", "ProcessGroupSCCLOptions"),
    "hccl": ("torch_npu._C._distributed_c10d", "ProcessGroupHCCL.Options"),
}


class _TorchStore(c10d.Store):  # type: ignore[misc]
    """The rendezvous as torch's store. Each key is set once, by one rank.

    torch's own stores do not fit: a TCPStore listens on all interfaces for anyone, a FileStore needs a shared file
    system, and a HashStore works within one process.
    """

    def __init__(self, rendezvous: Rendezvous, timeout_s: float) -> None:
        super().__init__()
        self._rendezvous = rendezvous
        self._timeout_s = timeout_s
        self.published: list[bytes] = []  # of all ranks, as far as this rank has read them

    def set(self, key: str, value: bytes | str) -> None:
        self.published.append(value.encode() if isinstance(value, str) else bytes(value))
        self._rendezvous.put(f"torch.key.{key}", self.published[-1])

    def get(self, key: str) -> bytes:
        value = self._rendezvous.get(f"torch.key.{key}", self._timeout_s)
        self.published.append(value)
        return value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._rendezvous.get(f"torch.key.{key}", timeout.total_seconds() if timeout else self._timeout_s)

    def check(self, keys: Sequence[str]) -> bool:
        try:
            self.wait(keys, timedelta(microseconds=1))
        except CollectiveTimeoutError:
            return False
        return True

    def add(self, key: str, amount: int) -> int:
        # Published values never change, so there is no counter.
        raise InternalError(detail=f"a torch.distributed backend counts in its store ({key!r}), which this one can't")


@dataclass(frozen=True, slots=True)
class _Request:
    """The arguments of a backend's constructor."""

    name: str
    spec: GroupSpec
    rank: int
    store: _TorchStore
    host: str
    timeout: timedelta

    @property
    def options(self) -> Mapping[str, Any]:
        return dict(self.spec.options)

    def refuse_options(self) -> None:
        if self.spec.options:
            raise self.invalid(f"it takes no options, and got {listed(self.options)}")

    def apply(self, options: Any) -> Any:
        # `timeout` also finds `_timeout`; its unit is seconds.
        for name, value in self.options.items():
            attribute = name if hasattr(options, name) else f"_{name}"
            if not hasattr(options, attribute):
                there = listed(each.lstrip("_") for each in dir(options) if not each.startswith("__"))
                raise self.invalid(f"there is no option {name!r}; there are {there}")
            if isinstance(getattr(options, attribute), timedelta):
                value = timedelta(seconds=value)  # its unit
            try:
                setattr(options, attribute, value)
            except TypeError as exc:
                raise self.invalid(f"option {name!r} can't be {value!r}: {exc}") from exc
        return options

    def invalid(self, why: str) -> InvalidGroupError:
        return InvalidGroupError(group_name=self.spec.name, detail=f"backend {self.spec.backend!r}: {why}")


def make(
    spec: GroupSpec, rank: int, rendezvous: Rendezvous, *, host: str, timeout_s: float
) -> tuple[Any, Sequence[bytes]]:
    """Makes this rank's `torch.distributed` backend; most wait for the other members in their own way.

    Returns also the socket addresses that its ranks have published; empty where unknown.
    """
    name = spec.backend.removeprefix(TORCH_PREFIX).lower()
    if not torch.distributed.is_available() or not torch.distributed.is_backend_available(name):
        line = BUILT_IN.get(TORCH_PREFIX + name) or torch_line(TORCH_PREFIX + name)
        detail = f"torch {torch.__version__} has no distributed backend {name!r} here. Install it: {line.install}"
        raise BackendNotInstalledError(group_name=spec.name, detail=detail)
    request = _Request(name, spec, rank, _TorchStore(rendezvous, timeout_s), host, timedelta(seconds=timeout_s))
    try:
        backend = _MAKERS.get(name, _make_plugin)(request)
    except RaycollectError:
        raise
    except Exception as exc:  # torch's, or of a plugin of torch
        detail = f"backend {spec.backend!r}: rank {rank} can't join from {host}: {type(exc).__name__}: {exc}"
        raise BackendUnavailableError(group_name=spec.name, detail=detail) from exc
    return backend, request.store.published if name == "gloo" else ()


def _make_gloo(request: _Request) -> Any:
    cls = c10d.ProcessGroupGloo
    options = cls._Options()
    options._timeout = request.timeout
    options._devices = [cls.create_device(hostname=request.host)]
    return cls(request.store, request.rank, request.spec.world_size, request.apply(options))


def _make_mpi(request: _Request) -> Any:
    # MPI has its own launcher; the group must equal its world.
    request.refuse_options()
    backend = c10d.ProcessGroupMPI.create([])
    if backend is None or (backend.rank(), backend.size()) != (request.rank, request.spec.world_size):
        world = "no rank" if backend is None else f"rank {backend.rank()} of {backend.size()}"
        detail = f"MPI started this process as {world}, and the group has it as rank {request.rank}"
        cure = "start the actors' processes under mpirun, and give the members the ranks that MPI gave them"
        raise BackendUnavailableError(group_name=request.spec.name, detail=f"{detail}; {cure}")
    return backend


def _make_ucc(request: _Request) -> Any:
    request.refuse_options()
    return c10d.ProcessGroupUCC(request.store, request.rank, request.spec.world_size, timeout=request.timeout)


def _make_with_options(request: _Request) -> Any:
    cls = getattr(c10d, f"ProcessGroup{request.name.upper()}")
    options = cls.Options()
    options._timeout = request.timeout
    options.global_ranks_in_group = list(range(request.spec.world_size))
    options.group_name = request.spec.group_id
    return cls(request.store, request.rank, request.spec.world_size, request.apply(options))


def _make_plugin(request: _Request) -> Any:
    # A backend that its package registered with `torch.distributed.Backend.register_backend`. Its creator takes either
    # four arguments and our options as keywords, or torch's description of the group and an object with the options.
    plugin = c10d.Backend._plugins[request.name.upper()]
    spec = request.spec
    if not plugin.extended_api:
        try:
            return plugin.creator_fn(request.store, request.rank, spec.world_size, request.timeout, **request.options)
        except TypeError as exc:
            raise request.invalid(f"its creator does not take {listed(request.options) or 'this'}: {exc}") from exc
    group = c10d._DistributedBackendOptions()
    group.store = request.store
    group.group_rank = request.rank
    group.group_size = spec.world_size
    group.timeout = request.timeout
    group.group_id = spec.group_id
    group.global_ranks_in_group = list(range(spec.world_size))
    return plugin.creator_fn(group, _vendor_options(request) if spec.options else None)


def _vendor_options(request: _Request) -> Any:
    if request.name not in VENDOR_OPTIONS:
        return SimpleNamespace(**request.options)
    module, path = VENDOR_OPTIONS[request.name]
    cls: Any = import_module(module)
    for name in path.split("."):
        cls = getattr(cls, name)
    return request.apply(cls())


_MAKERS: dict[str, Callable[[_Request], Any]] = {
    "gloo": _make_gloo,
    "mpi": _make_mpi,
    "nccl": _make_with_options,
    "ucc": _make_ucc,
    "xccl": _make_with_options,
}
