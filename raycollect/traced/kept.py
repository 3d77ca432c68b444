"""Values that a step returns as refs."""

from __future__ import annotations

from typing import Any

import ray

from raycollect.captured.recording import Recording
from raycollect.captured.step_values import structured
from raycollect.core.placeholder import Placeholder
from raycollect.driver.pending import Pending
from raycollect.errors import CaptureError
from raycollect.ray_bridge.submitted_calls import recording


class Kept(Placeholder):
    """What `keep` returns in a step: for what the step's function returns, and for nothing else."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value: Any = value

    def _misused(self, name: str = "") -> Exception:
        return CaptureError(
            detail="what raycollect.keep gives is for `return` alone: keep a value where it is returned"
        )

    def _passed_to(self, function: str) -> None:
        raise self._misused()


def keep(value: Any) -> Any:
    """Has a step return a value as a ref, whose tensor stays in its actor, as ``return raycollect.keep(gradients)``.

    The ref is like that of a method: for `get`, for methods and for further collectives.

    Args:
        value: What a call in the step gives; or a list, tuple or dict of such values.

    Returns:
        What the function of the step may return in the place of the value. Outside a step: the value.

    Raises:
        CaptureError: In the block of a captured step.
    """
    found = recording()
    if isinstance(found, Recording) and not found.is_traced:
        raise CaptureError(detail="keep is for what a function of `step` returns, not for the block of a captured step")
    return value if found is None else structured(value, _kept)


def unkept(value: Any) -> Any:
    """A structure without the marks of `keep`."""
    return structured(value, lambda one, _: one.value if type(one) is Kept else one)


def _kept(value: Any, _: str) -> Any:
    return Kept(value) if isinstance(value, (Pending, ray.ObjectRef)) else value
