"""The names of `ray.util.collective.types`."""

from __future__ import annotations

from importlib import import_module

from raycollect import backends
from raycollect.backends.options import (
    AllGatherOptions,
    AllReduceOptions,
    BarrierOptions,
    BroadcastOptions,
    RecvOptions,
    ReduceOptions,
    ReduceScatterOptions,
    SendOptions,
    unset_timeout_ms,
)
from raycollect.core.model import ReduceOp

__all__ = [
    "AllGatherOptions",
    "AllReduceOptions",
    "Backend",
    "BarrierOptions",
    "BroadcastOptions",
    "RecvOptions",
    "ReduceOp",
    "ReduceOptions",
    "ReduceScatterOptions",
    "SendOptions",
    "cupy_available",
    "torch_available",
    "unset_timeout_ms",
]


class _ByAttribute(type):
    """Looks ``Backend.GLOO`` up in the registry, so that backends that are registered later are attributes as well."""

    def __getattr__(cls, name: str) -> str:
        if name.isupper():
            try:
                return str(cls(name))
            except ValueError as exc:
                raise AttributeError(str(exc)) from None
        raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")


class Backend(metaclass=_ByAttribute):
    """The name of a backend in upper case, as Ray writes it: ``Backend("gloo") == Backend.GLOO == "GLOO"``.

    A call returns a plain string, which may be passed as the name of a backend.

    Raises:
        ValueError: No such backend exists.
    """

    UNRECOGNIZED = "unrecognized"

    def __new__(cls, name: str) -> str:  # type: ignore[misc]  # as in Ray, the class is never instantiated
        """Looks the name up."""
        if name.lower() != "auto" and not backends.is_known(name):
            raise ValueError(f"Unrecognized backend: {name!r}. There are {', '.join(backends.names())}, and 'auto'")
        return backends.canonical(name).upper()


def cupy_available() -> bool:
    """Imports cupy; returns whether that succeeds."""
    return _importable("cupy")


def torch_available() -> bool:
    """Imports torch; returns whether that succeeds."""
    return _importable("torch")


def _importable(library: str) -> bool:
    try:
        import_module(library)
    except ImportError:
        return False
    return True
