"""`layout_of`: the layouts that tensors say themselves."""

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
    """The layout that torch's DTensors say, for `reshard_refs`. It works in any process, such as in a method.

    Rank n of the layout is the n-th of the ranks of the DTensor's mesh, in ascending order; where the mesh has all
    ranks of a job, it is torch's rank. All ranks of the mesh say the same.

    Args:
        value: A DTensor, or a dict of them by name, such as a state dict.

    Returns:
        Its `Layout`, or a dict of layouts by name.

    Raises:
        LayoutError: A value is no DTensor, its placement is not understood, or this process is not in its mesh; lists
            all of them.
    """
    named = value if isinstance(value, Mapping) else {"": value}
    found: dict[str, Any] = {}
    wrong: list[Violation] = []
    for name, one in named.items():
        field = f"layout of {name!r}" if name else "layout"
        placement = dtensors.placement_of(one) if dtensors.is_dtensor(one) else None
        if placement is None:
            what = f"of {a_type(one, in_full=True)}"
            if dtensors.is_dtensor(one):
                what += ", whose mesh does not have this process"
            wrong.append(wrong_layout(field, what, "a DTensor; or say it in words"))
        elif (fault := fault_of(field, placement)) is not None:
            wrong.append(fault)
        else:
            found[str(name)] = layout_of_placement(placement)
    if wrong:
        raise refusal("layout_of", "", tuple(wrong))
    return found if isinstance(value, Mapping) else found[""]
