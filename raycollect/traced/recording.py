"""Records the calls of a step's function while it is traced, with arguments and results of any structure."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from typing import Any, ClassVar

import numpy as np
import ray

from raycollect.backends import arrays
from raycollect.captured.install import Installed
from raycollect.captured.recording import Recording
from raycollect.captured.step import Capture, ready
from raycollect.captured.step_values import MISSING, Fixed, Parameters, structured
from raycollect.core.placeholder import Placeholder
from raycollect.driver import values
from raycollect.driver.batch import Batch
from raycollect.driver.controller import Controller
from raycollect.driver.pending import Argument, Pending
from raycollect.driver.requests import Ref
from raycollect.driver.step_runs import RunTracker
from raycollect.errors import UnknownGroupError, Violation, wrong_argument
from raycollect.traced.kept import KeepWrapper
from raycollect.traced.signature import SCALARS, is_plain_dtype

_STANDS_FOR = (Placeholder, ray.ObjectRef)


class _Leaves(dict[str, Any]):
    """The values of a run by name; composite values are made on access."""

    def __init__(self, leaves: Mapping[str, Any], composites: Mapping[str, Argument]) -> None:
        super().__init__(leaves)
        self._composites = composites

    def __missing__(self, name: str) -> Any:
        return self._filled(self._composites[name].made_of)

    def _filled(self, shape: Any) -> Any:
        if isinstance(shape, Argument):
            return self[shape.name]
        if type(shape) is dict:
            return {name: self._filled(item) for name, item in shape.items()}
        return type(shape)([self._filled(item) for item in shape]) if type(shape) in (list, tuple) else shape


class TracedParameters(Parameters):
    """The arguments of a traced step: the leaves of a call, and composites of them for methods."""

    def __init__(self) -> None:
        super().__init__()
        self._composites: dict[str, Argument] = {}

    def leaf(self, name: str, parameter: str, value: Any) -> Argument:
        """Returns the placeholder of a leaf for tracing."""
        argument = Argument(self._mark, name, default=MISSING, parameter=parameter, kind=type(value))
        self._declared[name] = argument
        return argument

    def composite(self, shape: Any) -> Argument:
        """Returns an argument of one method that consists of leaves, and is shared with no other call."""
        names = ", ".join(leaf.name for leaf in _leaves_of(shape) if isinstance(leaf, Argument))
        name = f"{names} ({len(self._composites)})"
        now = structured(
            shape, lambda item, _: item if isinstance(item, Argument) else deepcopy(item)
        )  # the structure may change later
        argument = self._composites[name] = Argument(self._mark, name, default=MISSING, made_of=now)
        return argument

    def pack(self, given: Mapping[str, Any]) -> tuple[bytes, ...]:
        """Returns the packed arguments of a run, by participant; `given` has all leaves."""
        if not given and not self._composites:
            return self._blank
        return self._packed(_Leaves(given, self._composites) if self._composites else given)


class TracedRecording(Recording):
    """Records the calls of a function."""

    is_traced = True
    _ASYNC_ADVICE = "False in a step: `start` of the step runs the whole of it asynchronously"

    def __init__(self, capture: bytes, *, staging_nbytes: int, timeout_s: float | None) -> None:
        super().__init__(capture, staging_nbytes=staging_nbytes, timeout_s=timeout_s)
        self.parameters: TracedParameters = TracedParameters()

    def _sent(self) -> Batch:
        return self  # a batch in the function has the results of its calls

    def _argument(self, value: Any, where: str, actor_id: str, violations: list[Violation]) -> Any:
        kind = type(value)
        if kind in (list, tuple, dict) and any(isinstance(leaf, Placeholder) for leaf in _leaves_of(value)):
            wrong = [leaf for leaf in _leaves_of(value) if not isinstance(leaf, Argument) and not _is_plain(leaf)]
            if wrong:
                actual = f"{wrong[0]!r} in a {kind.__name__} with arguments of the step"
                violations.append(wrong_argument(where, actual, "an argument of the method of its own"))
                return None
            value = self.parameters.composite(value)
        elif kind is Argument and value.kind not in SCALARS:
            value = self.parameters.composite(value)  # each method gets a copy of its own, as with Ray
        elif not isinstance(value, _STANDS_FOR) and not _is_plain(value):
            value = ray.put(value)  # once, as the value is the same in each run
        return super()._argument(value, where, actor_id, violations)

    def _leaf(self, leaves: list[Any], value: Any, where: str) -> Any:
        if type(value) is KeepWrapper:
            inner = value.value
            if type(inner) is not Pending:
                return Fixed(lambda: inner)
            self.retained.append(self._own(inner))
            return -len(self.retained)  # kept values follow the values of a run, the last one first
        if type(value) in (Argument, Pending):
            return super()._leaf(leaves, value, where)
        if not isinstance(value, ray.ObjectRef):
            return Fixed(lambda: value)
        ref = self._stands_for(value, where)
        if ref.key in self.request_list.refs or any(
            type(arg) is Ref and arg.key == ref.key for call in self.request_list.calls for arg in call.arguments
        ):
            return super()._leaf(leaves, value, where)
        return Fixed(partial(values.get, value))


class TracedCapture(Capture):
    """The captured step of one trace."""

    _RECORDING: ClassVar[type[Recording]] = TracedRecording
    _block: TracedRecording
    _on_derived = False  # whether a collective uses a derived group, because "default" is not declared

    def _record(self) -> None:
        request_list = self._block.request_list
        if request_list.requests or request_list.calls:
            self._on_derived = any(request.group.is_derived for request in request_list.requests)
            super()._record()

    @property
    def parameters(self) -> TracedParameters:
        """The arguments of the step."""
        return self._block.parameters

    @property
    def is_empty(self) -> bool:
        """Whether the function has called nothing."""
        return self._controller is None and not self._state

    def fixed(self, given: Mapping[str, Any]) -> Any:
        """Returns the result of a function that calls nothing."""
        returned = self._block.returned
        return None if returned is None else returned.fill((), given)

    def begin(self, given: Mapping[str, Any]) -> tuple[Installed, RunTracker]:
        """Begins a run, which comes after all that was submitted to the actors before.

        Raises:
            GroupError: The groups, or their members, have changed; nothing was sent.
            CaptureBrokenError: A run failed.
        """
        installed = ready(self._installed, self._state)
        if self._on_derived and Controller.drives("default"):
            raise UnknownGroupError(group_name="default", detail="it is declared now, and collectives use it")
        return installed, installed.runs.begin(self._parameters.pack(given))


def _leaves_of(value: Any) -> list[Any]:
    if type(value) in (list, tuple):
        return [leaf for item in value for leaf in _leaves_of(item)]
    return [leaf for item in value.values() for leaf in _leaves_of(item)] if type(value) is dict else [value]


def _is_plain(value: Any) -> bool:
    """Returns whether a value can be sent with a step unchanged; other values go through Ray's object store."""
    kind = type(value)
    if kind in SCALARS or value is None:
        return True
    if kind in (list, tuple):
        return all(map(_is_plain, value))
    if kind is dict:
        return all(type(name) in SCALARS and _is_plain(item) for name, item in value.items())
    if kind is np.ndarray or isinstance(value, np.generic):
        return is_plain_dtype(value.dtype)
    return arrays.is_plain_torch(value) and kind.__name__ == "Tensor" and arrays.describe(value).device == "cpu"
