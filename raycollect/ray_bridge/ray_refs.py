"""ObjectRefs: their ids, sizes and ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray.experimental import get_local_object_locations, get_object_locations

from raycollect.core import threads
from raycollect.core.model import Key
from raycollect.ray_bridge.ray_session import core_worker

# An id is 8 bytes of the call, 12 of the actor, 4 of the job, and the index of the return.
_FIRST_PUT = 100_000_000  # the indices of `ray.put`, beyond any return of a method
_NO_ACTOR = b"\xff" * 12


def read_ref(ref: Any) -> tuple[Key, str]:
    """Returns a ref's own id, and the id of the actor whose method returned it, in hexadecimal, or an empty string."""
    binary: bytes = ref.binary()
    no_actor = binary[8:20] == _NO_ACTOR or int.from_bytes(binary[24:], "little") >= _FIRST_PUT
    return Key(binary), "" if no_actor else binary[8:24].hex()


def is_put(ref: Any) -> bool:
    """Whether a ref is one of `ray.put`."""
    return int.from_bytes(ref.binary()[24:], "little") >= _FIRST_PUT


def nbytes_of(ref: Any) -> int:
    """The size of a ref's value, which exists, without fetching it; 0 if Ray does not tell."""
    for ask in (get_local_object_locations, get_object_locations):  # this process, or else the ref's owner
        nbytes = ask([ref]).get(ref, {}).get("object_size")
        if nbytes:
            return int(nbytes)
    return 0


def on_last_ref(ref: Any, callback: Callable[[], None]) -> bool:
    """Calls back when the last reference to a ref of this process is dropped; False if Ray offers no way."""
    register = getattr(core_worker(), "add_object_out_of_scope_callback", None)
    if register is None:
        return False
    register(ref, lambda _: threads.survives(callback))
    return True
