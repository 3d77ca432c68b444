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

from __future__ import annotations

from typing import Any as Any  # annotations of the errors are looked up among the names of this module
from typing import ClassVar as ClassVar

from raycollect.errors._base import RaycollectError as RaycollectError
from raycollect.errors._base import _rebuild as _rebuild
from raycollect.errors._base import anew as anew
from raycollect.errors._base import kept as kept
from raycollect.errors._channel import AuthenticationError as AuthenticationError
from raycollect.errors._channel import ChannelError as ChannelError
from raycollect.errors._channel import ConnectionLostError as ConnectionLostError
from raycollect.errors._channel import HolderUnreachableError as HolderUnreachableError
from raycollect.errors._channel import ProtocolError as ProtocolError
from raycollect.errors._faults import COULD_NOT_LOOK as COULD_NOT_LOOK
from raycollect.errors._faults import ActorGoneError as ActorGoneError
from raycollect.errors._faults import CollectiveTimeoutError as CollectiveTimeoutError
from raycollect.errors._faults import DispatchError as DispatchError
from raycollect.errors._faults import FaultError as FaultError
from raycollect.errors._faults import KernelError as KernelError
from raycollect.errors._faults import MethodError as MethodError
from raycollect.errors._faults import ParticipantDiedError as ParticipantDiedError
from raycollect.errors._faults import PlanAbortedError as PlanAbortedError
from raycollect.errors._faults import RankReport as RankReport
from raycollect.errors._forms import brief as brief
from raycollect.errors._forms import from_wire as from_wire
from raycollect.errors._forms import to_wire as to_wire
from raycollect.errors._groups import BackendNotInstalledError as BackendNotInstalledError
from raycollect.errors._groups import BackendUnavailableError as BackendUnavailableError
from raycollect.errors._groups import BoundToProcessError as BoundToProcessError
from raycollect.errors._groups import ControlError as ControlError
from raycollect.errors._groups import ControllerConflictError as ControllerConflictError
from raycollect.errors._groups import ForkedError as ForkedError
from raycollect.errors._groups import GroupBrokenError as GroupBrokenError
from raycollect.errors._groups import GroupError as GroupError
from raycollect.errors._groups import GroupExistsError as GroupExistsError
from raycollect.errors._groups import InvalidGroupError as InvalidGroupError
from raycollect.errors._groups import RayClientError as RayClientError
from raycollect.errors._groups import SelfDrivenError as SelfDrivenError
from raycollect.errors._groups import UnknownBackendError as UnknownBackendError
from raycollect.errors._groups import UnknownGroupError as UnknownGroupError
from raycollect.errors._others import ArenaFullError as ArenaFullError
from raycollect.errors._others import BatchError as BatchError
from raycollect.errors._others import CaptureBrokenError as CaptureBrokenError
from raycollect.errors._others import CaptureError as CaptureError
from raycollect.errors._others import HandleAttributeError as HandleAttributeError
from raycollect.errors._others import HandleError as HandleError
from raycollect.errors._others import InternalError as InternalError
from raycollect.errors._others import ProgressError as ProgressError
from raycollect.errors._others import ReentrantCallError as ReentrantCallError
from raycollect.errors._others import ResourceLimitError as ResourceLimitError
from raycollect.errors._others import RetryError as RetryError
from raycollect.errors._others import StoreFullError as StoreFullError
from raycollect.errors._others import TimelineError as TimelineError
from raycollect.errors._others import TracedValueError as TracedValueError
from raycollect.errors._others import UnrecordableCallError as UnrecordableCallError
from raycollect.errors._others import located as located
from raycollect.errors._refused import MOST_S as MOST_S
from raycollect.errors._refused import REFUSALS as REFUSALS
from raycollect.errors._refused import AliasError as AliasError
from raycollect.errors._refused import AllocationError as AllocationError
from raycollect.errors._refused import ConcurrentCallError as ConcurrentCallError
from raycollect.errors._refused import DuplicateActorError as DuplicateActorError
from raycollect.errors._refused import ForeignRefError as ForeignRefError
from raycollect.errors._refused import InvalidArgumentError as InvalidArgumentError
from raycollect.errors._refused import LayoutError as LayoutError
from raycollect.errors._refused import MismatchError as MismatchError
from raycollect.errors._refused import MissingMemberError as MissingMemberError
from raycollect.errors._refused import NotAMemberError as NotAMemberError
from raycollect.errors._refused import NotAParticipantError as NotAParticipantError
from raycollect.errors._refused import NotATensorError as NotATensorError
from raycollect.errors._refused import ProducerFailedError as ProducerFailedError
from raycollect.errors._refused import ReadOnlyError as ReadOnlyError
from raycollect.errors._refused import RefusedError as RefusedError
from raycollect.errors._refused import TensorDirtyError as TensorDirtyError
from raycollect.errors._refused import TensorFreedError as TensorFreedError
from raycollect.errors._refused import TensorLostError as TensorLostError
from raycollect.errors._refused import TensorReplacedError as TensorReplacedError
from raycollect.errors._refused import UnsupportedError as UnsupportedError
from raycollect.errors._refused import Violation as Violation
from raycollect.errors._refused import is_time_limit as is_time_limit
from raycollect.errors._refused import refusal as refusal
from raycollect.errors._refused import refuse as refuse
from raycollect.errors._refused import wrong_argument as wrong_argument
from raycollect.errors._refused import wrong_flags as wrong_flags
from raycollect.errors._refused import wrong_layout as wrong_layout
from raycollect.errors._refused import wrong_time_limit as wrong_time_limit
from raycollect.errors._refused import wrong_wait as wrong_wait
from raycollect.errors._weights import PublicationExistsError as PublicationExistsError
from raycollect.errors._weights import PublisherReplacedError as PublisherReplacedError
from raycollect.errors._weights import PushError as PushError
from raycollect.errors._weights import UnknownVersionError as UnknownVersionError
from raycollect.errors._weights import VersionDirtyError as VersionDirtyError
from raycollect.errors._weights import VersionError as VersionError
from raycollect.errors._weights import VersionNotPutError as VersionNotPutError
from raycollect.errors._weights import VersionNotWholeError as VersionNotWholeError
from raycollect.errors._weights import VersionTimeoutError as VersionTimeoutError

_own = {name: one for name, one in vars().items() if getattr(one, "__module__", "").startswith(f"{__name__}._")}
for _one in _own.values():
    _one.__module__ = __name__  # where users find it; tracebacks and pickles name no private module

__all__ = [name for name in _own if not name.startswith("_")]
del _own, _one
