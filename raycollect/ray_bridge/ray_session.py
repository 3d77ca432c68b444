"""This process in its Ray session: start and end, forks, node and machine."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
from ray._private import worker
from ray.util.client import ray as ray_client

from raycollect.core.shared_memory import memory_domain
from raycollect.errors import ForkedError, RayClientError
from raycollect.ray_bridge.hooks import hook

global_worker: Any = worker.global_worker
"""Ray's state of this process. Its `core_worker` is another object in each session."""

# The core workers that this process has of its parent: Ray does not notice a fork.
_inherited: list[Any] = []


def _note_fork() -> None:
    if global_worker.connected:
        _inherited.append(core_worker())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def core_worker() -> Any:
    """Ray's core worker of this process; it identifies the session, see `is_in`."""
    return global_worker.core_worker


def is_started() -> bool:
    """Whether Ray runs for this process, also through Ray Client, or for the process that it was forked from."""
    return bool(global_worker.connected) or bool(ray_client.is_connected())


def is_connected() -> bool:
    """Whether this process is in a Ray session."""
    return bool(global_worker.connected) and not _is_forked()


def is_in(session: object) -> bool:
    """Whether this process is still in the session of that `core_worker`; False in a forked child."""
    return (
        bool(global_worker.connected)
        and global_worker.core_worker is session
        and (not _inherited or session is not _inherited[-1])
    )


def is_worker() -> bool:
    """Whether this process is an actor or a task."""
    return is_connected() and global_worker.mode == ray.WORKER_MODE


def _is_forked() -> bool:
    """Whether the core worker is that of the parent, whose threads did not survive the fork."""
    return bool(_inherited) and core_worker() is _inherited[-1]


def ensure_ray() -> None:
    """Starts Ray where it does not run, honouring an address in the environment.

    Raises:
        ForkedError: This is a forked child of a process that is connected.
        RayClientError: This process is connected through Ray Client (ray://).
    """
    if global_worker.connected:
        if _is_forked():
            raise ForkedError
        return
    if not ray_client.is_connected():
        ray.init()
    refuse_client()  # also where the address in the environment was one of Ray Client


def refuse_client() -> None:
    """Raises RayClientError if this process is connected through Ray Client (ray://)."""
    if not global_worker.connected and ray_client.is_connected():
        raise RayClientError


_before_shutdown: list[Callable[[], object]] = []


def before_shutdown(call: Callable[[], object], *, is_last: bool = False) -> Callable[[], None]:
    """Makes a call before `ray.shutdown()` ends this process's actors.

    Ray itself bypasses the call at the end of the interpreter.

    Args:
        call: The call.
        is_last: Whether it follows all others.

    Returns:
        A function that withdraws the call.
    """
    hook(ray, "shutdown", _after_calls)
    _before_shutdown.insert(0 if is_last else len(_before_shutdown), call)
    return functools.partial(_withdraw, call)


def _after_calls(shutdown: Callable[..., Any]) -> Callable[..., Any]:
    def after_calls(*args: Any, **kwargs: Any) -> None:
        if is_connected():
            for call in reversed(_before_shutdown[:]):
                call()
        shutdown(*args, **kwargs)

    return after_calls


def _withdraw(call: Callable[[], object]) -> None:
    with suppress(ValueError):  # it was withdrawn before
        _before_shutdown.remove(call)


def machine_id() -> str:
    """Equal for processes of one host: those of one memory domain, and of one Ray node where there is Ray.

    Not remembered: a process may have used groups without Ray before it started Ray, or have left one for another.
    """
    if not ray.is_initialized():
        return memory_domain()
    # Nodes of a test cluster share a machine and yet stand for hosts of their own.
    return f"{memory_domain()}/{ray.get_runtime_context().get_node_id()}"


def node_address() -> str:
    """The IP address of this Ray node."""
    return str(ray.util.get_node_ip_address())


def worker_id() -> str:
    """Ray's id of this process, in hexadecimal."""
    return str(ray.get_runtime_context().get_worker_id())


def has_gpu() -> bool | None:
    """Whether Ray gave this actor or task a GPU; None where it is neither."""
    return bool(ray.get_runtime_context().get_accelerator_ids().get("GPU")) if is_worker() else None
