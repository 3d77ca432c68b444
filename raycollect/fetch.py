"""Fetching tensors from the process that holds them, over data connections: both ends.

Bulk has connections of its own, so that an abort never waits behind a tensor. A process keeps idle connections and
uses each from one thread at a time.

Where both ends are on one machine, bytes don't travel: the holder says where they lie in its arena, and holds off plans
that would write them; the client copies them from there, once, and says so. It has `lending_s` for that, counted by the
holder from its answer and by the client from its question, so that a client that was in time read what was lent.
Tensors that lie elsewhere are brought to the arena for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np

from raycollect import tensors
from raycollect.backends import arrays
from raycollect.channel import DataClient, DataLink
from raycollect.channel.messages import Copied, Failed, Fetch, Fetched, Free, Freed
from raycollect.errors import (
    ChannelError,
    ConnectionLostError,
    ProtocolError,
    RaycollectError,
    TensorLostError,
    Violation,
    from_wire,
    refusal,
    to_wire,
)
from raycollect.model import Address, BufferRef, Key, Segment, Structure, TensorInfo
from raycollect.pos import Absence, Container, State, Store
from raycollect.pos.segments import Segments
from raycollect.ray_internals import memory_domain

MAX_IDLE = 32
"""How many idle data connections a process keeps; the one unused for longest is closed first."""

LENT_FROM_NBYTES = 64 << 10
"""How large a value has to be to be read where it lies; a smaller one is sent with the answer."""

LENDING_S, LENDING_RATE = 5.0, 500e6
"""How long a value is lent: so many seconds, and one more for so many bytes."""


def lending_s(nbytes: int) -> float:
    """How long a value of that size is lent, in seconds."""
    return LENDING_S + nbytes / LENDING_RATE


class _OutOfReach(Exception):
    """What was lent could not be read, or not in time."""


class _Clients:
    """Idle data connections of this process, and the stores that live in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[tuple[tuple[str, int], DataClient]] = []
        self.local: dict[bytes, Store] = {}

    def request(self, address: Address, message: Any, timeout_s: float, read: Callable[[DataClient, Any], Any]) -> Any:
        """Asks, and reads the answer with `read`; an idle connection that has died is replaced once."""
        client = self._take((address.host, address.port))
        if client is not None:
            try:
                return self._ask(address, client, message, timeout_s, read)
            except ConnectionLostError:
                pass
        return self._ask(address, DataClient(address, timeout_s), message, timeout_s, read)

    def close(self) -> None:
        """Closes the idle connections; later requests open new ones."""
        with self._lock:
            idle, self._idle = self._idle, []
        for _, client in idle:
            client.close()

    def _ask(
        self, address: Address, client: DataClient, message: Any, timeout_s: float, read: Callable[..., Any]
    ) -> Any:
        try:
            answer = client.request(message, timeout_s)
            result = from_wire(answer.error) if isinstance(answer, Failed) else read(client, answer)
        except BaseException:
            client.close()
            raise
        self._give((address.host, address.port), client)
        if isinstance(result, RaycollectError):
            raise result
        return result

    def _take(self, place: tuple[str, int]) -> DataClient | None:
        with self._lock:
            for i, (other, client) in enumerate(self._idle):
                if other == place:
                    del self._idle[i]
                    return client
        return None

    def _give(self, place: tuple[str, int], client: DataClient) -> None:
        with self._lock:
            self._idle.append((place, client))
            surplus = self._idle[:-MAX_IDLE]
            del self._idle[:-MAX_IDLE]
        for _, old in surplus:
            old.close()


_clients = _Clients()


def register_local(secret: bytes, store: Store) -> None:
    """Makes fetches from this process's own participant give the very object. Called once, by the runtime."""
    _clients.local[secret] = store


def close_idle() -> None:
    """Closes the data connections that this process keeps for later."""
    _clients.close()


def fetch(address: Address, key: Key, *, actor: str, incarnation: str = "", timeout_s: float = 60.0) -> Any:
    """Fetches the value of a key from its holder. Any process, any thread.

    Args:
        address: Where the holder serves it.
        key: The key.
        actor: What a person calls the holder.
        incarnation: Which process of that actor it is; for messages.
        timeout_s: How long the holder may take, in seconds.

    Returns:
        The very object in the holder's own process, a copy anywhere else.

    Raises:
        TensorFreedError: It was freed.
        TensorDirtyError: A failed collective left it half-written.
        TensorLostError: The holder can't be reached.
    """
    local = _clients.local.get(address.secret)
    if local is not None:
        return find(local, key).value
    try:
        try:
            return _request(address, key, timeout_s, memory_domain())
        except _OutOfReach:
            return _request(address, key, timeout_s, "")
    except ChannelError as exc:
        raise _lost("get", key, actor, incarnation, exc) from exc


def _request(address: Address, key: Key, timeout_s: float, domain: str) -> Any:
    asked_s = time.monotonic()
    message = Fetch(key=key, timeout_s=timeout_s, domain=domain)
    return _clients.request(address, message, timeout_s, lambda client, answer: _read_value(client, answer, asked_s))


def free(address: Address, keys: list[Key], *, actor: str, incarnation: str = "") -> int:
    """Frees values in their holder now. Any process, any thread.

    Returns:
        How many were held.

    Raises:
        TensorLostError: The holder can't be reached.
    """
    local = _clients.local.get(address.secret)
    if local is not None:
        return local.free(keys)
    try:
        count: int = _clients.request(
            address, Free(keys=list(keys)), 30.0, lambda _, answer: _expect(answer, Freed).count
        )
        return count
    except ChannelError as exc:
        raise _lost("free", keys[0], actor, incarnation, exc) from exc


def _read_value(client: DataClient, answer: Any, asked_s: float) -> Any:
    structure, infos, refs = _read_description(_expect(answer, Fetched).found)
    sent = [info.nbytes for info, ref in zip(infos, refs, strict=True) if ref is None]
    if sum(sent) != answer.blob_nbytes:
        raise ProtocolError(detail="the announced bytes are not those of the tensors")
    tensors = []
    for info, ref in zip(infos, refs, strict=True):
        array = np.empty(info.shape, info.dtype)
        into = array.reshape(-1).view(np.uint8).data
        if ref is None:
            client.receive_blob(into)
        else:
            _copy_lent(ref, into)
        tensors.append(arrays.restore(array, info.library))
    if len(sent) < len(infos):
        if time.monotonic() - asked_s > lending_s(sum(info.nbytes for info in infos)):
            raise _OutOfReach
        client.tell(Copied())
    return structure.build(tensors)


def _copy_lent(ref: BufferRef, into: memoryview) -> None:
    try:
        Segments.current().read(ref, into)
    except OSError as exc:
        raise _OutOfReach from exc


def _read_description(found: dict[str, Any]) -> tuple[Structure, list[TensorInfo], list[BufferRef | None]]:
    try:
        structure = Structure.from_plain(found["structure"])
        infos = [TensorInfo(shape=tuple(s), dtype=d, itemsize=i, library=lib) for s, d, i, lib in found["infos"]]
        samples = [np.empty(0, info.dtype) for info in infos]
        segment = Segment(*found["segment"])
        places = zip(infos, found["offsets"], strict=True)
        refs = [None if at is None else BufferRef(segment, at, info.nbytes) for info, at in places]
        sound = structure.count == len(infos) and all(
            arrays.is_tensor(sample) and sample.itemsize == info.itemsize and min(info.shape, default=0) >= 0
            for sample, info in zip(samples, infos, strict=True)
        )
        sound = sound and all(0 <= ref.offset <= segment.nbytes - ref.nbytes for ref in refs if ref)
    except (ValueError, TypeError, LookupError) as exc:
        raise ProtocolError(detail=f"a malformed description of tensors: {exc}") from exc
    if not sound:
        raise ProtocolError(detail="a description of tensors that can't be")
    return structure, infos, refs


def _expect(answer: Any, kind: type[Any]) -> Any:
    if not isinstance(answer, kind):
        raise ProtocolError(detail=f"{type(answer).__name__} where {kind.__name__} was due")
    return answer


def _lost(op: str, key: Key, actor: str, incarnation: str, cause: ChannelError) -> RaycollectError:
    found = f"out of reach ({cause.detail})"
    expected = (
        f"its process {incarnation[:6]}, whose tensors no restart of the actor brings back" if incarnation else ""
    )
    violation = Violation(
        kind="lost", rank=-1, field="holder", found=found, expected=expected, actor=actor, ref=key.hex()
    )
    return TensorLostError(op=op, group_name="", violations=(violation,))


# ---------------------------------------------------------------------------------------------- holder's end


def find(store: Store, key: Key) -> Container:
    """The container of a key.

    Raises:
        TensorFreedError, TensorLostError, TensorDirtyError: As `fetch`.
    """
    found = store.look(key)
    if isinstance(found, Absence):
        kind = "freed" if found.state is State.FREED else "lost"
        raise _refused(kind, "freed" if kind == "freed" else f"not there ({found.state.value} {found.detail})", key)
    try:
        ranges = [arrays.byte_range(arrays.memory(tensor)) for tensor in found.tensors]
    except TypeError as exc:
        raise _refused("not_tensor", str(exc), key) from exc
    if store.is_dirty(ranges):
        raise _refused("dirty", "half-written by a failed collective", key)
    return found


def serve(link: DataLink, store: Store) -> None:
    """Answers one data connection until it ends. Runs on that connection's own thread, in the holder."""
    while True:
        message = link.receive()
        if message is None:
            return
        try:
            if isinstance(message, Fetch):
                _serve_fetch(link, store, message)
            elif isinstance(message, Free):
                link.send(Freed(count=store.free([Key(key) for key in message.keys])))
            else:
                raise ProtocolError(detail=f"{type(message).__name__} has no place on a data connection")
        except ChannelError:
            raise
        except RaycollectError as exc:
            link.send(Failed(error=to_wire(exc)))


@dataclass(frozen=True, slots=True)
class _Offer:
    """One tensor as it is given to a client.

    Attributes:
        info: What the client will have.
        array: The elements, native and contiguous.
        ref: Where they can be read; None: they are sent.
        is_copy: Whether the tensor itself may change meanwhile.
    """

    info: TensorInfo
    array: arrays.Array
    ref: BufferRef | None
    is_copy: bool


def _serve_fetch(link: DataLink, store: Store, message: Fetch) -> None:
    key = Key(message.key)
    container = find(store, key)
    views = [arrays.memory(tensor) for tensor in container.tensors]
    nbytes = sum(view.nbytes for view in views)
    lend = message.domain == memory_domain() and nbytes >= LENT_FROM_NBYTES
    with ExitStack() as claim:
        claim.enter_context(store.reading([arrays.byte_range(view) for view in views]))
        find(store, key)  # once more: the plan that was waited for may have failed
        pairs = list(zip(views, container.tensors, strict=True))
        offers = [_offer(view, tensor, lend) for view, tensor in pairs]
        if any(offer.ref is None and offer.array.nbytes for offer in offers):  # the arena is full: none is lent
            offers = [_offer(view, tensor, False) for view, tensor in pairs]
        if all(offer.is_copy for offer in offers):
            claim.close()  # a slow reader of copies holds up nobody
        blobs = [offer.array.reshape(-1).view(np.uint8).data for offer in offers if offer.ref is None]
        found = _describe(container.structure, offers)
        link.send(Fetched(found=found, blob_nbytes=sum(blob.nbytes for blob in blobs)), blobs)
        if len(blobs) < len(offers):
            answer = link.receive(lending_s(nbytes))
            if answer is not None:  # else the client is gone, or too slow
                _expect(answer, Copied)


def _offer(view: Any, tensor: object, lend: bool) -> _Offer:
    """Makes one tensor ready: lent where it lies, or a copy of it, in the arena if it can be lent there."""
    info = arrays.info(view, arrays.library(tensor))
    if not lend or isinstance(view, arrays.DeviceArray):
        copy = arrays.copy_to_host(view).astype(info.dtype, copy=False)
        return _Offer(replace(info, device="cpu"), copy, None, is_copy=True)
    if view.flags.c_contiguous and view.dtype.isnative and (ref := _located(view)) is not None:
        return _Offer(info, view, ref, is_copy=False)
    copy = tensors.allocate(replace(info, library="numpy"))
    np.copyto(copy, view)
    return _Offer(info, copy, _located(copy), is_copy=True)


def _located(array: arrays.Array) -> BufferRef | None:
    return Segments.current().locate(array.ctypes.data, array.nbytes)


def _describe(structure: Structure, offers: Sequence[_Offer]) -> dict[str, Any]:
    """What `_read_description` reads."""
    infos = [offer.info for offer in offers]
    segment = next((offer.ref.segment for offer in offers if offer.ref), Segment(0, 0, b"", 0))
    return {
        "structure": structure.to_plain(),
        "infos": [(list(info.shape), info.dtype, info.itemsize, info.library) for info in infos],
        "segment": list(astuple(segment)),
        "offsets": [offer.ref.offset if offer.ref else None for offer in offers],
    }


def _refused(kind: str, found: str, key: Key) -> RaycollectError:
    violation = Violation(kind=kind, rank=-1, field="tensor", found=found, ref=key.hex())
    return refusal("get", "", (violation,))
