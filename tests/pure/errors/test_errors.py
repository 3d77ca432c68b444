"""Errors: each survives pickle and the wire, and each message says who, what, and what to do."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import traceback
from dataclasses import MISSING, asdict, fields
from typing import Any, get_type_hints

import msgpack
import pytest

from raycollect import errors
from raycollect.errors import (
    REFUSALS,
    CaptureBrokenError,
    CollectiveTimeoutError,
    DispatchError,
    FaultError,
    KernelError,
    MethodError,
    MismatchError,
    ParticipantDiedError,
    PlanAbortedError,
    ProtocolError,
    PushError,
    RankReport,
    RaycollectError,
    RefusedError,
    StoreFullError,
    UnknownGroupError,
    VersionError,
    VersionTimeoutError,
    Violation,
    brief,
    from_wire,
    refusal,
    to_wire,
)
from tests.support.values import replace

CLASSES = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and issubclass(value, RaycollectError) and value.__module__ == errors.__name__
]
TRAVELLING = [one for one in CLASSES if one is not PushError]  # whose receipts cross no channel
VIOLATION = Violation(
    kind="mismatch", rank=2, field="shape", found="[3]", expected="[4]", actor="Worker(3f2a91)", ref="00c0ffee"
)
REPORT = RankReport(
    rank=2,
    actor="Worker(3f2a91)",
    answers=True,
    has_begun=False,
    doing="Worker.train (train.py:7)",
    stack=("train.py:7 in Worker.train: self.load()", "train.py:12 in Worker.load: return read(name)"),
    ended=6,
    story=("0.5 plan 6 done",),
)
SAMPLES: dict[str, Any] = {
    "str": "some text: äöü",
    "int": 3,
    "bool": True,
    "float": 2.5,
    "tuple[int, ...]": (1, 2),
    "tuple[str, ...]": ("first", "second"),
    "tuple[Violation, ...]": (VIOLATION, replace(VIOLATION, rank=5, kind="freed", expected="")),
    "tuple[RankReport, ...]": (REPORT, replace(REPORT, rank=5, answers=False, stack=())),
    "tuple[Any, ...]": ("receipt", None),
    "tuple[RaycollectError | None, ...]": (None, ProtocolError(detail="some text")),
}
"""A value for each type of field; a field of another type makes the tests fail, so that it is added here."""


def _sample(cls: type[RaycollectError], *, in_full: bool = True) -> RaycollectError:
    return cls(**{f.name: SAMPLES[str(f.type)] for f in fields(cls) if in_full or f.default is MISSING})


def _values(error: RaycollectError) -> dict[str, Any]:
    return {f.name: getattr(error, f.name) for f in fields(error)}


def _assert_same(found: BaseException, error: RaycollectError) -> None:
    assert type(found) is type(error)
    assert _values(found) == _values(error)  # type: ignore[arg-type]
    assert str(found) == str(error)


# ---------------------------------------------------------------------------------------------- travel


@pytest.mark.parametrize("in_full", [False, True])
@pytest.mark.parametrize("cls", TRAVELLING)
def test_survives_pickle_and_the_wire_with_fields_and_message(cls: type[RaycollectError], in_full: bool) -> None:
    error = _sample(cls, in_full=in_full)
    assert len(str(error)) > 5
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        pickled = pickle.dumps(error, protocol)
        assert b"raycollect.errors._" not in pickled, "a private module"
        _assert_same(pickle.loads(pickled), error)
    _assert_same(copy.deepcopy(error), error)
    _assert_same(from_wire(msgpack.unpackb(msgpack.packb(to_wire(error)))), error)


def test_an_error_of_several_groups_is_pickled_whole_and_crosses_the_wire_as_what_it_is_a_kind_of() -> None:
    late = VersionTimeoutError(name="policy", missing=(1,), reports=(REPORT,))
    error = PushError(name="policy", detail="1 of 2", receipts=("receipt", None), errors=(None, late))
    same = pickle.loads(pickle.dumps(error))
    assert (type(same), str(same), same.receipts) == (PushError, str(error), error.receipts)
    assert same.errors[0] is None
    _assert_same(same.errors[1], late)
    found = from_wire(msgpack.unpackb(msgpack.packb(to_wire(error))))
    assert (type(found), _values(found)["detail"]) == (VersionError, "1 of 2")


@pytest.mark.parametrize(
    "value",
    [
        None,
        7,
        "KernelError",
        [],
        {},
        {"type": "KernelError"},
        {"fields": {}},
        {"type": "KernelError", "fields": None},
        {"type": "KernelError", "fields": ["rank"]},
        {"type": "KernelError", "fields": {"colour": "red"}},
        {"type": "KernelError", "fields": {1: 2}},
        {"type": "StoreFullError", "fields": {}},
        {"type": "MismatchError", "fields": {"op": "x", "group_name": "g", "violations": 3}},
        {"type": "MismatchError", "fields": {"op": "x", "group_name": "g", "violations": [3]}},
        {"type": "MismatchError", "fields": {"op": "x", "group_name": "g", "violations": [{"rank": 1}]}},
        {
            "type": "MismatchError",
            "fields": {"op": "x", "group_name": "g", "violations": [{**asdict(VIOLATION), "colour": "red"}]},
        },
        {"type": "CollectiveTimeoutError", "fields": {"reports": [{**asdict(REPORT), "colour": "red"}]}},
        {"type": "Violation", "fields": asdict(VIOLATION)},  # public, but no error
        {"type": "refusal", "fields": {}},
        {"type": "dataclass", "fields": {}},  # a global of the module, but not public
        {"type": "ValueError", "fields": {}},
        {"type": ["KernelError"], "fields": {}},
        {"type": None, "fields": {}},
    ],
)
def test_malformed_error_on_the_wire_is_a_protocol_error(value: Any) -> None:
    with pytest.raises(ProtocolError):
        from_wire(value)


# ---------------------------------------------------------------------------------------------- the tree


def test_the_tree_in_the_docstring_is_the_tree_of_classes() -> None:
    drawn: set[tuple[str, str]] = set()
    above: dict[int, str] = {}
    for line in inspect.cleandoc(errors.__doc__ or "").split("::", 1)[1].splitlines():
        names = list(re.finditer(r"\b[A-Z]\w*Error\b", line))
        if not names:
            continue
        column = names[0].start()
        parent = next((above[c] for c in sorted(above, reverse=True) if c < column), "RuntimeError")
        above = {c: name for c, name in above.items() if c < column}
        above[column] = names[0].group()
        drawn |= {(name.group(), parent) for name in names}
    assert drawn == {(cls.__name__, cls.__bases__[0].__name__) for cls in CLASSES}


def _all_below(cls: type[RaycollectError]) -> set[type[RaycollectError]]:
    return {cls}.union(*(_all_below(sub) for sub in cls.__subclasses__()))


def test_every_error_is_public() -> None:
    ours = {cls for cls in _all_below(RaycollectError) if cls.__module__.startswith("raycollect.")}
    assert set(CLASSES) == ours
    assert {cls.__name__ for cls in ours} <= set(errors.__all__)


@pytest.mark.parametrize("name", errors.__all__)
def test_a_name_is_known_by_the_public_module(name: str) -> None:
    value = getattr(errors, name)
    assert (value.__module__, value.__name__) == ("raycollect.errors", name)


@pytest.mark.parametrize("cls", CLASSES)
def test_a_traceback_names_the_public_module_and_the_types_of_fields_are_found(cls: type[RaycollectError]) -> None:
    assert traceback.format_exception_only(_sample(cls))[0].startswith(f"raycollect.errors.{cls.__name__}: ")
    assert {f.name for f in fields(cls)} <= set(get_type_hints(cls))


# ---------------------------------------------------------------------------------------------- refusals


def test_every_kind_of_violation_has_its_own_leaf() -> None:
    leaves = [cls for cls in CLASSES if cls.__bases__[0] is RefusedError]
    assert sorted(cls.__name__ for cls in REFUSALS.values()) == sorted(cls.__name__ for cls in leaves)
    assert len({cls.cure for cls in leaves}) == len(leaves), "each leaf says what to do about it"


@pytest.mark.parametrize("kind", REFUSALS)
def test_violations_of_one_kind_give_the_leaf_and_of_several_the_base(kind: str) -> None:
    violations = (replace(VIOLATION, kind=kind), replace(VIOLATION, kind=kind, rank=0))
    for found, cls in ((violations, REFUSALS[kind]), ((replace(VIOLATION, kind="other"), *violations), RefusedError)):
        error = refusal("allreduce", "g", found)
        assert (type(error), error.violations) == (cls, found)


# ---------------------------------------------------------------------------------------------- messages


def test_a_refusal_names_rank_actor_ref_field_found_expected_and_cure_of_every_violation() -> None:
    violations = tuple(replace(VIOLATION, rank=rank) for rank in range(10))
    text = str(MismatchError(op="allreduce", group_name="ring", violations=violations))
    for part in ("allreduce", "'ring'", "Worker(3f2a91)", "00c0ffee", "shape is [3]", "expected [4]"):
        assert part in text
    assert re.findall(r"rank (\d)", text) == [str(rank) for rank in range(10)]
    assert text.endswith(f"What to do: {MismatchError.cure}.")


def test_a_refusal_of_thousands_of_ranks_and_a_timeout_of_as_many_are_told_in_short() -> None:
    """All that there is to know is in the error's fields."""
    many = tuple(Violation(kind="mismatch", rank=rank, field="shape", found="(1,)") for rank in range(5000))
    error = refusal("allreduce", "g", many)
    assert error.violations == many
    assert "and 4900 more" in str(error)
    report = RankReport(
        rank=1, actor="W", answers=True, has_begun=False, doing="W.f", stack=("a", "b"), ended=0, story=()
    )
    late = CollectiveTimeoutError(detail="late", missing=tuple(range(5000)), reports=(report,) * 5000)
    assert "and 4980 more" in str(late)
    assert len(str(late)) < 10_000
    assert str(late).endswith(f"{late.cure}.")


@pytest.mark.parametrize("cls", [cls for cls in CLASSES if issubclass(cls, FaultError) and cls is not MethodError])
def test_a_fault_names_op_group_rank_actor_detail_and_story(cls: type[FaultError]) -> None:
    story = ("0.1 plan 3 start", "0.2 plan 3 check")
    text = str(cls(op="broadcast", group_name="ring", rank=4, actor="Worker(aa)", detail="it broke", story=story))
    for part in ("broadcast", "'ring'", "rank 4", "Worker(aa)", "it broke"):
        assert part in text
    if cls is CollectiveTimeoutError:  # its reports are what matters
        assert story[0] not in text
    else:
        told = "\nWhat the rank that reported it did last:\n  | 0.1 plan 3 start\n  | 0.2 plan 3 check"
        assert told in text
    assert ("What to do" in text) == bool(cls.cure)


def test_a_method_that_raised_and_one_that_returned_what_can_not_travel() -> None:
    raised = MethodError(op="step", actor="W(aa)", call=3, raised="KeyError", detail="'x'", trace="one\ntwo")
    assert str(raised).startswith("call 3 of the step, step of W(aa), raised KeyError: 'x'\n  | one\n  | two\n")
    assert "correct the method" in str(raised)
    returned = str(MethodError(op="step", actor="W(aa)", call=3, detail="a value of type set"))
    assert "step of W(aa), returned a value of type set\n" in returned
    assert "raised" not in returned
    assert "mend" not in returned
    assert "ordinary method" in returned


def test_a_violation_names_the_call_of_the_step_or_batch_and_the_value() -> None:
    assert str(Violation(kind="unsupported", rank=-1, field="op", found="None")) == "the call: op is None"
    one = replace(VIOLATION, ref="", value="what call 1 (grow) of W(aa) gave", call=2, is_step=True)
    assert str(one).startswith("call 2 of the step, rank ")
    assert ", what call 1 (grow) of W(aa) gave: " in str(one)
    assert "call 2 of the batch" in str(replace(one, is_step=False))


def test_what_to_do_about_pieces_is_another_thing_than_to_make_them_equal() -> None:
    """The pieces of an all-to-all differ from pair to pair."""
    mismatch = Violation(kind="mismatch", rank=1, field="shape of output 0", found="[2]", expected="[3]")
    assert "output i of a list that of what rank i gives" in str(refusal("alltoall", "g", (mismatch,)))
    assert "equal on all ranks" in str(refusal("allreduce", "g", (replace(mismatch, field="shape"),)))


def test_an_error_in_brief_is_one_line() -> None:
    assert brief(PlanAbortedError(op="x", detail="no", story=("0.1 begin",))) == "PlanAbortedError: x: no"
    refused = refusal("reduce", "g", (VIOLATION, replace(VIOLATION, rank=5)))
    assert brief(refused) == f"{type(refused).__name__}: reduce was refused: {VIOLATION}, and 1 more"
    broken = CaptureBrokenError(detail="broken", why=brief(refused))
    assert str(broken).count("What to do") == 1
    assert "capture the step again" in str(broken)
    lost = CaptureBrokenError(detail="broken", why=brief(ParticipantDiedError(op="x")))
    assert "group.replace(dead, new)" in str(lost)


@pytest.mark.parametrize(
    ("error", "parts"),
    [
        (UnknownGroupError(group_name="ring"), ("'ring'", "no group of that name", "declare_collective_group")),
        (errors.GroupBrokenError(group_name="ring", detail="so it is"), ("'ring': so it is", "What to do: group.")),
        (KernelError(op="broadcast", group_name="g"), ("A communication library failed",)),
        (PlanAbortedError(op="captured step of W(aa)", detail="closed"), ("captured step of W(aa): closed",)),
        (StoreFullError(limit=17), ("17", "raycollect.free")),
        (errors.ArenaFullError(nbytes=7, in_use=3, limit=9), ("7 bytes", "3 of at most 9", "RAYCOLLECT_ARENA_LIMIT")),
        (errors.ArenaFullError(nbytes=7, in_use=3, limit=9, detail="no pages"), ("7 bytes", "no pages", "What to do")),
        (ProtocolError(detail="bad frame", peer="10.0.0.1:5"), ("10.0.0.1:5: bad frame",)),
        (ProtocolError(detail="bad frame"), ("bad frame",)),
        (errors.InternalError(detail="impossible"), ("impossible", "bug of raycollect")),
        (errors.SelfDrivenError(actor="Worker(aa)"), ("Worker(aa)", "What to do")),
        (errors.ControllerConflictError(actor="Worker(aa)", holder="pid 7"), ("Worker(aa)", "pid 7", "What to do")),
        (errors.RayClientError(), ("ray://", "What to do")),
        (errors.ForkedError(), ("forked", "What to do")),
        (CollectiveTimeoutError(detail="late", missing=(3,), timeout_s=1.0), ("late", "timeout_s")),
        (DispatchError(detail="queue full"), ("queue full", "no kernel ran")),
    ],
)
def test_messages_say_what_and_what_to_do(error: RaycollectError, parts: tuple[str, ...]) -> None:
    for part in parts:
        assert part in str(error)


def test_errors_are_hashed_by_identity_and_violations_are_frozen() -> None:
    one, other = KernelError(detail="x"), KernelError(detail="x")
    assert one != other
    assert len({one, other}) == 2
    with pytest.raises(AttributeError):
        VIOLATION.rank = 3  # type: ignore[misc]


@pytest.mark.parametrize("name", ["InvalidArgumentError", "InvalidGroupError", "UnknownBackendError"])
def test_what_ray_raises_as_value_error_is_caught_as_one(name: str) -> None:
    assert issubclass(getattr(errors, name), ValueError)


class _OwnError(KernelError):
    """As a backend that is not of this package may have one."""


class _OwnBaseError(RaycollectError):
    """The same, of no nearer class."""

    def _text(self) -> str:
        return "the link is down"


@pytest.mark.parametrize("error", [_OwnError(rank=1, detail="the link is down"), _OwnBaseError()])
def test_an_error_of_another_package_travels_as_one_of_this(error: RaycollectError) -> None:
    """The receiver knows no other, and would end the connection to whoever has told it."""
    found = from_wire(msgpack.unpackb(msgpack.packb(to_wire(error))))
    assert type(found) is KernelError
    assert "the link is down" in str(found)
