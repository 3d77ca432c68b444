"""Fetching tensors from the process that holds them, over data connections: both ends.

Bulk has connections of its own, so that an abort never waits behind a tensor. A process keeps idle connections and
uses each from one thread at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from raycollect.backends import arrays
from raycollect.channel import DataClient, DataLink
from raycollect.channel.messages import Failed, Fetch, Fetched, Free, Freed
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
from raycollect.model import Address, Key, Structure, TensorInfo
from raycollect.pos import Absence, Container, State, Store

MAX_IDLE = 32
"""How many idle data connections a process keeps; the one unused for longest is closed first."""


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


def fetch(address: Address, key: Key, *, actor: str, timeout_s: float = 60.0) -> Any:
    """Fetches the value of a key from its holder. Any process, any thread.

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
    message = Fetch(key=key, timeout_s=timeout_s)
    try:
        return _clients.request(address, message, timeout_s, _read_tensors)
    except ChannelError as exc:
        raise _lost(key, actor, exc) from exc


def free(address: Address, keys: list[Key], *, actor: str) -> int:
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
        raise _lost(keys[0], actor, exc) from exc


def _read_tensors(client: DataClient, answer: Any) -> Any:
    structure, infos = _read_description(_expect(answer, Fetched).found)
    if sum(info.nbytes for info in infos) != answer.blob_nbytes:
        raise ProtocolError(detail="the announced bytes are not those of the tensors")
    whole = np.empty(answer.blob_nbytes, np.uint8)
    client.receive_blob(whole.data)
    tensors, at = [], 0
    for info in infos:
        part = whole[at : at + info.nbytes]
        at += info.nbytes
        aligned = part if part.ctypes.data % max(info.itemsize, 1) == 0 else part.copy()
        tensors.append(arrays.restore(aligned.view(info.dtype).reshape(info.shape), info.library))
    return structure.build(tensors)


def _read_description(found: dict[str, Any]) -> tuple[Structure, list[TensorInfo]]:
    try:
        structure = Structure.from_plain(found["structure"])
        infos = [TensorInfo(shape=tuple(s), dtype=d, itemsize=i, library=lib) for s, d, i, lib in found["infos"]]
        samples = [np.empty(0, info.dtype) for info in infos]
        sound = structure.count == len(infos) and all(
            arrays.is_tensor(sample) and sample.itemsize == info.itemsize and min(info.shape, default=0) >= 0
            for sample, info in zip(samples, infos, strict=True)
        )
    except (ValueError, TypeError, LookupError) as exc:
        raise ProtocolError(detail=f"a malformed description of tensors: {exc}") from exc
    if not sound:
        raise ProtocolError(detail="a description of tensors that can't be")
    return structure, infos


def _expect(answer: Any, kind: type[Any]) -> Any:
    if not isinstance(answer, kind):
        raise ProtocolError(detail=f"{type(answer).__name__} where {kind.__name__} was due")
    return answer


def _lost(key: Key, actor: str, cause: ChannelError) -> RaycollectError:
    violation = Violation(
        kind="lost", rank=-1, field="holder", found=f"out of reach ({cause.detail})", actor=actor, ref=key.hex()
    )
    return TensorLostError(op="get", group_name="", violations=(violation,))


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
                _serve_fetch(link, store, Key(message.key))
            elif isinstance(message, Free):
                link.send(Freed(count=store.free([Key(key) for key in message.keys])))
            else:
                raise ProtocolError(detail=f"{type(message).__name__} has no place on a data connection")
        except ChannelError:
            raise
        except RaycollectError as exc:
            link.send(Failed(error=to_wire(exc)))


def _serve_fetch(link: DataLink, store: Store, key: Key) -> None:
    container = find(store, key)
    views = [arrays.memory(tensor) for tensor in container.tensors]
    with store.reading([arrays.byte_range(view) for view in views]):
        find(store, key)  # once more: the plan that was waited for may have failed
        # A copy, so that a slow reader never holds up a collective that writes this memory.
        copies = [arrays.copy_to_host(view) for view in views]
    infos = [arrays.info(copy, arrays.library(tensor)) for copy, tensor in zip(copies, container.tensors, strict=True)]
    native = [copy.astype(info.dtype, copy=False) for copy, info in zip(copies, infos, strict=True)]
    found = {
        "structure": container.structure.to_plain(),
        "infos": [(list(info.shape), info.dtype, info.itemsize, info.library) for info in infos],
    }
    blobs = [copy.reshape(-1).view(np.uint8).data for copy in native]
    link.send(Fetched(found=found, blob_nbytes=sum(blob.nbytes for blob in blobs)), blobs)


def _refused(kind: str, found: str, key: Key) -> RaycollectError:
    violation = Violation(kind=kind, rank=-1, field="tensor", found=found, ref=key.hex())
    return refusal("get", "", (violation,))
