"""`layout_of`: the layouts of DTensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raycollect.backends import dtensors
from raycollect.errors import Violation, refusal, wrong_layout
from raycollect.errors.text import a_type
from raycollect.planner.dtensors import fault_of
from raycollect.planner.dtensors import layout_of as layout_of_placement

__all__ = ["layout_of"]


def layout_of(value: Any) -> Any:
    """Returns the layout of torch DTensors, for `reshard_refs`. Any process may call it, such as a method.

    Rank n of the layout is the n-th rank of the DTensor's mesh, in ascending order; if the mesh has all ranks of a job,
    it is torch's rank. The result is equal on all ranks of the mesh.

    Args:
        value: A DTensor, or a dict of them by name, such as a state dict.

    Returns:
        Its `Layout`, or a dict of layouts by name.

    Raises:
        LayoutError: A value is no DTensor, its placement is not supported, or this process is not in its mesh; lists
            all of them.
    """
    named = value if isinstance(value, Mapping) else {"": value}
    layouts: dict[str, Any] = {}
    wrong: list[Violation] = []
    for name, tensor in named.items():
        field = f"layout of {name!r}" if name else "layout"
        placement = dtensors.placement_of(tensor) if dtensors.is_dtensor(tensor) else None
        if placement is None:
            what = f"of {a_type(tensor, in_full=True)}"
            if dtensors.is_dtensor(tensor):
                what += ", whose mesh does not have this process"
            wrong.append(wrong_layout(field, what, "a DTensor; or say it in words"))
        elif (fault := fault_of(field, placement)) is not None:
            wrong.append(fault)
        else:
            layouts[str(name)] = layout_of_placement(placement)
    if wrong:
        raise refusal("layout_of", "", tuple(wrong))
    return layouts if isinstance(value, Mapping) else layouts[""]
