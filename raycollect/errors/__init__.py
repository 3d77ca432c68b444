"""Every error that raycollect raises, by what is at fault.

::

    RaycollectError
    ├── RefusedError              nothing ran, every tensor is untouched, the group works on
    │   ├── ForeignRefError   NotAParticipantError   NotAMemberError   DuplicateActorError   MissingMemberError
    │   ├── NotATensorError   MismatchError   ReadOnlyError   AliasError   InvalidArgumentError
    │   ├── ConcurrentCallError   UnsupportedError   TensorFreedError   TensorLostError   TensorDirtyError
    │   └── LayoutError   ProducerFailedError   AllocationError
    ├── GroupError                the group, not an operand
    │   ├── UnknownGroupError   GroupExistsError   InvalidGroupError   GroupBrokenError
    │   └── UnknownBackendError   BackendNotInstalledError   BackendUnavailableError
    ├── ControlError              who may drive whom
    │   └── ControllerConflictError   SelfDrivenError   RayClientError   ForkedError
    ├── FaultError                something failed while a plan was in flight
    │   ├── ParticipantDiedError   ActorGoneError   CollectiveTimeoutError
    │   ├── PlanAbortedError   DispatchError   KernelError
    │   └── MethodError               a method that a captured step calls raised
    ├── ChannelError              the control plane
    │   ├── ProtocolError   AuthenticationError   ConnectionLostError
    │   └── HolderUnreachableError    what holds a tensor can't be reached; the tensor is as it was
    ├── HandleError               a handle was used as the value that it stands for
    │   └── HandleAttributeError      it was asked for an attribute that it does not have
    ├── BatchError                a batch, or what one of its calls gave, was used where it can't be
    ├── CaptureError              a captured step was used where it can't be
    │   └── CaptureBrokenError        one of its runs failed: there will be no others
    ├── RetryError                a collective can't be run again as it was
    ├── TimelineError             a timeline was asked for where there can't be one
    ├── ProgressError             a progress bar was asked for, and tqdm is not installed
    ├── StoreFullError            the object store of a participant can't take more
    ├── ArenaFullError            the shared memory for tensors can't take more
    └── InternalError             our bug: please report it

Errors are values: their fields are public, the message is built from the fields, they survive pickling and they
cross the channel as plain msgpack (`to_wire`, `from_wire`).
"""

from __future__ import annotations

from typing import ClassVar as ClassVar  # annotations of the errors are looked up among the names of this module

from raycollect.errors._base import RaycollectError, anew, kept
from raycollect.errors._base import _rebuild as _rebuild
from raycollect.errors._channel import (
    AuthenticationError,
    ChannelError,
    ConnectionLostError,
    HolderUnreachableError,
    ProtocolError,
)
from raycollect.errors._faults import COULD_NOT_LOOK as COULD_NOT_LOOK
from raycollect.errors._faults import (
    ActorGoneError,
    CollectiveTimeoutError,
    DispatchError,
    FaultError,
    KernelError,
    MethodError,
    ParticipantDiedError,
    PlanAbortedError,
    RankReport,
)
from raycollect.errors._forms import brief, from_wire, to_wire
from raycollect.errors._groups import (
    BackendNotInstalledError,
    BackendUnavailableError,
    ControlError,
    ControllerConflictError,
    ForkedError,
    GroupBrokenError,
    GroupError,
    GroupExistsError,
    InvalidGroupError,
    RayClientError,
    SelfDrivenError,
    UnknownBackendError,
    UnknownGroupError,
)
from raycollect.errors._others import (
    ArenaFullError,
    BatchError,
    CaptureBrokenError,
    CaptureError,
    HandleAttributeError,
    HandleError,
    InternalError,
    ProgressError,
    RetryError,
    StoreFullError,
    TimelineError,
)
from raycollect.errors._refused import REFUSALS as REFUSALS
from raycollect.errors._refused import (
    AliasError,
    AllocationError,
    ConcurrentCallError,
    DuplicateActorError,
    ForeignRefError,
    InvalidArgumentError,
    LayoutError,
    MismatchError,
    MissingMemberError,
    NotAMemberError,
    NotAParticipantError,
    NotATensorError,
    ProducerFailedError,
    ReadOnlyError,
    RefusedError,
    TensorDirtyError,
    TensorFreedError,
    TensorLostError,
    UnsupportedError,
    Violation,
    refusal,
    wrong_argument,
)

__all__ = [
    "ActorGoneError",
    "AliasError",
    "AllocationError",
    "ArenaFullError",
    "AuthenticationError",
    "BackendNotInstalledError",
    "BackendUnavailableError",
    "BatchError",
    "RetryError",
    "CaptureBrokenError",
    "CaptureError",
    "ChannelError",
    "CollectiveTimeoutError",
    "ConcurrentCallError",
    "ConnectionLostError",
    "HolderUnreachableError",
    "ControlError",
    "ControllerConflictError",
    "DispatchError",
    "DuplicateActorError",
    "FaultError",
    "ForkedError",
    "ForeignRefError",
    "GroupBrokenError",
    "GroupError",
    "GroupExistsError",
    "HandleAttributeError",
    "HandleError",
    "InternalError",
    "InvalidArgumentError",
    "InvalidGroupError",
    "KernelError",
    "LayoutError",
    "MethodError",
    "MismatchError",
    "MissingMemberError",
    "NotAMemberError",
    "NotAParticipantError",
    "NotATensorError",
    "ParticipantDiedError",
    "PlanAbortedError",
    "ProducerFailedError",
    "ProgressError",
    "ProtocolError",
    "RankReport",
    "RayClientError",
    "RaycollectError",
    "ReadOnlyError",
    "RefusedError",
    "SelfDrivenError",
    "StoreFullError",
    "TensorDirtyError",
    "TensorFreedError",
    "TensorLostError",
    "TimelineError",
    "UnknownBackendError",
    "UnknownGroupError",
    "UnsupportedError",
    "Violation",
    "anew",
    "brief",
    "from_wire",
    "kept",
    "refusal",
    "to_wire",
    "wrong_argument",
]

for _name in (*__all__, "_rebuild"):
    globals()[_name].__module__ = __name__  # where users find it; tracebacks and pickles name no private module
del _name
