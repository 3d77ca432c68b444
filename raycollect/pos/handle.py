"""Handles: the results of `ray.get` for values that stay in their participant's store."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from raycollect.backends import arrays
from raycollect.backends.device_arrays import put_on_gpu
from raycollect.core import html
from raycollect.core.codec import Codec
from raycollect.core.model import Address, Key, Structure, TensorInfo
from raycollect.core.placeholder import Placeholder
from raycollect.core.placement import Placement
from raycollect.errors import HandleAttributeError, HandleError
from raycollect.planner.wording import counted, nbytes_words
from raycollect.pos import Container, fetch, tensors
from raycollect.pos.container import paths
from raycollect.ray_bridge.serialization import PackedRef, as_pickled

MOST_ROWS = 20
"""The most shown tensors of a handle; the others are counted."""

_FETCH = "fetch the value by col.get(ref), or by col.get(handle)"

_HEAD = ("where", "shape", "dtype", "bytes", "device", "library")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Handle(Placeholder):
    """A few hundred bytes that stand for tensors in a participant.

    `raycollect.get(ref)` fetches them; for a single tensor, `numpy.asarray(handle)` does so, too. A method of the
    participant that holds them gets the tensor itself for the ref; a method of another participant gets a copy. Using
    the handle as the value (its truth, operators, items, attributes of the value) raises HandleError.

    Attributes:
        key: The id of the ObjectRef that the method returned.
        actor_id: The participant's Ray actor id, in hexadecimal.
        actor: Its readable name: ``Worker(3f2a91)``.
        address: The address of the participant.
        structure: One tensor, or a structure of several.
        infos: Shape, dtype and device of each tensor.
        incarnation: Ray's id of the process that holds them: a restarted actor has a new id, and its tensors are lost.
        token: Keeps the value alive while any copy of this handle exists.
        packed: The serialized token, if already known.
        placements: (index in `infos`, placement) of local tensors of DTensors.
    """

    key: Key
    actor_id: str
    actor: str
    address: Address
    structure: Structure
    infos: tuple[TensorInfo, ...]
    incarnation: str = ""
    token: Any = None
    placements: tuple[tuple[int, Placement], ...] = ()
    packed: PackedRef | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduced(self.token)

    def form(self) -> Any:
        """Its short form for Ray, or None."""
        token = self.token
        if token is None:
            return None
        packed = self.packed or PackedRef.of(token)
        return as_pickled(pickle.dumps([_Reduced(self._reduced(tuple(packed)))], protocol=5), token)

    def _reduced(self, token: Any) -> tuple[Any, ...]:
        where = _where_packed((self.actor_id, self.actor, self.address, self.incarnation))
        return _handle, (self.key, where, _what_packed((self.structure, self.infos, self.placements)), token)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a single tensor; raises HandleAttributeError for several."""
        return self._single("shape").shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of a single tensor; raises HandleAttributeError for several."""
        return np.dtype(self._single("dtype").dtype)

    @property
    def nbytes(self) -> int:
        """The bytes of all its tensors."""
        return sum(info.nbytes for info in self.infos)

    @property
    def words(self) -> str:
        """A description of its tensors; of more than three, the first ones and their number."""
        what = ", ".join(str(info) for info in self.infos[:3])
        return what if len(self.infos) <= 3 else f"{what}, ... ({len(self.infos)} tensors)"

    def fetch(self, timeout_s: float = 60.0) -> Any:
        """Fetches the value: the object itself in the process that holds it, a copy in any other.

        Raises:
            TensorFreedError: It was freed.
            TensorLostError: The process that held it has ended.
            HolderUnreachableError: The holder could not be reached in time.
            TensorDirtyError: A failed collective left it half-written.
        """
        return fetch.fetch(self.address, self.key, actor=self.actor, incarnation=self.incarnation, timeout_s=timeout_s)

    def fetch_for_use(self) -> Any:
        """Fetches the value for a method: tensors on a GPU of the holder are copied to the current GPU.

        If this process lacks a GPU, or the library, they are copied to host memory. Raises the errors of `fetch`.
        """
        value = self.fetch()
        container = Container.of(value, arrays.is_tensor)
        if container is None or all(info.device == "cpu" for info in self.infos):
            return value
        pairs = zip(container.tensors, self.infos, strict=True)
        here = [tensor if info.device == "cpu" else put_on_gpu(tensor, info.library) for tensor, info in pairs]
        return container.structure.build(here)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        self._single()
        array = np.asarray(tensors.on_host(self.fetch()), dtype=dtype)
        return array.copy() if copy else array

    @html.shown
    def _repr_html_(self) -> str:
        count, kind = len(self.infos), self.structure.kind
        what = "tensor" if kind == "tensor" else f"{kind} of {counted(count, 'tensor')}"
        cut = 1 if kind == "tensor" else 0  # a single tensor has no path
        pairs = zip(paths(self.structure), self.infos, strict=False)
        rows = ((place, *_cells(info))[cut:] for place, info in pairs)
        return html.block(
            "handle",
            f"{what}, {nbytes_words(self.nbytes)}, kept in {self.actor}",
            html.table(_HEAD[cut:], rows, right={"bytes"}, count=count, most=MOST_ROWS),
            html.line(self._how()),
        )

    def __repr__(self) -> str:
        return f"<Handle of {self._what()}; {self._how()}>"

    def _how(self) -> str:
        if self.structure.kind == "tensor":
            return "raycollect.get(ref) or numpy.asarray(handle) fetches it"
        return "raycollect.get(ref) fetches them"

    def _single(self, name: str = "") -> TensorInfo:
        if self.structure.kind != "tensor":
            raise self._misused(name)
        return self.infos[0]

    def _misused(self, name: str = "") -> Exception:
        if name:
            return HandleAttributeError(detail=f"a handle of {self._what()} has no attribute {name!r}: {_FETCH}")
        return HandleError(detail=f"a handle of {self._what()} was used as the value: {_FETCH}")

    def _what(self) -> str:
        kind = "" if self.structure.kind == "tensor" else f"{self.structure.kind} of "
        return f"{kind}{self.words} kept in {self.actor}"


def _cells(info: TensorInfo) -> tuple[object, ...]:
    return list(info.shape), info.dtype, nbytes_words(info.nbytes), info.device, info.library


@dataclass(frozen=True, slots=True)
class _Reduced:
    """Pickles as its given reduction."""

    given: tuple[Any, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return self.given


_Where = tuple[str, str, Address, str]
_What = tuple[
    Structure,
    tuple[TensorInfo, ...],
    tuple[tuple[int, Placement], ...],
]
_WHERE = Codec[_Where](_Where, "holder of tensors")
_WHAT = Codec[_What](_What, "tensors of a handle")

# An actor's handles mostly differ in their keys only.
_where_packed, _what_packed = lru_cache(maxsize=512)(_WHERE.encode), lru_cache(maxsize=512)(_WHAT.encode)
_where_of, _what_of = lru_cache(maxsize=512)(_WHERE.decode), lru_cache(maxsize=512)(_WHAT.decode)


def _handle(key: Key, where: bytes, what: bytes, token: Any) -> Handle:
    actor_id, actor, address, incarnation = _where_of(where)
    structure, infos, placements = _what_of(what)
    return Handle(
        key=key,
        actor_id=actor_id,
        actor=actor,
        address=address,
        structure=structure,
        infos=infos,
        incarnation=incarnation,
        token=PackedRef(*token).ref() if type(token) is tuple else token,
        placements=placements,
    )
