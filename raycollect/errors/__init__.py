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

# ruff: noqa: F403, F405 - the private modules hold the classes by kind of fault; all of their own names are public

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any as Any  # annotations of the errors are looked up among the names of this module
from typing import ClassVar as ClassVar

import msgspec

from raycollect.errors._base import *
from raycollect.errors._faults import *
from raycollect.errors._others import *
from raycollect.errors._refused import *


def brief(error: RaycollectError) -> str:
    """Returns an error in one line: type, message and location, without the traceback and the remedy."""
    if isinstance(error, RefusedError) and error.violations:
        more = len(error.violations) - 1
        text = f"{error.op} was refused: {error.violations[0]}" + (f", and {more} more" if more else "")
    else:
        text = str(error)
    return f"{type(error).__name__}: {text.partition(chr(10))[0]}"


def to_wire(error: RaycollectError) -> dict[str, Any]:
    """Turns an error into plain values for msgpack; the inverse of `from_wire`.

    An error of another package's subclass is sent as its nearest base class in this package.
    """
    cls = next(one for one in type(error).__mro__ if _ERRORS.get(one.__name__) is one)
    if cls is RaycollectError and cls is not type(error):  # which would lose the text
        cls, error = KernelError, KernelError(detail=f"{type(error).__name__}: {error}")
    values = {one.name: getattr(error, one.name) for one in fields(cls)}
    return {"type": cls.__name__, "fields": msgspec.to_builtins(values, builtin_types=(bytes,))}


def from_wire(value: dict[str, Any]) -> RaycollectError:
    """Builds the error that `to_wire` described.

    Raises:
        ProtocolError: The value describes no error of this package.
    """
    try:
        if (cls := _ERRORS.get(value["type"])) is None:
            raise ProtocolError(detail=f"unknown error type {value['type']!r}")
        error = msgspec.convert(value["fields"], cls)
        _refuse_unknown(error, value["fields"])
        return error
    except (msgspec.ValidationError, KeyError, TypeError, ValueError, AttributeError) as exc:
        raise ProtocolError(detail=f"malformed error on the wire: {exc}") from exc


def _refuse_unknown(value: Any, told: dict[str, Any]) -> None:
    if unknown := told.keys() - {one.name for one in fields(value)}:  # which msgspec ignores
        raise ProtocolError(detail=f"a {type(value).__name__} has no {', '.join(map(str, unknown))[:300]}")
    for name, items in told.items():
        if isinstance(items, (list, tuple)):
            for part, item in zip(getattr(value, name), items, strict=True):
                if is_dataclass(part):
                    _refuse_unknown(part, item)


_own = {
    name: one
    for name, one in vars().items()
    if not name.startswith("_") and getattr(one, "__module__", "").partition("._")[0] == __name__
}
for _one in _own.values():
    _one.__module__ = __name__  # where users find it; tracebacks and pickles name no private module

_ERRORS: dict[str, type[RaycollectError]] = {
    name: one
    for name, one in _own.items()
    if isinstance(one, type) and issubclass(one, RaycollectError) and one is not PushError
}
"""The classes by their names on the wire. A PushError is sent as a VersionError, as no message carries its receipts."""

__all__ = list(_own)
del _own, _one
