"""How a `torch.distributed` backend is made for one group: by torch's own classes, but apart from its process groups.

`torch.distributed.init_process_group` and its default group are the user's; nothing here touches them.
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

from raycollect.contracts import Rendezvous
from raycollect.errors import (
    BackendNotInstalledError,
    BackendUnavailableError,
    CollectiveTimeoutError,
    InternalError,
    InvalidGroupError,
    RaycollectError,
)
from raycollect.model import GroupSpec

from .capabilities import BUILT_IN, TORCH_PREFIX, torch_line

__all__ = ["c10d", "make"]

c10d: Any = distributed_c10d
"""torch types a part of it, another one in each release."""

VENDOR_OPTIONS = {
    "sccl": ("torch_tpu", "ProcessGroupSCCLOptions"),
    "hccl": ("torch_npu._C._distributed_c10d", "ProcessGroupHCCL.Options"),
}
"""Backend -> module and name of the class of its options, for those whose creator takes them."""


class _Store(c10d.Store):  # type: ignore[misc]
    """Our rendezvous as torch's store. Each key is set once, by one rank.

    torch's own stores would not do: a TCPStore listens on all interfaces for whoever comes, a FileStore needs a common
    file system, a HashStore one process.
    """

    def __init__(self, rendezvous: Rendezvous, timeout_s: float) -> None:
        super().__init__()
        self._rendezvous = rendezvous
        self._timeout_s = timeout_s

    def set(self, key: str, value: bytes | str) -> None:
        """Publishes a key."""
        self._rendezvous.put(f"torch.key.{key}", value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Waits for a key."""
        return self._rendezvous.get(f"torch.key.{key}", self._timeout_s)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits for keys."""
        for key in keys:
            self._rendezvous.get(f"torch.key.{key}", timeout.total_seconds() if timeout else self._timeout_s)

    def check(self, keys: Sequence[str]) -> bool:
        """Tells whether all keys are there."""
        try:
            self.wait(keys, timedelta(microseconds=1))
        except CollectiveTimeoutError:
            return False
        return True

    def add(self, key: str, amount: int) -> int:
        """Can't be done: what is published stays as it is."""
        raise InternalError(detail=f"a torch.distributed backend counts in its store ({key!r}), which this one can't")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What a backend is made of."""

    name: str
    spec: GroupSpec
    rank: int
    store: _Store
    host: str
    timeout: timedelta

    @property
    def options(self) -> Mapping[str, Any]:
        """What the user passes through."""
        return dict(self.spec.options)

    def refuse_options(self) -> None:
        """For a backend that takes none."""
        if self.spec.options:
            raise self.invalid(f"it takes no options, and got {', '.join(self.options)}")

    def apply(self, options: Any) -> Any:
        """Sets the user's options as attributes of the backend's; ``timeout`` also finds ``_timeout``, in seconds."""
        for name, value in self.options.items():
            attribute = name if hasattr(options, name) else f"_{name}"
            if not hasattr(options, attribute):
                there = ", ".join(each.lstrip("_") for each in dir(options) if not each.startswith("__"))
                raise self.invalid(f"there is no option {name!r}; there are {there}")
            if isinstance(getattr(options, attribute), timedelta):
                value = timedelta(seconds=value)  # its unit
            try:
                setattr(options, attribute, value)
            except TypeError as exc:
                raise self.invalid(f"option {name!r} can't be {value!r}: {exc}") from exc
        return options

    def invalid(self, why: str) -> InvalidGroupError:
        """An error that names the backend."""
        return InvalidGroupError(group_name=self.spec.name, detail=f"backend {self.spec.backend!r}: {why}")


def make(spec: GroupSpec, rank: int, rendezvous: Rendezvous, *, host: str, timeout_s: float) -> Any:
    """Makes this rank's `torch.distributed` backend; most wait for the other members, by their own ways.

    Args:
        spec: The group; its backend is ``"torch:<name>"``.
        rank: This process's rank.
        rendezvous: How the members find each other.
        host: The address to listen on, for those that listen and can be told.
        timeout_s: How long to wait for a member.

    Raises:
        BackendNotInstalledError: torch has no such backend here; the text says what to install.
        InvalidGroupError: The options don't fit.
        BackendUnavailableError: The members can't connect.
        CollectiveTimeoutError: A member did not come.
    """
    name = spec.backend.removeprefix(TORCH_PREFIX).lower()
    if not torch.distributed.is_available() or not torch.distributed.is_backend_available(name):
        line = BUILT_IN.get(TORCH_PREFIX + name) or torch_line(TORCH_PREFIX + name)
        detail = f"torch {torch.__version__} has no distributed backend {name!r} here. Install it: {line.install}"
        raise BackendNotInstalledError(group_name=spec.name, detail=detail)
    request = _Request(
        name=name,
        spec=spec,
        rank=rank,
        store=_Store(rendezvous, timeout_s),
        host=host,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        return _MAKERS.get(name, _make_plugin)(request)
    except RaycollectError:
        raise
    except Exception as exc:
        detail = f"backend {spec.backend!r}: rank {rank} can't join from {host}: {type(exc).__name__}: {exc}"
        raise BackendUnavailableError(group_name=spec.name, detail=detail) from exc


def _make_gloo(request: _Request) -> Any:
    cls = c10d.ProcessGroupGloo
    options = cls._Options()
    options._timeout = request.timeout
    options._devices = [cls.create_device(hostname=request.host)]
    return cls(request.store, request.rank, request.spec.world_size, request.apply(options))


def _make_mpi(request: _Request) -> Any:
    """MPI has its own launcher; the group must be its world."""
    request.refuse_options()
    made = c10d.ProcessGroupMPI.create([])
    if made is None or (made.rank(), made.size()) != (request.rank, request.spec.world_size):
        world = "no rank" if made is None else f"rank {made.rank()} of {made.size()}"
        detail = f"MPI started this process as {world}, and the group has it as rank {request.rank}"
        cure = "start the actors' processes under mpirun, and give the members the ranks that MPI gave them"
        raise BackendUnavailableError(group_name=request.spec.name, detail=f"{detail}; {cure}")
    return made


def _make_ucc(request: _Request) -> Any:
    request.refuse_options()
    return c10d.ProcessGroupUCC(request.store, request.rank, request.spec.world_size, timeout=request.timeout)


def _make_with_options(request: _Request) -> Any:
    """NCCL and XCCL."""
    cls = getattr(c10d, f"ProcessGroup{request.name.upper()}")
    options = cls.Options()
    options._timeout = request.timeout
    options.global_ranks_in_group = list(range(request.spec.world_size))
    options.group_name = request.spec.group_id
    return cls(request.store, request.rank, request.spec.world_size, request.apply(options))


def _make_plugin(request: _Request) -> Any:
    """A backend that its package has registered by `torch.distributed.Backend.register_backend`.

    Its creator has one of two forms: four arguments, and our options as keywords; or torch's description of the group
    and an object with the options.
    """
    plugin = c10d.Backend._plugins[request.name.upper()]
    spec = request.spec
    if not plugin.extended_api:
        try:
            return plugin.creator_fn(request.store, request.rank, spec.world_size, request.timeout, **request.options)
        except TypeError as exc:
            raise request.invalid(f"its creator does not take {', '.join(request.options) or 'this'}: {exc}") from exc
    group = c10d._DistributedBackendOptions()
    group.store = request.store
    group.group_rank = request.rank
    group.group_size = spec.world_size
    group.timeout = request.timeout
    group.group_id = spec.group_id
    group.global_ranks_in_group = list(range(spec.world_size))
    return plugin.creator_fn(group, _vendor_options(request) if spec.options else None)


def _vendor_options(request: _Request) -> Any:
    """The options as the vendor's class, where it is known, else as plain attributes."""
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
