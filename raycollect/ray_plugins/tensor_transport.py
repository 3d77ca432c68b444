"""A one-sided transport of Ray Direct Transport: the receiver reads tensors where the sender's store has them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from ray.experimental.rdt.tensor_transport_manager import (
    CommunicatorMetadata,
    TensorTransportManager,
    TensorTransportMetadata,
)

from raycollect.backends import arrays
from raycollect.core.model import KEY_NBYTES, Address, Key
from raycollect.errors import Violation, refusal
from raycollect.member.participant import this_participant
from raycollect.pos import Container, fetch
from raycollect.pos.container import obstacle
from raycollect.ray_plugins import NAME

TIMEOUT_S = 60.0
"""How long a receiver waits for the sender, in seconds."""


@dataclass
class StoredTensors(TensorTransportMetadata):
    """Where the tensors of a ref are stored.

    Attributes:
        address: The address of the process that holds them.
        key: Their key in its store.
        actor: Its name in messages.
        incarnation: Ray's id of its process.
    """

    address: Address | None = None
    key: Key | None = None
    actor: str = ""
    incarnation: str = ""


class TensorTransport(TensorTransportManager):
    """Ray makes one per process, and calls it there."""

    def tensor_transport_backend(self) -> str:
        """The name in Ray's registry."""
        return NAME

    @staticmethod
    def is_one_sided() -> bool:
        """True: the sender takes no part in a transfer."""
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        """True, so that Ray kills no actor.

        A receiver whose sender has died raises an error at once; one whose sender does not answer, after `TIMEOUT_S`.
        """
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        """True: Ray registers the transport on each actor."""
        return True

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[Any]) -> StoredTensors:
        """Stores tensors that a method has returned. They are not copied.

        A retried method whose first answer was lost has the same `obj_id`, and Ray keeps its first tensors.
        """
        if not rdt_object:
            return StoredTensors(tensor_meta=[])
        here, key = this_participant(), Key(hashlib.blake2b(obj_id.encode(), digest_size=KEY_NBYTES).digest())
        container = Container.of(list(rdt_object), arrays.is_tensor)
        if container is None:  # sparse, quantized, or a view that is still to be conjugated
            actual = obstacle(rdt_object, arrays.is_tensor, arrays.describe_value)
            raise refusal("return", "", (Violation(kind="not_tensor", field="tensor", found=actual, actor=here.actor),))
        if rdt_object[0].device.type == "cpu":  # Ray refuses others after this call
            here.store.put(key, container)
        return StoredTensors(
            tensor_meta=[(tensor.shape, tensor.dtype) for tensor in rdt_object],
            tensor_device=rdt_object[0].device.type,
            address=here.address,
            key=key,
            actor=here.actor,
            incarnation=here.identity.incarnation,
        )

    def get_communicator_metadata(self, src_actor: Any, dst_actor: Any, backend: str | None = None) -> Any:
        """Nothing: actors need no group."""
        return CommunicatorMetadata()

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: Any,
        communicator_metadata: Any,
        target_buffers: list[Any] | None = None,
    ) -> list[Any]:
        """Copies tensors from the process that holds them.

        Raises:
            TensorLostError: That process has ended.
            HolderUnreachableError: It has not answered in time.
        """
        at: StoredTensors = tensor_transport_metadata
        if at.address is None or at.key is None:
            return []
        held: list[Any] = fetch.fetch(
            at.address, at.key, actor=at.actor, incarnation=at.incarnation, timeout_s=TIMEOUT_S
        )
        if target_buffers is None:
            return held
        for target, tensor in zip(target_buffers, held, strict=True):
            target.copy_(tensor)
        return target_buffers

    def send_multiple_tensors(
        self, tensors: list[Any], tensor_transport_metadata: Any, communicator_metadata: Any
    ) -> None:
        """Never called, as the transport is one-sided."""
        raise NotImplementedError

    def garbage_collect(self, obj_id: str, tensor_transport_meta: Any, tensors: list[Any]) -> None:
        """Frees the tensors of a ref that has gone out of scope."""
        if tensor_transport_meta.key is not None:
            this_participant().store.free([tensor_transport_meta.key])

    def abort_transport(self, obj_id: str, communicator_metadata: Any) -> None:
        """Nothing has to be undone."""
