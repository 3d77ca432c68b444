"""The backends: what each can do, whether it is installed, and how to load it.

A backend is a module with a factory `create` (see `raycollect.model.CommunicatorFactory`) and a line in `BACKENDS`.
Importing this package loads none of them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import cast

from raycollect.errors import BackendNotInstalledError, BackendUnavailableError, UnknownBackendError
from raycollect.model import CommunicatorFactory, OpKind, ReduceOp

__all__ = ["BACKENDS", "Capabilities", "check_placement", "choose", "get", "is_available", "load"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend can do.

    Attributes:
        name: What users call it.
        module: The module with its factory.
        libraries: Modules of which it needs one; empty where it needs none.
        install: The command that installs what is missing.
        ops: The operations it runs.
        reduce_ops: The reduce ops it runs.
        devices: Where its tensors may live.
        interruptible: Whether an abort wakes a rank in mid-kernel.
        bitwise: Whether each element is the left fold in rank order; else bits are only equal across ranks.
        cross_host: Whether members may be on several machines.
        one_process: Whether all ranks must be in one process.
    """

    name: str
    module: str
    libraries: tuple[str, ...] = ()
    install: str = ""
    ops: frozenset[OpKind] = frozenset(OpKind)
    reduce_ops: frozenset[ReduceOp] = frozenset(ReduceOp)
    devices: frozenset[str] = frozenset({"cpu"})
    interruptible: bool
    bitwise: bool
    cross_host: bool
    one_process: bool = False


BACKENDS: dict[str, Capabilities] = {
    backend.name: backend
    for backend in (
        Capabilities(
            name="local",
            module="raycollect.backends.local",
            interruptible=True,
            bitwise=True,
            cross_host=False,
            one_process=True,
        ),
        Capabilities(name="shm", module="raycollect.backends.shm", interruptible=True, bitwise=True, cross_host=False),
        Capabilities(
            name="gloo",
            module="raycollect.backends.gloo",
            libraries=("pygloo", "xoscar.collective.xoscar_pygloo"),
            # pygloo's last wheels are for Python 3.10; xoscar's fork has them for 3.10 and later.
            install="pip install pygloo" if sys.version_info < (3, 11) else "pip install xoscar",
            interruptible=False,
            bitwise=False,
            cross_host=True,
        ),
    )
}


def get(name: str, group_name: str = "default") -> Capabilities:
    """Looks a backend up.

    Raises:
        UnknownBackendError: There is none of that name; the message lists those that exist.
    """
    if name not in BACKENDS:
        detail = f"no backend {name!r}; there are {', '.join(BACKENDS)}, and 'auto'"
        raise UnknownBackendError(group_name=group_name, detail=detail)
    return BACKENDS[name]


def is_available(name: str) -> bool:
    """Tells whether a backend's library can be imported here (it is, by that).

    Raises:
        UnknownBackendError: There is no such backend.
    """
    return not _missing(get(name))


def load(name: str, group_name: str = "default") -> CommunicatorFactory:
    """Imports a backend and gives its factory.

    Raises:
        UnknownBackendError: There is no such backend.
        BackendNotInstalledError: Its library is missing, with the command that installs it.
    """
    backend = get(name, group_name)
    if missing := _missing(backend):
        detail = f"backend {name!r} needs a library that is not there ({missing}). Install it: {backend.install}"
        raise BackendNotInstalledError(group_name=group_name, detail=detail)
    return cast("CommunicatorFactory", import_module(backend.module).create)


def choose(machines: Sequence[str]) -> str:
    """Picks the backend for ``"auto"``.

    Args:
        machines: One machine id per member, as in `Member.machine`.
    """
    if len(machines) == 1:
        return "local"
    return "shm" if len(set(machines)) == 1 else "gloo"


def check_placement(name: str, machines: Sequence[str], group_name: str = "default") -> None:
    """Refuses members that a backend can't bring together.

    Args:
        name: The backend.
        machines: One machine id per member, as in `Member.machine`.
        group_name: For the error.

    Raises:
        UnknownBackendError: There is no such backend.
        BackendUnavailableError: The members are too far apart for it.
    """
    backend = get(name, group_name)
    if backend.one_process and len(machines) > 1:
        detail = f"backend {name!r} lives inside one process, and the group has {len(machines)} members"
    elif not backend.cross_host and len(set(machines)) > 1:
        detail = f"backend {name!r} needs all members on one machine, and they are on {len(set(machines))}"
    else:
        return
    raise BackendUnavailableError(group_name=group_name, detail=f"{detail}; backend='auto' picks one that fits")


def _missing(backend: Capabilities) -> str:
    """What the imports of all its libraries said, or "" where one of them works or none is needed."""
    said = []
    for library in backend.libraries:
        try:
            import_module(library)
        except ImportError as exc:
            said.append(f"{library}: {exc}")
        else:
            return ""
    return "; ".join(said)
