"""One operand: a tensor, or lists, tuples and dicts of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Number
from operator import is_
from typing import Any, Literal

from raycollect.backends import dtensors
from raycollect.core.model import TENSOR, Structure
from raycollect.core.placement import Placement
from raycollect.errors.text import a_type, is_unicode

DEEPEST = 32
"""The deepest nesting of lists, tuples and dicts: the limit of messages, and of lists that contain themselves."""

_AS_ARRAY = "return np.array([x]) or x.reshape(1), and it is kept"
"""The advice for a number that should be an operand."""


@dataclass(frozen=True, slots=True)
class Container:
    """The value of one key in the store."""

    structure: Structure  # of the value
    tensors: tuple[Any, ...]
    value: Any  # the object that the method returned
    # The programs' cache for these tensors
    memo: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    # (index in `tensors`, placement) of local tensors of DTensors
    placements: tuple[tuple[int, Placement], ...] = ()
    # The tensors in the value, with DTensors instead of their local tensors. None: the value is a plain tensor
    leaves: tuple[Any, ...] | None = None
    # Whether nobody writes the tensors while the key is held, or while they are read
    is_frozen: bool = False

    @staticmethod
    def of(value: Any, is_tensor: Callable[[Any], bool]) -> Container | None:
        """Flattens a value into tensors; None for a value that is passed by value.

        Tensors are stored, and non-empty lists, tuples or dicts (with string or integer keys) that hold only tensors
        and such containers, nested at most `DEEPEST` times. A DTensor of torch stands for its local tensor. A mapping
        that creates its values on each access, such as a ``.npz`` file, is passed by value: its tensors have no owner.
        """
        if is_tensor(value):
            return Container(TENSOR, (value,), value)
        tensors: list[Any] = []
        leaves: list[Any] = []
        placements: list[tuple[int, Placement]] = []

        def taken(leaf: Any) -> bool:
            if is_tensor(leaf):
                tensors.append(leaf)
                leaves.append(leaf)
                return True
            if not dtensors.is_dtensor(leaf) or not is_tensor(local := dtensors.local_of(leaf)):
                return False
            placement = dtensors.placement_of(leaf)
            if placement is not None:
                placements.append((len(tensors), placement))
                tensors.append(local)
                leaves.append(leaf)
            return placement is not None

        structure = _take_apart(value, taken, is_tensor, 0)
        if structure is None:
            return None
        return Container(structure, tuple(tensors), value, placements=tuple(placements), leaves=tuple(leaves))

    @staticmethod
    def build(structure: Structure, tensors: Sequence[Any]) -> Container:
        """Builds a value from new tensors."""
        leaves = None if structure.kind == "tensor" else tuple(tensors)
        return Container(structure, tuple(tensors), structure.build(tensors), leaves=leaves)

    def current(self) -> Container | str:
        """The container of the value's current tensors: this one, unless tensors were replaced.

        A list or dict may get other tensors after it was returned, and a DTensor another local tensor, as by `to()` of
        its module. Tensors of the same names, shapes and types replace the old ones. For others the result describes
        the difference.
        """
        if self.leaves is None:
            return self
        try:
            is_same = _holds(self.value, self.structure, iter(self.leaves))
            if is_same and not (self.placements and self._is_swapped(self.leaves)):
                return self
            from raycollect.backends import arrays  # only the process that holds the tensors needs numpy

            fresh = Container.of(self.value, arrays.is_tensor)
        except RuntimeError:  # a dict changed its size during iteration
            return "it is being changed by another thread"
        if fresh is None:
            return obstacle(self.value, arrays.is_tensor, arrays.describe_value)
        old, new = (
            dict(zip(paths(container.structure), container.tensors, strict=True)) for container in (self, fresh)
        )
        for path in {**old, **new}:
            before, after = (arrays.describe(tensors[path]) if path in tensors else None for tensors in (old, new))
            if before != after:
                return f"{path or 'it'} is {after or 'missing'}, and was {before or 'missing'} when it was returned"
        return (
            fresh
            if fresh.structure == self.structure
            else "the order of its names, or the type of its lists, has changed"
        )

    def _is_swapped(self, leaves: Sequence[Any]) -> bool:
        # Whether a DTensor has another local tensor.
        return any(dtensors.local_of(leaves[at]) is not self.tensors[at] for at, _ in self.placements)


def _holds(value: Any, structure: Structure, leaves: Iterator[Any]) -> bool:
    """Whether a value consists of exactly these tensor objects."""
    if structure.kind == "tensor":
        return value is next(leaves)
    if structure.kind != ("dict" if isinstance(value, Mapping) else type(value).__name__):
        return False
    if len(value) != len(structure.items) or (structure.names and tuple(value) != structure.names):
        return False
    children = value.values() if structure.kind == "dict" else value
    if structure.items.count(TENSOR) == len(structure.items):  # takes a tenth of the time
        return all(map(is_, children, leaves))
    return all(_holds(child, item, leaves) for child, item in zip(children, structure.items, strict=False))


def paths(structure: Structure, path: str = "") -> Iterator[str]:
    """The path of each tensor in a value, such as ``"['layers'][2]"``; empty if the value is the tensor."""
    if structure.kind == "tensor":
        yield path
        return
    for name, item in zip(structure.names or range(len(structure.items)), structure.items, strict=False):
        yield from paths(item, f"{path}[{name!r}]")


def _take_apart(
    value: Any, taken: Callable[[Any], bool], is_tensor: Callable[[Any], bool], depth: int
) -> Structure | None:
    if taken(value):
        return TENSOR
    names: tuple[Any, ...] = ()
    children: Sequence[Any] | None
    kind: Literal["list", "tuple", "dict"]
    if type(value) is list or type(value) is tuple:
        kind, children = "list" if type(value) is list else "tuple", value
    elif isinstance(value, Mapping):
        kind, names, children = "dict", tuple(value), _lasting_values(value, is_tensor)
    else:
        return None
    if not children or depth == DEEPEST or not all(map(_can_travel, names)):
        return None
    items = []
    for child in children:
        item = _take_apart(child, taken, is_tensor, depth + 1)
        if item is None:
            return None
        items.append(item)
    return Structure(kind, names, tuple(items))


def _lasting_values(value: Mapping[Any, Any], is_tensor: Callable[[Any], bool]) -> Sequence[Any] | None:
    """The values of a mapping; None if it creates them on each access, so that writes to them would be lost."""
    if type(value).__getitem__ is dict.__getitem__:
        return tuple(value.values())
    values = []
    for name in value:
        first, second = value[name], value[name]
        if first is not second and not (is_tensor(first) and is_tensor(second) and _share_memory(first, second)):
            return None
        values.append(first)
    return values


def _share_memory(first: Any, second: Any) -> bool:
    from raycollect.backends import arrays  # imports numpy, which a process with tensors has imported

    return arrays.place(arrays.memory(first)) == arrays.place(arrays.memory(second))


Tell = Callable[[Any], str]
"""Describes a value that is not a tensor."""


def obstacle(value: Any, is_tensor: Callable[[Any], bool], tell: Tell = a_type, path: str = "", depth: int = 0) -> str:
    """The first reason why `Container.of` returns None: ``['layers'][2] is a NoneType``."""
    here = path or "it"
    if dtensors.is_dtensor(value) and not is_tensor(local := dtensors.local_of(value)):
        return f"{here} is a DTensor, whose local tensor is {tell(local)}"
    if type(value) not in (list, tuple) and not isinstance(value, Mapping):
        return f"{here} is {tell(value)}"
    if not value:
        return f"{here} is empty"
    if depth == DEEPEST:
        return f"{here} is nested more than {DEEPEST} deep"
    is_named = isinstance(value, Mapping)
    children = _lasting_values(value, is_tensor) if isinstance(value, Mapping) else value
    if children is None:
        return f"{here} is {tell(value)}, which creates its values on each access: use dict(x)"
    for name, child in zip(value if is_named else range(len(value)), children, strict=True):
        if is_named and not _can_travel(name):
            return f"{here} has the key {name!r}, and keys are strings or integers"
        if is_tensor(dtensors.local_of(child) if dtensors.is_dtensor(child) else child):
            continue
        if reason := obstacle(child, is_tensor, tell, f"{path}[{name!r}]", depth + 1):
            return reason
    return ""


def unkept(value: Any, is_tensor: Callable[[Any], bool], tell: Tell) -> str:
    """Describes a returned value that is passed by value, and suggests a replacement if possible."""
    what = tell(value)
    if isinstance(value, Number):
        return f"{what} ({_AS_ARRAY})"
    if is_tensor(value):
        return f"{what} without dimensions ({_AS_ARRAY})" if getattr(value, "shape", None) == () else what
    why = obstacle(value, is_tensor, tell) if type(value) in (list, tuple) or isinstance(value, Mapping) else ""
    return f"{what} ({why})" if why else what


def _can_travel(name: Any) -> bool:
    if type(name) is int:
        return -(1 << 63) <= name < 1 << 64
    return type(name) is str and is_unicode(name)
