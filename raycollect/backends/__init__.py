"""The backends: what each can do, whether it is installed, and how to load it.

A backend is a factory (`CommunicatorFactory`) and an entry of the capability table; names are case-insensitive. The
package has built-in entries, and `register` adds others. `torch:<name>` is any backend of `torch.distributed`.
Importing this package loads none of them.

Authors of backends import the interfaces (`core.protocols`) and their values (`core.model`) from here, too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib import import_module
from typing import NamedTuple, cast

from raycollect.backends.capabilities import BUILT_IN, OF_NCCL, TORCH_PREFIX, Capabilities, torch_line
from raycollect.backends.experimental import warn_once
from raycollect.backends.gpus import Gpu
from raycollect.backends.gpus import why_not as gpus_meet
from raycollect.core.model import GroupSpec, Kernel, Launch, OpKind, Pricing, ReduceOp, TensorInfo
from raycollect.core.protocols import (
    Communicator,
    CommunicatorFactory,
    Exchange,
    Joining,
    Rendezvous,
    SegmentSource,
)
from raycollect.errors import BackendNotInstalledError, BackendUnavailableError, UnknownBackendError
from raycollect.errors.text import shown

__all__ = [
    "BACKENDS",
    "BackendChoice",
    "Capabilities",
    "Communicator",
    "CommunicatorFactory",
    "Exchange",
    "Gpu",
    "GroupSpec",
    "Joining",
    "Kernel",
    "Launch",
    "OpKind",
    "Pricing",
    "ReduceOp",
    "Rendezvous",
    "SegmentSource",
    "TensorInfo",
    "canonical",
    "check_placement",
    "choose",
    "get",
    "is_available",
    "is_known",
    "load",
    "names",
    "ops_of",
    "register",
]

BACKENDS: dict[str, Capabilities] = dict(BUILT_IN)
"""Name -> entry: the built-in ones, and those that `register` has added in this process."""

_ALIASES = {"torch_gloo": "torch:gloo"}
"""Other names that Ray knows, in lower case."""


def canonical(name: str) -> str:
    """Normalizes a backend's name: Ray writes ``"GLOO"``. A non-string becomes a name without a backend."""
    lower = name.lower() if isinstance(name, str) else shown(name)
    return _ALIASES.get(lower, lower)


def get(name: str, group_name: str = "default") -> Capabilities:
    """Looks up a backend.

    Raises:
        UnknownBackendError: No backend has that name; the message lists the existing ones.
    """
    key = canonical(name)
    line = BACKENDS.get(key) or _torch_line(key)
    if line is None:
        detail = (
            f"no backend {shown(name)}; there are {', '.join(names())}, {TORCH_PREFIX}<any of torch.distributed>, "
            "and 'auto'. register_collective_backend adds others, in each process"
        )
        raise UnknownBackendError(group_name=group_name, detail=detail)
    return line


def names() -> tuple[str, ...]:
    """Lists the backends of the table, installed or not; loads nothing. torch may have others."""
    return tuple(BACKENDS)


def is_known(name: str) -> bool:
    """Tells whether a backend of that name exists, installed or not; loads nothing."""
    key = canonical(name)
    return key in BACKENDS or _torch_line(key) is not None


def is_available(name: str) -> bool:
    """Tells whether a backend's library can be imported here, by importing it.

    Raises:
        UnknownBackendError: No backend has that name.
    """
    return not lacks(name)


def lacks(name: str) -> str:
    """Names the requirement of a backend that can't be imported here, or ``""``.

    Raises:
        UnknownBackendError: No backend has that name.
    """
    return _missing(get(name))


def load(name: str, group_name: str = "default") -> CommunicatorFactory:
    """Imports a backend and gives its factory.

    Raises:
        UnknownBackendError: No backend has that name.
        BackendNotInstalledError: Its library is missing; the message has the command that installs it.
    """
    backend = get(name, group_name)
    if missing := _missing(backend):
        cure = f". Install it: {backend.install}" if backend.install else ""
        why = f"a requirement is missing ({missing}){cure}; or use backend='auto', which picks an installed backend"
        raise BackendNotInstalledError(group_name=group_name, detail=f"backend {backend.name!r}: {why}")
    if BUILT_IN.get(backend.name) is backend and backend.is_experimental:
        warn_once(f"backend {backend.name!r}")
    if backend.factory is not None:
        return backend.factory
    try:
        return cast("CommunicatorFactory", import_module(backend.module).create)
    except (ImportError, AttributeError) as exc:
        detail = f"backend {backend.name!r}: its module {backend.module} has no working factory: {exc}"
        raise BackendNotInstalledError(group_name=group_name, detail=detail) from exc


def ops_of(name: str) -> tuple[str, ...]:
    """Gives the values of the operations that a backend runs itself, as in `GroupSpec.ops`.

    Raises:
        UnknownBackendError: No backend has that name.
    """
    ops = get(name).ops
    return tuple(kind.value for kind in OpKind if kind in ops)


class BackendChoice(NamedTuple):
    """The backend that ``"auto"`` picks.

    Attributes:
        backend: The backend's name.
        why: The reason: "2 ranks are on one machine".
    """

    backend: str
    why: str


def choose(machines: Sequence[str], gpus: Sequence[Gpu | None] = (), options: Collection[str] = ()) -> BackendChoice:
    """Picks the backend for ``"auto"``: ``"nccl"`` where all of several members have a GPU and can meet there.

    Args:
        machines: One machine id per member, as in `Member.machine`.
        gpus: The GPU of each member, as `gpus.here` returns it; empty if unknown.
        options: The names of the backend's options.
    """
    count, places = len(machines), len(set(machines))
    if count == 1:
        return BackendChoice("local", "1 rank is alone")
    where = f"{count} ranks are on {'one machine' if places == 1 else f'{places} machines'}"
    chosen = "shm" if places == 1 else "tcp"
    if not gpus or None in gpus:
        return BackendChoice(chosen, where)
    strange = sorted(set(options) - {*OF_NCCL})
    why_not = f"nccl has no option {strange[0]!r}" if strange else gpus_meet(machines, gpus)
    if why_not:
        return BackendChoice(chosen, f"{where}; each has a GPU, but {why_not}")
    return BackendChoice("nccl", f"each of {count} ranks has a GPU")


def check_placement(name: str, machines: Sequence[str], group_name: str = "default") -> None:
    """Refuses members on machines (see `Member.machine`) that a backend can't connect.

    Raises:
        UnknownBackendError: No backend has that name.
        BackendUnavailableError: The backend can't connect these members.
    """
    backend = get(name, group_name)
    if backend.one_process and len(machines) > 1:
        detail = f"backend {backend.name!r} lives inside one process, and the group has {len(machines)} members"
    elif not backend.cross_host and len(set(machines)) > 1:
        detail = f"backend {backend.name!r} needs all members on one machine, and they are on {len(set(machines))}"
    else:
        return
    raise BackendUnavailableError(group_name=group_name, detail=f"{detail}; backend='auto' picks one that fits")


def register(capabilities: Capabilities) -> None:
    """Adds a backend to this process's table. Every process of a group needs it.

    Raises:
        ValueError: Another backend has that name, or the name is one of torch's.
    """
    name = capabilities.name
    if name.startswith(TORCH_PREFIX) or canonical(name) != name:
        raise ValueError(f"the name {name!r} is taken: it means {canonical(name)!r} or a backend of torch.distributed")
    if BACKENDS.setdefault(name, capabilities) != capabilities:
        raise ValueError(f"another backend {name!r} is already registered")


def _torch_line(name: str) -> Capabilities | None:
    try:
        return torch_line(name) if name.startswith(TORCH_PREFIX) else None
    except ValueError:
        return None


def _missing(backend: Capabilities) -> str:
    said = []
    for library in backend.libraries:
        try:
            import_module(library)
        except (ImportError, OSError) as exc:  # OSError: one of its shared objects is missing
            said.append(f"{library}: {exc}")
        else:
            said.clear()
            break
    return "; ".join(said) or (backend.probe() if backend.probe else "")
