"""The backend's contract over today's communicators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raycollect.core.model import Kernel, Launch
from raycollect.core.protocols import Forsaking, Together


def agree(
    communicator: Any, launch: Launch, arrival: bytes, kernel: Kernel | None, expected: Sequence[bytes] | None
) -> Sequence[bytes]:
    """As `Communicator.agree`."""
    again: Any = getattr(communicator, "again", None)  # `isinstance` with a protocol takes longer
    if again is not None and kernel is not None and expected is not None:
        found = again(launch, kernel, arrival, expected)
        return expected if found is None else tuple(map(bytes, found))
    if kernel is not None:
        communicator.stage(launch, kernel)
    blobs = tuple(map(bytes, communicator.agree(launch, arrival)))
    return expected if expected is not None and blobs == tuple(expected) else blobs


def meet_again(
    communicator: Any, launch: Launch, kernel: Kernel, arrival: bytes, expected: tuple[bytes, ...]
) -> tuple[bytes, ...] | None:
    """As `protocols.Again`, for communicators without it."""
    found = agree(communicator, launch, arrival, kernel, expected)
    return None if found is expected else tuple(found)


def launch(communicator: Any, launch: Launch, kernels: Sequence[Kernel]) -> None:
    """As `Communicator.launch`."""
    if len(kernels) > 1 and isinstance(communicator, Together):
        while kernels and (count := communicator.launch_together(launch, kernels)):
            kernels = kernels[count:]
    for kernel in kernels:
        communicator.launch(launch, kernel).wait(launch.timeout_s)


def end(communicator: Any, launch: Launch, ok: bool, owed: Sequence[Kernel] = ()) -> tuple[int, ...]:
    """As `Communicator.end`."""
    try:
        if owed and isinstance(communicator, Forsaking):
            communicator.forsake(launch, owed)
    finally:
        ended: tuple[int, ...] = communicator.end(launch, ok)
    return ended
