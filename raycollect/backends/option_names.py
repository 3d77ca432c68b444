"""The names of the options (`pg_options`) of built-in backends."""

from __future__ import annotations

from raycollect.core.model import RANK_ORDER, GroupSpec
from raycollect.errors import InvalidGroupError
from raycollect.errors.text import listed, shown

OF_TCP = (RANK_ORDER[0],)
OF_NCCL = ("device", "graphs")


IGNORING = ("local", "shm")
"""The backends that have no options, and ignore those of the others: a program may run on any number of hosts."""


def refuse_unknown(spec: GroupSpec) -> None:
    """Raises InvalidGroupError for options of such a group that no other backend of ``"auto"`` has either.

    A backend of another package may be made of one of these, and have options of its own.
    """
    known = (*OF_TCP, *OF_NCCL)
    unknown = [name for name, _ in spec.options if name not in known]
    if unknown and spec.backend in IGNORING:
        detail = f"there is no option {listed(map(shown, unknown))}; there are {listed(map(repr, known))}"
        raise InvalidGroupError(group_name=spec.name, detail=f"backend {spec.backend!r}: {detail}")
