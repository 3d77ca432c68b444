"""Every error that raycollect raises, by what is at fault.

::

    RaycollectError
    ├── RefusedError              nothing ran, every tensor is untouched, the group works on
    │   ├── ForeignRefError   NotAParticipantError   NotAMemberError   DuplicateActorError   MissingMemberError
    │   ├── NotATensorError   MismatchError   ReadOnlyError   AliasError   InvalidArgumentError
    │   ├── ConcurrentCallError   UnsupportedError   TensorFreedError   TensorLostError   TensorDirtyError
    │   └── TensorReplacedError   ProducerFailedError   AllocationError   LayoutError
    ├── GroupError                the group, not an operand
    │   ├── UnknownGroupError   GroupExistsError   InvalidGroupError   GroupBrokenError
    │   └── UnknownBackendError   BackendNotInstalledError   BackendUnavailableError
    ├── ControlError              who may drive whom
    │   └── ControllerConflictError   SelfDrivenError   RayClientError   ForkedError   BoundToProcessError
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
    │   ├── CaptureBrokenError        one of its runs failed, or its group has changed: capture it again
    │   └── TracedValueError   UnrecordableCallError       a step's function can't be traced
    ├── ReentrantCallError        a finalizer, or a signal handler, made a call in the middle of another one
    ├── RetryError                a collective can't be run again as it was
    ├── TimelineError             a timeline was asked for where there can't be one
    ├── ProgressError             a progress bar was asked for, and tqdm is not installed
    ├── StoreFullError            the object store of a participant can't take more
    ├── ArenaFullError            the shared memory for tensors can't take more
    ├── VersionError              a version of weights can't be put, or can't be had
    │   ├── UnknownVersionError   PublicationExistsError   PublisherReplacedError   VersionNotPutError
    │   └── VersionNotWholeError   VersionDirtyError   VersionTimeoutError   PushError
    ├── ResourceLimitError        a process has no more file descriptors, or threads
    └── InternalError             our bug: please report it

Errors are values: their fields are public, the message is built from the fields, they survive pickling and they
cross the channel as plain msgpack (`to_wire`, `from_wire`).
"""

# ruff: noqa: F403 - each file has what one kind of fault needs, and all of it is public

from __future__ import annotations

from typing import Any as Any  # annotations of the errors are looked up among the names of this module
from typing import ClassVar as ClassVar

from raycollect.errors._base import *
from raycollect.errors._base import _rebuild as _rebuild
from raycollect.errors._faults import *
from raycollect.errors._forms import *
from raycollect.errors._groups import *
from raycollect.errors._others import *
from raycollect.errors._refused import *
from raycollect.errors._weights import *

_own = {name: one for name, one in vars().items() if getattr(one, "__module__", "").startswith(f"{__name__}._")}
for _one in _own.values():
    _one.__module__ = __name__  # where users find it; tracebacks and pickles name no private module

__all__ = [name for name in _own if not name.startswith("_")]
del _own, _one
