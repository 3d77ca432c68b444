"""The traces of one function, by the keys of its calls; bounded."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, NamedTuple, Protocol, TypeVar


class CacheInfo(NamedTuple):
    """How often a step's function was traced; see `Step.cache_info`.

    Attributes:
        hits: Calls that ran a trace of an earlier call.
        misses: Calls for which the function was traced.
        maxsize: How many traces are kept.
        currsize: How many there are.
    """

    hits: int
    misses: int
    maxsize: int
    currsize: int


class Used(Protocol):
    """What is kept; `used` is when it was used last."""

    used: int


_Form = TypeVar("_Form", bound=Used)


class Forms(Generic[_Form]):
    """Keeps the forms that were used last. Any thread may call it, but for `add` and `clear`: one at a time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._forms: dict[Hashable, _Form] = {}
        self._now = 0
        self.hits: int = 0
        self.misses: int = 0

    def find(self, key: Hashable) -> _Form | None:
        """The form of a key, if there is one."""
        found = self._forms.get(key)
        if found is not None:
            self._now += 1
            found.used = self._now
            self.hits += 1
        return found

    def add(self, key: Hashable, form: _Form) -> bool:
        """Adds a form; returns whether another one had to go."""
        self.misses += 1
        self._now += 1
        form.used = self._now
        self._forms[key] = form
        if len(self._forms) <= self._most:
            return False
        oldest, _ = min(list(self._forms.items()), key=lambda one: one[1].used)
        self._forms.pop(oldest, None)
        return True

    def drop(self, key: Hashable, form: _Form) -> None:
        """Forgets a form, if it is still that of the key."""
        if self._forms.get(key) is form:
            self._forms.pop(key, None)

    def all(self) -> list[_Form]:
        """All forms, the first one first."""
        return list(self._forms.values())

    def clear(self) -> list[_Form]:
        """Forgets all; returns them."""
        found, self._forms = self.all(), {}
        return found

    def info(self) -> CacheInfo:
        """What there was, and is."""
        return CacheInfo(self.hits, self.misses, self._most, len(self._forms))
