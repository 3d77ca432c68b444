"""Fetching tensors from the process that holds them, over data connections: both ends.

Tensors have their own connections, so that an abort never waits behind a tensor. A process reuses idle connections,
each by one thread at a time.

If both ends are on one machine, no bytes are sent: the holder describes their position in its memory, and blocks plans
that would write them; the client copies them once, and answers `Copied`. It has `lending_s` for that. The holder counts
from its answer and the client from its request, so a client that finished in time has read valid data. A client that
the system does not let read another process reads its arena instead; tensors outside the arena are copied to it first.
Boxes of frozen values, which nobody writes, are lent until the client answers `Copied` or ends.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from msgspec.structs import replace

from raycollect.backends import arrays
from raycollect.channel import DataClient, DataLink
from raycollect.channel.messages import Copied, Failed, Fetch, Fetched, Free, Freed, Look, Read, Seen
from raycollect.core import sockets, threads
from raycollect.core.model import Address, BufferRef, Key, TensorInfo
from raycollect.core.shared_memory import memory_domain
from raycollect.errors import (
    ChannelError,
    ConnectionLostError,
    HolderUnreachableError,
    ProtocolError,
    RaycollectError,
    TensorLostError,
    Violation,
    to_wire,
)
from raycollect.pos import Store, boxes, delta, description, tensors
from raycollect.pos.boxes import LENT, Borrowed, OutOfReach
from raycollect.pos.data_clients import DataClients, ReadAnswer, is_full, is_gone
from raycollect.pos.description import Description
from raycollect.pos.held import find, reading, refused
from raycollect.pos.process_memory import NO_FILE
from raycollect.pos.segments import Segments

LENT_FROM_NBYTES = 64 << 10
"""The smallest value that is read in place; a smaller one is sent with the answer."""

FREE_S = 30.0
"""How long a holder may take to free values."""

LENDING_S, LENDING_RATE, LENDING_EACH_S = 5.0, 500e6, 1e-3
"""The seconds for which a value is lent: a constant, a second per this many bytes, and a constant per tensor."""

MOST_TENSORS, FREED_AT_ONCE = 500_000, 8192
"""How many tensors a fetched value may have, and how many keys one message frees: messages are bounded."""


def lending_s(nbytes: int, count: int = 1) -> float:
    """How long a value of `nbytes` bytes and `count` tensors is lent, in seconds."""
    return LENDING_S + nbytes / LENDING_RATE + count * LENDING_EACH_S


_Locate = Callable[[int, int], BufferRef | None]
"""Where a client finds bytes of this process, by their address and number."""


_Unused = Callable[[bytes, Sequence[bytes]], int]
"""Frees values of an owner of tokens; returns their number."""


_clients = DataClients()


def register_local(secret: bytes, store: Store) -> None:
    """Makes fetches from a participant of this process return the object itself, until `forget_local`."""
    _clients.local[secret] = store


def forget_local(secret: bytes) -> None:
    """Ends the effect of `register_local`."""
    _clients.local.pop(secret, None)


@atexit.register  # a thread may have returned a connection after its controller closed them
def close_idle() -> None:
    """Closes the idle data connections of this process."""
    _clients.shrink(0)


def fetch(address: Address, key: Key, *, actor: str, incarnation: str = "", timeout_s: float = 60.0) -> Any:
    """Fetches the value of a key from its holder; any thread may call it.

    In the holder's process this is the object itself, in any other a copy. `actor` and `incarnation` name the holder
    and its process in error messages.

    Raises:
        TensorFreedError: It was freed.
        TensorDirtyError: A failed collective left it half-written.
        TensorLostError: The holder does not have it, or has ended.
        HolderUnreachableError: The holder could not be reached in time.
    """
    local = _clients.local.get(address.secret)
    if local is not None:
        return find(local, key).value
    with _answering("get", key, actor, incarnation):
        near = Fetch(key=key, domain=memory_domain())
        direct = [replace(near, reads_processes=True)] if Segments.current().reads_processes else []
        return _lent_or_sent(address, (*direct, near, Fetch(key=key)), _read_value, timeout_s)


def _lent_or_sent(address: Address, requests: Sequence[Any], read: ReadAnswer, timeout_s: float) -> Any:
    """Makes the first request, and each next one if what the holder lent is out of reach."""
    until_s = time.monotonic() + timeout_s
    for message in requests:
        with suppress(OutOfReach):
            return _clients.request(address, message, until_s, read)
    raise ProtocolError(detail="the holder lends a value that it should send")


def borrow(
    address: Address,
    key: Key,
    wanted: Sequence[boxes.Box],
    *,
    actor: str,
    incarnation: str = "",
    timeout_s: float = 60.0,
    in_arena: bool = False,
) -> Borrowed:
    """Borrows boxes of the tensors of a key, at most `boxes.MOST_BOXES`; raises as `fetch`. Any thread may call it.

    Tensors of a frozen value in shared memory of this machine are lent, without a time limit. Others are copied; those
    that were sent into shared memory with `in_arena`.
    """
    plain = [box[:3] for box in wanted]
    local = _clients.local.get(address.secret)
    if local is not None:
        with ExitStack() as claim:
            held = claim.enter_context(reading(local, key, limit_s=timeout_s))
            views = boxes.views([*map(arrays.memory, held.tensors)], plain)
            if held.is_frozen:
                return Borrowed(views, claim.pop_all().close)
            return Borrowed([np.array(view) for view in views])

    def take(client: DataClient, answer: Any, *_: Any) -> Borrowed:
        description = _expect(answer, Fetched).description
        give_back = partial(_clients.give_back, address, client)
        return boxes.take(client, description, wanted, give_back, in_arena=in_arena)

    with _answering("read", key, actor, incarnation):
        sent = Read(key=key, boxes=plain)
        borrowed: Borrowed = _lent_or_sent(address, (replace(sent, domain=memory_domain()), sent), take, timeout_s)
        return borrowed


def read_deltas(
    address: Address,
    key: Key,
    wanted: Sequence[boxes.Box],
    since: Key,
    into: Sequence[arrays.Array],
    *,
    actor: str,
    incarnation: str = "",
    timeout_s: float = 60.0,
) -> tuple[list[bool], int]:
    """Reads the boxes of the tensors of a key whose deltas are smaller, as deltas; any thread may call it.

    Args:
        address: The holder's.
        key: The key.
        wanted: At most `boxes.MOST_BOXES` boxes.
        since: The key under which the holder has the tensors from which the deltas lead to them.
        into: The boxes of these tensors, in C order; they become those of `key`, or undefined if this raises.
        actor: As in `fetch`.
        incarnation: As in `fetch`.
        timeout_s: How long to wait, in seconds.

    Returns:
        Which boxes arrived, and their bytes.

    Raises:
        RaycollectError: As `fetch`; also if the holder does not have the tensors under `since`.
    """

    def take(client: DataClient, answer: Any, *_: Any) -> tuple[list[bool], int]:
        return boxes.take_deltas(client, _expect(answer, Fetched).description, into), int(answer.blob_nbytes)

    with _answering("read", key, actor, incarnation):
        message = Read(key=key, boxes=[box[:3] for box in wanted], since=since)
        arrived: tuple[list[bool], int] = _clients.request(address, message, time.monotonic() + timeout_s, take)
        return arrived


def free(address: Address, keys: list[Key], *, actor: str, incarnation: str = "", owner: bytes = b"") -> int:
    """Frees values in their holder, and returns how many it held; any thread may call it.

    Args:
        address: The holder's.
        keys: The keys.
        actor: As in `fetch`.
        incarnation: As in `fetch`.
        owner: Only values with tokens of this owner are freed; empty: all.

    Raises:
        TensorLostError: The holder has ended.
        HolderUnreachableError: The holder could not be reached in time.
    """
    local = _clients.local.get(address.secret)
    if local is not None and not owner:
        return local.free(keys)
    count = 0
    with _answering("free", keys[0], actor, incarnation):
        for at in range(0, len(keys), FREED_AT_ONCE):
            message = Free(keys=[*keys[at : at + FREED_AT_ONCE]], owner=owner)
            until_s = time.monotonic() + FREE_S
            count += _clients.request(address, message, until_s, lambda _, answer, *__: _expect(answer, Freed).count)
    return count


def _read_value(client: DataClient, answer: Any, asked_s: float, request: Fetch) -> Any:
    data = _expect(answer, Fetched).description
    if answer.described_nbytes:
        data = bytearray(answer.described_nbytes)
        client.receive_blob(memoryview(data))
    described = description.decode(data)
    sent = sum(info.nbytes for info, ref in zip(described.infos, described.refs, strict=True) if ref is None)
    if sent != answer.blob_nbytes - answer.described_nbytes:
        raise ProtocolError(detail="the announced bytes are not those of the tensors")
    values = [np.empty(info.shape, info.dtype) for info in described.infos]
    memory = [arrays.as_bytes(array).data for array in values]
    client.receive_blob(*(into for into, ref in zip(memory, described.refs, strict=True) if ref is None))
    lent = [(ref, into) for into, ref in zip(memory, described.refs, strict=True) if ref is not None]
    if lent:
        in_process = any(ref.segment.fd == NO_FILE for ref, _ in lent)
        if not request.domain or (in_process and not request.reads_processes):
            raise ProtocolError(detail="the holder lends memory that was not asked for")
        try:
            Segments.current().read(lent)
        except OSError as exc:
            raise OutOfReach from exc
        if time.monotonic() - asked_s > lending_s(sum(info.nbytes for info in described.infos), len(values)):
            raise OutOfReach
        client.tell(Copied())
    restored = [arrays.restore(array, info.library) for array, info in zip(values, described.infos, strict=True)]
    return described.structure.build(restored)


def _expect(answer: Any, kind: type[Any]) -> Any:
    if not isinstance(answer, kind):
        raise ProtocolError(detail=f"unexpected message {type(answer).__name__}, expected {kind.__name__}")
    return answer


@contextmanager
def _answering(op: str, key: Key, actor: str, incarnation: str) -> Iterator[None]:
    """Raises TensorLostError or HolderUnreachableError if the holder of a key does not answer."""
    try:
        yield
    except ChannelError as exc:
        if isinstance(exc, ConnectionLostError) and not is_gone(exc):
            short = sockets.shortage(1) if is_full(exc) else ""
            detail = f"{exc.detail}; {short}" if short else exc.detail
            raise HolderUnreachableError(op=op, actor=actor, ref=key.hex(), detail=detail, peer=exc.peer) from exc
        violation = Violation(
            kind="lost",
            rank=-1,
            field="holder",
            found=f"out of reach ({exc.detail})",
            expected=incarnation
            and f"its process {incarnation[:6]}, whose tensors no restart of the actor brings back",
            actor=actor,
            ref=key.hex(),
        )
        raise TensorLostError(op=op, group_name="", violations=(violation,)) from exc


def serve(
    link: DataLink,
    store: Store,
    seen: Callable[[], Seen] = lambda: Seen(request=0, doing=""),
    unused: _Unused = lambda owner, keys: 0,
) -> None:
    """Answers one data connection until it ends, on its own thread in the holder.

    `seen` answers `Look`, and `unused` frees the values of an owner of tokens; see `TokenLenders.unused`.

    A client without an answer retries until its timeout, so a failed request is answered with the reason.
    """
    answers: dict[type[Any], Callable[[DataLink, Store, Any], None]]
    answers = {Fetch: _serve_fetch, Read: _serve_read, Free: partial(_serve_free, unused)}
    while True:
        message = link.receive()
        if message is None:
            return
        if isinstance(message, Look):
            link.send(seen())
            continue
        answer = answers.get(type(message))
        if answer is None:
            raise ProtocolError(detail=f"unexpected message {type(message).__name__} on a data connection")
        before = link.sent
        try:
            answer(link, store, message)
        except ConnectionLostError:
            raise
        except Exception as exc:  # the client waits for an answer
            if link.sent > before:  # the request was answered
                raise
            _tell_failure(link, message, exc)


def _tell_failure(link: DataLink, message: Any, cause: Exception) -> None:
    if isinstance(cause, ProtocolError):  # the request is invalid, or its answer can't be sent
        cause = refused("unsupported", cause.detail, getattr(message, "key", b""))
    elif not isinstance(cause, RaycollectError):
        cause = threads.failed(f"answering {type(message).__name__}", cause)
    link.send(Failed(error=to_wire(cause)))


@dataclass(frozen=True, slots=True)
class _OutgoingTensor:
    """One tensor as it is sent or lent to a client."""

    info: TensorInfo  # the client's tensor
    array: arrays.Array  # the elements, native and contiguous
    ref: BufferRef | None  # their position in the holder's memory; None: they are sent
    is_copy: bool  # whether the tensor itself may be written meanwhile


def _serve_fetch(link: DataLink, store: Store, message: Fetch) -> None:
    key = Key(message.key)
    count = len(find(store, key).tensors)
    if count > MOST_TENSORS:  # before they are claimed one by one
        actual = f"of {count} tensors, expected at most {MOST_TENSORS}: return several values"
        raise refused("unsupported", actual, message.key)
    with ExitStack() as claim:
        container = claim.enter_context(reading(store, key, link.has_ended))
        pairs = [(arrays.memory(tensor), tensor) for tensor in container.tensors]
        nbytes = sum(view.nbytes for view, _ in pairs)
        near = message.domain == memory_domain() and nbytes >= LENT_FROM_NBYTES
        locate = _memory_to_lend([view for view, _ in pairs], message.reads_processes) if near else None
        offers = [_offer(view, tensor, locate) for view, tensor in pairs]
        if locate and any(offer.ref is None and offer.array.nbytes for offer in offers):  # the arena is full
            offers = [_offer(view, tensor, None) for view, tensor in pairs]
        if all(offer.is_copy for offer in offers):
            claim.close()  # a slow reader of copies blocks no plan
        blobs = [arrays.as_bytes(offer.array).data for offer in offers if offer.ref is None]
        infos, refs = [offer.info for offer in offers], [offer.ref for offer in offers]
        described = description.encode(Description(container.structure, infos, refs))
        nbytes_sent = sum(blob.nbytes for blob in blobs)
        if len(described) <= description.LONG_NBYTES:
            link.send(Fetched(description=described, blob_nbytes=nbytes_sent), blobs)
        else:
            answer = Fetched(description=b"", described_nbytes=len(described), blob_nbytes=len(described) + nbytes_sent)
            link.send(answer, [memoryview(described), *blobs])
        if len(blobs) < len(offers):
            copied = link.receive(lending_s(nbytes, len(offers)))
            if copied is not None:  # else the client has ended, or is too slow
                _expect(copied, Copied)


def _serve_read(link: DataLink, store: Store, message: Read) -> None:
    if message.since:
        _serve_deltas(link, store, message)
        return
    with ExitStack() as claim:
        held = claim.enter_context(reading(store, Key(message.key), link.has_ended))
        is_near = message.domain == memory_domain()
        same = (_serve_read, *message.boxes) if held.is_frozen and is_near else None
        lent: bytes | None = held.memo.get(same)  # several clients of a machine ask for the same boxes
        views = [] if lent else boxes.views([*map(arrays.memory, held.tensors)], message.boxes)
        nbytes = sum(view.nbytes for view in views)
        if is_near and nbytes >= LENT_FROM_NBYTES and (place := boxes.located(views)) is not None:
            lent = LENT.encode((*place, held.is_frozen))
            if same is not None:
                held.memo[same] = lent
        if lent is not None:
            link.send(Fetched(description=lent))
            # `Copied`, or None: the client has ended, or is too slow
            link.receive(None if held.is_frozen else lending_s(nbytes))
            return
        blobs = [arrays.as_bytes(view).data for view in views]
        if not held.is_frozen:
            claim.close()  # a slow reader blocks no plan
        link.send(Fetched(description=LENT.encode(None), blob_nbytes=nbytes), blobs)


def _serve_deltas(link: DataLink, store: Store, message: Read) -> None:
    with ExitStack() as claims:
        old, new = (
            claims.enter_context(reading(store, Key(key), link.has_ended)) for key in (message.since, message.key)
        )
        before, after = (boxes.views([*map(arrays.memory, held.tensors)], message.boxes) for held in (old, new))
        # Several hosts ask for the same deltas at once. They are kept as long as the tensors from which they begin
        memo = old.memo if old.is_frozen and new.is_frozen else {}
        encoded = [
            threads.once(memo, (_serve_deltas, message.key, *box), partial(delta.encode, some, other))
            for box, some, other in zip(message.boxes, before, after, strict=True)
        ]
        described, blobs = boxes.describe_deltas(encoded)
        link.send(Fetched(description=described, blob_nbytes=sum(blob.nbytes for blob in blobs)), blobs)


def _serve_free(unused: _Unused, link: DataLink, store: Store, message: Free) -> None:
    keys = list(map(Key, message.keys))
    link.send(Freed(count=unused(message.owner, keys) if message.owner else store.free(keys)))


def _memory_to_lend(views: Sequence[Any], reads_processes: bool) -> _Locate | None:
    """Where to lend a value: in the arena, unless some of it lies elsewhere and the client can read it there."""
    segments = Segments.current()
    if any(isinstance(view, arrays.DeviceArray) for view in views):
        return None
    if reads_processes and not all(segments.locate(view.ctypes.data, view.nbytes) for view in views):
        return segments.locate_in_process
    return segments.locate


def _offer(view: Any, tensor: object, locate: _Locate | None) -> _OutgoingTensor:
    """One tensor, lent where `locate` finds it, or copied; the copy lies in the arena if it can be lent there."""
    info = arrays.info(view, arrays.library(tensor))
    if locate is None:
        copy = arrays.copy_to_host(view).astype(info.dtype, copy=False)
        return _OutgoingTensor(replace(info, device="cpu"), copy, None, is_copy=True)
    if view.flags.c_contiguous and view.dtype.isnative and (ref := locate(view.ctypes.data, view.nbytes)):
        return _OutgoingTensor(info, view, ref, is_copy=False)
    copy = tensors.allocate(replace(info, library="numpy"))
    np.copyto(copy, view)
    return _OutgoingTensor(info, copy, locate(copy.ctypes.data, copy.nbytes), is_copy=True)
