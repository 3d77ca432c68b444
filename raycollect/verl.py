"""raycollect for verl: a checkpoint engine, with digests of the received bytes and receipts.

verl imports this module in each of its processes if its configuration says so, and then knows the backend::

    actor_rollout_ref.rollout.checkpoint_engine.backend=raycollect
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=raycollect.verl

Rank 0 of the trainer and all rollout workers form a group themselves, which lasts until its members change or an update
fails. An update is broadcast in buckets through host memory, each with its digest. The rollout workers load it after
all of them have verified all of it. The interface is that of verl 0.9.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

from raycollect.core import threads
from raycollect.core.model import TensorInfo
from raycollect.errors import RaycollectError, UnknownGroupError, VersionNotWholeError
from raycollect.member import init, objects, operations
from raycollect.pos.tensors import allocate
from raycollect.ray_bridge import ray_actors
from raycollect.weights import digests
from raycollect.weights.cut import Atom
from raycollect.weights.protocol import Version
from raycollect.weights.receipts import RankReceipt, Receipt

__all__ = ["CheckpointEngine"]

torch: Any = import_module("torch")
base: Any = import_module("verl.checkpoint_engine.base")

_Result = TypeVar("_Result")

BACKEND = "raycollect"
_ALIGNMENT = 16  # of a chunk in its bucket: `view` of torch refuses an offset that the dtype does not divide
_SENDER = 0
_OUTSIDE = -1  # the rank of the trainer's other workers


@dataclass(frozen=True, slots=True, kw_only=True)
class _Membership:
    """A process's end of a group."""

    group_name: str
    rank: int
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bucket:
    """A received message: chunks of tensors, with verl's descriptions of them."""

    metas: Sequence[Any]
    message: Any
    digest: bytes
    is_good: bool
    is_last: bool

    def chunks(self) -> Iterator[tuple[Any, Any]]:
        for meta in self.metas:
            yield meta, self.message[meta.offset : meta.offset + meta.chunk_size]


@base.CheckpointEngineRegistry.register(BACKEND)
class CheckpointEngine(base.CheckpointEngine):  # type: ignore[misc]
    """The checkpoint engine of one process, which verl creates and calls.

    Args:
        bucket_size: The most bytes of a message.
        is_master: Whether this process is rank 0 of the trainer.
        transport: raycollect's backend: ``"shm"``, ``"tcp"`` ...; ``"auto"`` picks one of these two, also on GPUs.
        whole: Whether rollout workers load an update only after all of them have verified all of it. They keep it in
            host memory until then. False: each worker loads a bucket as soon as it has verified it, and needs the
            memory of two.
        timeout_s: How long ranks wait for each other, in seconds.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        transport: str = "auto",
        whole: bool = True,
        timeout_s: float = 300.0,
    ) -> None:
        self.bucket_size = bucket_size
        self.is_master = is_master
        self._transport = transport
        self._whole = whole
        self._timeout_s = timeout_s
        self._actor = ray_actors.short_actor(ray_actors.current_class(), ray_actors.current_actor_id())
        self._membership: _Membership | None = None
        self._memory: list[Any] = []
        self._receipt: Receipt | None = None

    # ---------------------------------------------------------------------------------------------- the group

    def prepare(self) -> _Membership | None:
        """Returns the end of the group that this process has, for `build_topology`."""
        return self._membership

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: Sequence[_Membership | None]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Returns the arguments of `init_process_group`: those of the current group if exactly its members are here."""
        world_size = 1 + rollout_world_size
        current = metadata[0]
        group_name = current.group_name if current is not None else ""
        expected = [_Membership(group_name=group_name, rank=rank, world_size=world_size) for rank in range(world_size)]
        if current is None or [current, *metadata[actor_wg_world_size:]] != expected:
            group_name = f"verl-{secrets.token_hex(8)}"

        def arguments(ranks: list[int]) -> dict[str, list[Any]]:
            return {
                "rank": ranks,
                "world_size": [world_size] * len(ranks),
                "group_name": [group_name] * len(ranks),
            }

        others = [_OUTSIDE] * (actor_wg_world_size - 1)
        return arguments([_SENDER, *others]), arguments(list(range(1, world_size)))

    def init_process_group(self, rank: int, world_size: int, group_name: str) -> None:
        """Joins the group, and leaves another one; returns when all members have joined."""
        wanted = _Membership(group_name=group_name, rank=rank, world_size=world_size)
        if wanted == self._membership or rank == _OUTSIDE:
            return
        self._leave(self._membership)
        init.init_host_group(world_size, rank, self._transport, group_name, self._timeout_s, init.JOB)
        self._membership = wanted

    def finalize(self) -> None:
        """Frees the buckets. The group remains for the next update."""
        self._memory = []

    def _leave(self, member: _Membership | None) -> None:
        if member is not None and member is self._membership:  # an update that fails late finds the next group
            self._membership = None
            init.destroy_collective_group(member.group_name)

    @contextmanager
    def _member(self) -> Iterator[_Membership]:
        """The block is a part of an update: if it fails, this process leaves the group, so that the others fail too."""
        member = self._membership
        if member is None:
            raise UnknownGroupError(group_name="", detail="no group: init_process_group has not been called")
        try:
            yield member
        except BaseException:
            self._leave(member)
            raise

    def receipt(self) -> Receipt | None:
        """Returns the receipt of the last update that all ranks have verified; None on the trainer's other workers."""
        return self._receipt

    def _agree(self, member: _Membership, version: Version, mine: RankReceipt, wrong: str) -> None:
        """Exchanges receipts; raises if a rank has other bits than were sent."""
        vote = [mine.actor, mine.nbytes, mine.seconds, list(mine.digests.values()), wrong]
        votes = objects.allgather_object(vote, member.group_name)
        for rank, (actor, _, _, _, detail) in enumerate(votes):
            if detail:
                raise VersionNotWholeError(
                    name=member.group_name, version=str(version.number), rank=rank, actor=actor, detail=detail
                )
        ranks = tuple(
            RankReceipt(
                rank=rank,
                actor=actor,
                digests=dict(zip(mine.digests, theirs, strict=True)),
                nbytes=nbytes,
                seconds=seconds,
            )
            for rank, (actor, nbytes, seconds, theirs, _) in enumerate(votes)
            if rank != _SENDER
        )
        self._receipt = Receipt(name=member.group_name, version=version, ranks=ranks, seconds=mine.seconds)

    # ---------------------------------------------------------------------------------------------- the trainer

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float] | None:
        """Sends the weights, on rank 0; the trainer's other workers take part in the gathers.

        Returns:
            Metrics of the update.

        Raises:
            VersionNotWholeError: A rollout worker has other bits than were sent.
            RaycollectError: A rollout worker has died or is late.
        """
        chunks = base.split_weight_chunks(weights, self.bucket_size, meta_only=not self.is_master)
        if not self.is_master:
            async for _ in chunks:
                pass
            return None
        try:
            return await self._send(chunks, global_steps)
        except Exception:
            with suppress(Exception):  # the cause matters more
                async for _ in chunks:  # the trainer's other workers gather all weights, with this one
                    pass
            raise

    async def _send(self, chunks: AsyncIterator[tuple[Any, Any]], global_steps: int | None) -> dict[str, float]:
        with self._member() as member:
            sender = _Sender(member.group_name, self._buffers())
            try:
                async for meta, chunk in chunks:
                    await sender.add(meta, chunk)
                await sender.flush(is_last=True)
            except Exception as exc:
                if not isinstance(exc, RaycollectError):  # the source's: the group works, and the workers wait
                    await sender.refuse(exc)
                raise
            finally:
                await sender.wait()
            version = Version(0, global_steps or 0, publisher=self._actor, nbytes=sender.nbytes)
            mine = RankReceipt(
                rank=_SENDER, actor=self._actor, digests=sender.digests, nbytes=0, seconds=sender.seconds()
            )
            await _in_helper(self._agree, member, version, mine, "")
        return {
            "checkpoint_engine/payload_mbytes": sender.nbytes / (1 << 20),
            "checkpoint_engine/receivers": float(member.world_size - 1),
            "checkpoint_engine/seconds": sender.seconds(),
        }

    def _buffers(self) -> list[Any]:
        """Returns two buckets of shared memory, from which the workers of this host read in place."""
        if not self._memory:
            info = TensorInfo(shape=(self.bucket_size,), dtype="uint8", itemsize=1, library="torch")
            self._memory = [allocate(info) for _ in range(2)]
        return self._memory

    # ---------------------------------------------------------------------------------------------- a rollout worker

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Any]]:
        """Yields the names and tensors of an update, in host memory.

        Raises:
            VersionNotWholeError: This worker has other bits than were sent; with `whole`, this or another one.
            RaycollectError: Another rank has died, or is late.
        """
        async for name, weight in base.merge_weight_chunks(self._chunks(global_steps), self.bucket_size):
            yield name, weight

    async def _chunks(self, global_steps: int | None) -> AsyncIterator[tuple[Any, Any]]:
        began_s = time.perf_counter()
        held: list[_Bucket] = []
        received: dict[Atom, bytes] = {}
        nbytes, wrong, is_last = 0, "", False
        with self._member() as member:
            while not is_last:
                bucket = await _in_helper(self._receive, member.group_name)
                received[_atom(len(received), bucket.message)] = bucket.digest
                nbytes += len(bucket.message)
                is_last = bucket.is_last
                if not bucket.is_good:
                    wrong = wrong or f"other bits than were sent, from {bucket.metas[0].name!r} on"
                elif self._whole:
                    held.append(bucket)
                elif not wrong:
                    for chunk in bucket.chunks():
                        yield chunk
            seconds = time.perf_counter() - began_s
            mine = RankReceipt(rank=member.rank, actor=self._actor, digests=received, nbytes=nbytes, seconds=seconds)
            await _in_helper(self._agree, member, Version(0, global_steps or 0, nbytes=nbytes), mine, wrong)
        held.reverse()
        while held:
            for chunk in held.pop().chunks():
                yield chunk

    def _receive(self, group_name: str) -> _Bucket:
        header = objects.broadcast_object(None, _SENDER, group_name)
        if "refusal" in header:
            detail = f"the trainer's weights have ended early: {header['refusal']}"
            raise VersionNotWholeError(name=group_name, rank=_SENDER, detail=detail)
        message = torch.empty(header["nbytes"], dtype=torch.uint8)
        self.broadcast(message, group_name)
        digest = digests.digest(message.numpy())
        metas = [
            base.TensorMeta(
                name=name,
                shape=torch.Size(shape),
                dtype=getattr(torch, dtype.removeprefix("torch.")),
                chunk_offset=chunk_offset,
                chunk_size=chunk_size,
                offset=offset,
            )
            for name, shape, dtype, chunk_offset, chunk_size, offset in header["tensors"]
        ]
        return _Bucket(
            metas=metas,
            message=message,
            digest=digest,
            is_good=digest == header["digest"],
            is_last=header["is_last"],
        )

    def broadcast(self, message: Any, group_name: str) -> None:
        """Receives a message."""
        operations.broadcast(message, _SENDER, group_name)


# ---------------------------------------------------------------------------------------------- messages


def _atom(index: int, message: Any) -> Atom:
    return f"bucket {index}", ((0,), (len(message),))


def _in_helper(call: Callable[..., _Result], *args: object) -> asyncio.Future[_Result]:
    """Makes a call that waits for other ranks in a helper thread; a coroutine can await it."""
    return asyncio.wrap_future(threads.call_in_helper(call, *args))


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


class _Sender:
    """The sender's side of one update: fills one bucket while the other is broadcast."""

    def __init__(self, group_name: str, buffers: Sequence[Any]) -> None:
        self._group_name = group_name
        self._buffers = buffers
        self._metas: list[Any] = []
        self._end = 0
        self._under_way: asyncio.Future[Any] | None = None
        self._began_s = time.perf_counter()
        self.digests: dict[Atom, bytes] = {}
        self.nbytes = 0

    def seconds(self) -> float:
        return time.perf_counter() - self._began_s

    async def add(self, meta: Any, chunk: Any) -> None:
        buffer = self._buffers[len(self.digests) % 2]
        if self._metas and _aligned(self._end) + meta.chunk_size > len(buffer):
            await self.flush(is_last=False)
            buffer = self._buffers[len(self.digests) % 2]
        meta.offset = _aligned(self._end)
        self._end = meta.offset + meta.chunk_size
        buffer[meta.offset : self._end].copy_(chunk)
        self._metas.append(meta)

    async def flush(self, *, is_last: bool) -> None:
        """Begins to broadcast the current bucket, when the one before has been."""
        message = self._buffers[len(self.digests) % 2][: self._end]
        digest = digests.digest(message.numpy())
        header = {
            "tensors": [
                [meta.name, list(meta.shape), str(meta.dtype), meta.chunk_offset, meta.chunk_size, meta.offset]
                for meta in self._metas
            ],
            "nbytes": self._end,
            "digest": digest,
            "is_last": is_last,
        }
        await self.wait()
        self._under_way = _in_helper(_send, self._group_name, header, message)
        self.digests[_atom(len(self.digests), message)] = digest
        self.nbytes += self._end
        self._metas, self._end = [], 0

    async def refuse(self, exc: Exception) -> None:
        """Tells the workers that no more buckets follow, and why."""
        await self.wait()
        header = {"refusal": f"{type(exc).__name__}: {exc}"}
        self._under_way = _in_helper(objects.broadcast_object, header, _SENDER, self._group_name)

    async def wait(self) -> None:
        """Waits for the broadcast under way."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            await under_way


def _send(group_name: str, header: dict[str, Any], message: Any) -> None:
    objects.broadcast_object(header, _SENDER, group_name)
    operations.broadcast(message, _SENDER, group_name)
