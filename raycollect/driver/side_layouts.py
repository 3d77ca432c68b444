"""The layouts of one side of a reshard: by name, by pattern, or those of DTensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from raycollect.core.model import TENSOR
from raycollect.core.placement import Placement
from raycollect.errors import Violation, wrong_layout
from raycollect.planner.dtensors import layout_of_side
from raycollect.planner.layout import Layout
from raycollect.planner.reshard import naming
from raycollect.pos.handle import Handle

HeldTensors = Mapping[str, Placement | None]
"""The tensors of one ref: the placement of each by name; None for a tensor that is no DTensor."""


def held_tensors(handle: Handle) -> HeldTensors:
    """The tensors of a handle; empty if it is neither a tensor nor a dict of tensors, which the ranks refuse."""
    if handle.structure == TENSOR:
        names: tuple[str, ...] = ("",)
    elif any(item != TENSOR for item in handle.structure.items):
        return {}
    else:
        names = tuple(map(str, handle.structure.names))
    placements = dict(handle.placements)
    return {name: placements.get(at) for at, name in enumerate(names)}


class SideLayouts:
    """The layouts of one side of a call.

    Attributes:
        layouts: Layouts by name, or by pattern until they are resolved.
        is_open: Whether names are missing, as there are patterns or no layouts.
        violations: What is wrong so far.
    """

    def __init__(self, side: str, given: Mapping[str, Layout] | None) -> None:
        self._side = side
        self._said = dict(given or {})
        self.layouts: dict[str, Layout] = dict(self._said)
        self.is_open: bool = given is None or naming.has_patterns(given)
        self.violations: list[Violation] = list(naming.pattern_faults(side, self._said))

    def resolve_held(self, held: Sequence[HeldTensors] | None, names: Iterable[str]) -> None:
        """Names the layouts by the tensors of the refs, or, if these are unknown, by the names of the other side."""
        if held is not None:
            self.layouts, missing = naming.of_held(self._said, _keys(held))
            self._read(missing, held)
            return
        concrete = [name for name in names if not naming.is_pattern(name)]
        if not self._said or not concrete:
            self._unknown()
        self.layouts, _ = naming.of_names(self._said, concrete)  # the planner tells which are missing

    def resolve(self, names: Iterable[str], look: Callable[[], Sequence[HeldTensors] | None]) -> None:
        """Names the layouts by the names of the other side; `look` reads the refs, for tensors without a layout."""
        if self._said:
            self.layouts, missing = naming.of_names(self._said, names)
            if missing:
                self._read(missing, look() or ())
            return
        held = look()
        if held is None:
            self._unknown()
        else:
            self._read(_keys(held), held)

    def _read(self, names: Iterable[str], held: Sequence[HeldTensors]) -> None:
        missing = []
        for name in names:
            placements = [tensors.get(name) for tensors in held]
            if not any(placements):
                missing.append(name)
                continue
            layout = layout_of_side(self._side, name, placements)
            if isinstance(layout, Layout):
                self.layouts[name] = layout
            else:
                self.violations += layout
        if missing:
            self.violations.append(naming.unmatched(self._side, missing, self._said))

    def _unknown(self) -> None:
        what = f"patterns alone, {list(self._said)}" if self._said else "None"
        expected = f"layouts by name: it is not known before the call what {self._side}_refs will hold"
        self.violations.append(wrong_layout(self._side, what, expected))


def _keys(held: Sequence[HeldTensors]) -> list[str]:
    return list(dict.fromkeys(name for tensors in held for name in tensors))
