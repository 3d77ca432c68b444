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
    ├── ControlError              a process may not drive these actors
    │   └── ControllerConflictError   SelfDrivenError   RayClientError   ForkedError   BoundToProcessError
    ├── FaultError                something failed while a plan was in flight
    │   ├── ParticipantDiedError   ActorGoneError   CollectiveTimeoutError
    │   ├── PlanAbortedError   DispatchError   KernelError
    │   └── MethodError               a method that a captured step calls raised
    ├── ChannelError              the control plane
    │   ├── ProtocolError   AuthenticationError   ConnectionLostError
    │   └── HolderUnreachableError    the holder of a tensor can't be reached; the tensor is unchanged
    ├── HandleError               a handle was used as the value that it stands for
    │   └── HandleAttributeError      the handle has no such attribute
    ├── BatchError                a batch, or a result of one of its calls, was used where it can't be
    ├── CaptureError              a captured step was used where it can't be
    │   ├── CaptureBrokenError        one of its runs failed, or its group has changed: capture it again
    │   └── TracedValueError   UnrecordableCallError       a step's function can't be traced
    ├── ReentrantCallError        a finalizer, or a signal handler, made a call during another one
    ├── RetryError                a collective can't be run again as it was
    ├── TimelineError             a timeline can't be recorded or stopped here
    ├── ProgressError             a progress bar can't be shown, as without tqdm
    ├── StoreFullError            the object store of a participant can't take more
    ├── ArenaFullError            the shared memory for tensors can't take more
    ├── VersionError              a version of weights can't be put, or can't be read
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
    cls = next(base for base in type(error).__mro__ if _ERRORS.get(base.__name__) is base)
    if cls is RaycollectError and cls is not type(error):  # the base class would lose the text
        cls, error = KernelError, KernelError(detail=f"{type(error).__name__}: {error}")
    values = {field.name: getattr(error, field.name) for field in fields(cls)}
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


def _refuse_unknown(value: Any, received: dict[str, Any]) -> None:
    if unknown := received.keys() - {field.name for field in fields(value)}:  # msgspec ignores them
        raise ProtocolError(detail=f"a {type(value).__name__} has no {', '.join(map(str, unknown))[:300]}")
    for name, items in received.items():
        if isinstance(items, (list, tuple)):
            for part, item in zip(getattr(value, name), items, strict=True):
                if is_dataclass(part):
                    _refuse_unknown(part, item)


_own = {
    name: value
    for name, value in vars().items()
    if not name.startswith("_") and getattr(value, "__module__", "").partition("._")[0] == __name__
}
for _value in _own.values():
    _value.__module__ = __name__  # where users find it; tracebacks and pickles name no private module

_ERRORS: dict[str, type[RaycollectError]] = {
    name: value
    for name, value in _own.items()
    if isinstance(value, type) and issubclass(value, RaycollectError) and value is not PushError
}
"""The classes by their names on the wire. A PushError is sent as a VersionError, as no message carries its receipts."""

__all__ = list(_own)
del _own, _value
