"""raycollect for vLLM: a backend of vLLM's weight transfer interface, with digests of the received bytes.

::

    import raycollect.vllm

    raycollect.vllm.register()  # in the trainer; vLLM calls it in its workers, as a plugin

The trainer's rank 0 and all workers form a group themselves. An update is sent in buckets through host memory, each
with its digest, and stays separate from the model until all workers have verified all of it. Then all of them load it,
or none does. The interface is that of vLLM 0.32 and 0.33, whose sources differ; docs/weight-sync.md says what is
tested.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from importlib import import_module
from math import prod
from typing import Any, ClassVar

import numpy as np

from raycollect.core import threads
from raycollect.core.model import ReduceOp, TensorInfo
from raycollect.errors import UnknownGroupError, VersionNotWholeError
from raycollect.member import init, operations
from raycollect.pos.tensors import allocate
from raycollect.weights import digests

__all__ = ["Engine", "InitInfo", "TrainerEngine", "TrainerInitInfo", "UpdateInfo", "register"]

_log = logging.getLogger("raycollect")

torch: Any = import_module("torch")
base: Any = import_module("vllm.distributed.weight_transfer.base")

BACKEND = "raycollect"
_ALIGNMENT = 16  # of a tensor in its bucket; and the length of a digest
_TRAINER = 0
_GRACE_S = 10.0  # for workers to end an update that has failed at the trainer


def register() -> None:
    """Registers this backend with vLLM, under the name ``"raycollect"``; a second call does nothing."""
    factory: Any = import_module("vllm.distributed.weight_transfer.factory")
    for registry, cls in (
        (factory.WeightTransferEngineFactory, Engine),
        (factory.WeightTransferTrainerFactory, TrainerEngine),
    ):
        if BACKEND not in registry._registry:
            registry.register_engine(BACKEND, cls)


# ---------------------------------------------------------------------------------------------- what is agreed on


@dataclass(kw_only=True)
class InitInfo(base.WeightTransferInitInfo):  # type: ignore[misc]
    """The options of the group, on a worker.

    Attributes:
        world_size: The number of workers, plus one for the trainer's rank 0.
        rank_offset: The rank of the first worker.
        group_name: The name of the group.
        transport: raycollect's backend: ``"shm"``, ``"tcp"`` ...; ``"auto"`` picks one of these two, also on GPUs.
        rendezvous: How processes outside one Ray cluster find each other: ``"file:///path"``.
        bucket_nbytes: The most bytes of one message, which has at least one tensor.
        timeout_s: How long ranks wait for each other, in seconds.
    """

    world_size: int
    rank_offset: int = 1
    group_name: str = "vllm"
    transport: str = "auto"
    rendezvous: str | None = None
    bucket_nbytes: int = 64 << 20
    timeout_s: float = 300.0


@dataclass(kw_only=True)
class TrainerInitInfo(base.TrainerInitInfo):  # type: ignore[misc]
    """The options of the group, on a rank of the trainer; see `InitInfo`."""

    backend: ClassVar[str] = BACKEND

    world_size: int
    group_name: str = "vllm"
    transport: str = "auto"
    rendezvous: str | None = None
    bucket_nbytes: int = 64 << 20
    timeout_s: float = 300.0


@dataclass
class UpdateInfo(base.WeightTransferUpdateInfo):  # type: ignore[misc]
    """The description of an update.

    Attributes:
        version: Its number.
        names: The names of the full tensors, in the order in which they are sent.
        dtype_names: torch's names of their dtypes.
        shapes: Their shapes.
    """

    version: int
    names: list[str] = field(default_factory=list)
    dtype_names: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.dtype_names) == len(self.shapes):
            counts = f"{len(self.names)} names, {len(self.dtype_names)} dtypes, {len(self.shapes)} shapes"
            raise ValueError(f"an update of {counts}: expected as many of each")


# ---------------------------------------------------------------------------------------------- both sides


_Part = tuple[str, Any, list[int], int, int]
"""A tensor in a message: its name, dtype, shape, first byte, number of bytes."""


class _Group:
    """A process's end of the group of the trainer and the workers."""

    def __init__(self, info: Any, rank: int) -> None:
        rendezvous = info.rendezvous or init.JOB  # vLLM creates its workers, and the user the trainer
        init.init_host_group(info.world_size, rank, info.transport, info.group_name, info.timeout_s, rendezvous)
        self.rank = rank
        self._name = info.group_name
        self._bucket_nbytes = info.bucket_nbytes

    def buckets(self, info: UpdateInfo) -> Iterator[list[_Part]]:
        """Yields the tensors of each message."""
        bucket: list[_Part] = []
        at = 0
        for name, dtype_name, shape in zip(info.names, info.dtype_names, info.shapes, strict=True):
            dtype = getattr(torch, dtype_name)
            nbytes = prod(shape) * dtype.itemsize
            if bucket and at + nbytes > self._bucket_nbytes:
                yield bucket
                bucket, at = [], 0
            bucket.append((name, dtype, shape, at, nbytes))
            at += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        if bucket:
            yield bucket

    def broadcast(self, buffer: Any) -> None:
        operations.broadcast(buffer, _TRAINER, self._name)

    def all_agree(self, is_good: bool) -> bool:
        """Returns whether all ranks vote for it; waits for the votes of all ranks."""
        vote = np.array([is_good], np.uint8)
        operations.allreduce(vote, self._name, ReduceOp.MIN)
        return bool(vote[0])

    def leave(self) -> None:
        init.destroy_collective_group(self._name)


def _nbytes(bucket: Sequence[_Part]) -> int:
    """Returns the length of a bucket's message: its tensors, followed by its digest."""
    _, _, _, at, nbytes = bucket[-1]
    return -(-(at + nbytes) // _ALIGNMENT) * _ALIGNMENT + _ALIGNMENT


def _digest(message: Any) -> Any:
    digest = digests.digest(message[:-_ALIGNMENT].numpy())
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)


def _views(message: Any, bucket: Sequence[_Part]) -> Iterator[tuple[str, Any]]:
    for name, dtype, shape, at, nbytes in bucket:
        yield name, message[at : at + nbytes].view(dtype).view(shape)


def _not_whole(group: _Group, version: int, detail: str) -> VersionNotWholeError:
    return VersionNotWholeError(name=group._name, version=str(version), rank=group.rank, detail=detail)


# ---------------------------------------------------------------------------------------------- a worker


def _logged(call: Callable[..., None], *args: Any) -> bool:
    """Returns whether a call has succeeded; logs its error."""
    try:
        call(*args)
    except Exception:  # noqa: BLE001 - any exception is logged
        _log.exception("an update of vLLM's weights failed; the trainer raises an error, too")
        return False
    return True


class Engine(base.WeightTransferEngine):  # type: ignore[misc]
    """A worker's side, which vLLM creates and calls.

    What fails here is logged, and raised in the trainer, which hears of it in the group. When several workers raise,
    vLLM's multiprocess executor reads the error of the first, and takes those of the others for the results of later
    calls.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._group: _Group | None = None
        self._is_updating = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Leaves the last group, and joins the new one."""
        self.shutdown()
        _logged(self._join, init_info)

    def _join(self, init_info: InitInfo) -> None:
        parallel = self.parallel_config
        first = parallel.data_parallel_index * parallel.world_size + init_info.rank_offset
        self._group = _Group(init_info, first + parallel.rank)
        self._group.all_agree(not self._is_updating)  # the last trainer may have died in an update

    def start_weight_update(self) -> None:
        """Takes nothing from the model: vLLM would, and no weights are verified yet."""
        self._is_updating = True

    def finish_weight_update(self) -> None:
        """Ends the update, which `receive_weights` has loaded or discarded."""
        self._is_updating = False

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receives an update, verifies it, and loads it when all workers have verified it.

        Otherwise the model goes on with its weights, and the trainer's `send_weights` raises the error.
        """
        _logged(self._update, update_info)

    def _update(self, update_info: UpdateInfo) -> None:
        group = self._group
        if group is None:
            raise UnknownGroupError(
                group_name=InitInfo.group_name, detail="no group: init_transfer_engine has not been called"
            )
        group.all_agree(_logged(self._load, self._received(group, update_info)))

    def _load(self, weights: Sequence[tuple[str, Any]]) -> None:
        reload = import_module("vllm.model_executor.model_loader.reload")
        reload.initialize_layerwise_reload(self.model)
        try:
            self.model.load_weights(iter(weights))
        finally:  # vLLM restores the old tensors of layers that were not loaded
            reload.finalize_layerwise_reload(self.model, self.model_config)

    def _received(self, group: _Group, update_info: UpdateInfo) -> list[tuple[str, Any]]:
        """Returns the tensors of an update after all workers have verified it."""
        weights: list[tuple[str, Any]] = []
        wrong: list[str] = []
        for bucket in group.buckets(update_info):
            message = torch.empty(_nbytes(bucket), dtype=torch.uint8)
            group.broadcast(message)
            if not torch.equal(_digest(message), message[-_ALIGNMENT:]):
                wrong.append(bucket[0][0])
            weights += _views(message, bucket)
        if not group.all_agree(not wrong):
            others = "another worker has other bits, or the trainer has refused its source"
            detail = f"other bits than were sent, from {wrong[0]!r} on" if wrong else others
            raise _not_whole(group, update_info.version, detail)
        return weights

    def shutdown(self) -> None:
        """Leaves the group."""
        if self._group is not None:
            self._group.leave()
            self._group = None


# ---------------------------------------------------------------------------------------------- the trainer


class _Source:
    """A `WeightSource`, of vLLM 0.33 or of 0.32, which has `metadata()`, `__iter__` and `held_names()`."""

    def __init__(self, given: Any) -> None:
        self._given = given
        self._is_older = callable(given.metadata)
        if not self._is_older and not given.implements_iter_full():
            raise ValueError("the backend raycollect needs a WeightSource that implements iter_full()")

    def metadata(self) -> Sequence[Any]:
        metadata: Sequence[Any] = self._given.metadata() if self._is_older else self._given.metadata
        return metadata

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self._given if self._is_older else self._given.iter_full())

    def missing(self, rank: int) -> list[str]:
        """Returns the names that a rank does not have."""
        held = self._given.held_names() if self._is_older else self._given.owned_names(rank)
        return [] if held is None else [meta.name for meta in self.metadata() if meta.name not in held]


def _fill(message: Any, bucket: Sequence[_Part], given: Iterator[tuple[str, Any]]) -> None:
    """Copies the source's next tensors to a message, and adds the digest."""
    nothing: tuple[str, Any] = ("", torch.empty(0))
    for name, into in _views(message, bucket):
        source_name, tensor = next(given, nothing)
        if source_name != name or tensor.dtype != into.dtype or tensor.shape != into.shape:
            what = f"{source_name!r}, {tensor.dtype} {list(tensor.shape)}" if source_name else "no more"
            raise ValueError(f"the source yields {what}, not {name!r}, {into.dtype} {list(into.shape)}")
        into.copy_(tensor.detach())
    message[-_ALIGNMENT:] = _digest(message)


class TrainerEngine(base.TrainerWeightTransferEngine):  # type: ignore[misc]
    """The trainer's side, on each of its ranks. Rank 0 sends; the others take part in gathers."""

    init_info_cls = TrainerInitInfo

    def __init__(
        self, *, client: Any, source: Any = None, is_sender: bool = True, rank: int = 0, group: _Group | None = None
    ) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
        self.rank = rank  # vLLM 0.32 does not know it
        self._group = group
        self._version = 0
        self._memory: Any = None  # for the largest message: shared, so that workers of this host read it in place

    @classmethod
    def trainer_init(cls, init_info: TrainerInitInfo, *, client: Any, source: Any = None) -> TrainerEngine:
        """Forms the group with the workers; returns when all have joined.

        Raises:
            ValueError: No source, or rank 0 does not have all of its tensors.
            RaycollectError: The workers have not joined, or the group can't be formed.
        """
        if source is None:
            raise ValueError("the backend raycollect needs a WeightSource")
        source = _Source(source)
        missing = source.missing(_TRAINER) if init_info.is_sender else []
        if missing:
            raise ValueError(f"rank 0 sends all tensors, and does not have {missing[0]!r}")
        group = None
        if init_info.is_sender:
            shared = {option.name for option in fields(InitInfo)} & {option.name for option in fields(init_info)}
            worker_info = asdict(InitInfo(**{name: getattr(init_info, name) for name in shared}))
            try:
                with threads.beside("raycollect-vllm", client.init_weight_transfer_engine, worker_info):
                    group = _Group(init_info, _TRAINER)
                    is_updating = not group.all_agree(True)
                if is_updating:
                    client.finish_weight_update()
            except BaseException:
                if group is not None:
                    group.leave()  # frees the name for another attempt
                raise
        return cls(client=client, source=source, is_sender=init_info.is_sender, rank=init_info.rank, group=group)

    def send_weights(self) -> None:
        """Sends the source's current tensors as the next version; returns when all workers have loaded it.

        Raises:
            VersionNotWholeError: A worker has other bits than were sent: no worker has loaded any weights. Or vLLM
                could not load them, and its log says why: layers may differ in version until the next update.
            RaycollectError: A worker has died or is late. After `shutdown`, `trainer_init` forms a new group.
            ValueError: The source's tensors differ from its metadata.
            UnknownGroupError: Rank 0 has left the group.
        """
        if not self.is_sender:
            for _ in self.source:
                pass
            return
        given = iter(self.source)
        try:
            self._update(given)
        except Exception:
            with suppress(Exception):  # the cause matters more
                for _ in given:  # the trainer's other ranks gather all tensors, with this one
                    pass
            raise

    def _update(self, given: Iterator[tuple[str, Any]]) -> None:
        if self._group is None:
            raise UnknownGroupError(group_name=InitInfo.group_name, detail="no group: shutdown has been called")
        meta = self.source.metadata()
        info = UpdateInfo(
            version=self._version + 1,
            names=[tensor.name for tensor in meta],
            dtype_names=[str(tensor.dtype).removeprefix("torch.") for tensor in meta],
            shapes=[list(tensor.shape) for tensor in meta],
        )
        updating: Future[object] | None = None
        try:
            self.client.start_weight_update()
            with threads.beside("raycollect-vllm", self.client.update_weights, asdict(info)) as updating:
                self._send(self._group, info, given)
        except BaseException:
            with suppress(Exception):  # the cause matters more
                # vLLM's calls can't run beside each other.
                if updating is None or threads.has_ended(updating, _GRACE_S):
                    self.client.finish_weight_update()
            raise
        self.client.finish_weight_update(str(info.version))
        self._version = info.version

    def _send(self, group: _Group, info: UpdateInfo, given: Iterator[tuple[str, Any]]) -> None:
        refusal: Exception | None = None
        for bucket in group.buckets(info):
            if self._memory is None or len(self._memory) < _nbytes(bucket):
                memory = allocate(TensorInfo(shape=(_nbytes(bucket),), dtype="uint8", itemsize=1, library="torch"))
                self._memory = memory.zero_()
            message = self._memory[: _nbytes(bucket)]
            if refusal is None:
                try:
                    _fill(message, bucket, given)
                except Exception as exc:  # noqa: BLE001 - the user's; the workers still wait for all messages
                    refusal = exc
            group.broadcast(message)
        if refusal is None:
            try:
                for more, _ in given:  # exhausts the source, as the other ranks of the trainer do
                    raise ValueError(f"the source also yields {more!r}, which is not in its metadata")
            except Exception as exc:  # noqa: BLE001 - as above
                refusal = exc
        is_good = group.all_agree(refusal is None)
        try:
            if refusal is not None:
                raise refusal
        finally:
            del refusal  # its traceback holds this frame
        if not is_good:
            raise _not_whole(group, info.version, "a worker has other bits than were sent")
        if not group.all_agree(True):
            raise _not_whole(group, info.version, "vLLM could not load it; the log of a worker says why")

    def shutdown(self) -> None:
        """Leaves the group."""
        if self._group is not None:
            self._group.leave()
            self._group = None
            self._memory = None
