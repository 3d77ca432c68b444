"""`keep`: values that a step returns as refs."""

from __future__ import annotations

from typing import Any

import ray

from raycollect.captured.recording import Recording
from raycollect.captured.step_values import structured
from raycollect.core.placeholder import Placeholder
from raycollect.driver.pending import Pending
from raycollect.errors import CaptureError
from raycollect.ray_bridge.submitted_calls import recording


class KeepWrapper(Placeholder):
    """A value marked by `keep` in a step, which the step's function may only return."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value: Any = value

    def _misused(self, name: str = "") -> Exception:
        return CaptureError(
            detail="the result of raycollect.keep may only be returned: call keep in the return statement"
        )

    def _passed_to(self, function: str) -> None:
        raise self._misused()


def keep(value: Any) -> Any:
    """Makes a step return a value as a ref, whose tensor stays in its actor: ``return raycollect.keep(gradients)``.

    The ref is like the ref of a method: for `get`, for methods and for further collectives.

    Args:
        value: The result of a call in the step; or a list, tuple or dict of such values.

    Returns:
        A marked value, which the function of the step may return. Outside a step: the value.

    Raises:
        CaptureError: In the block of a captured step.
    """
    active = recording()
    if isinstance(active, Recording) and not active.is_traced:
        raise CaptureError(detail="keep is for the return value of a `step`, not for the block of a captured step")
    return value if active is None else structured(value, _wrap)


def unwrap(value: Any) -> Any:
    """Returns a structure without the marks of `keep`."""
    return structured(value, lambda item, _: item.value if type(item) is KeepWrapper else item)


def _wrap(value: Any, _: str) -> Any:
    return KeepWrapper(value) if isinstance(value, (Pending, ray.ObjectRef)) else value
