"""Errors: each survives pickle and the wire, and each message says who, what, and what to do."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import re
import traceback
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, get_type_hints

import msgpack
import pytest

from raycollect import errors
from raycollect.errors import (
    REFUSALS,
    CaptureBrokenError,
    CollectiveTimeoutError,
    KernelError,
    MethodError,
    ParticipantDiedError,
    PlanAbortedError,
    ProtocolError,
    PushError,
    RankReport,
    RaycollectError,
    RefusedError,
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
TRAVELLING = [cls for cls in CLASSES if cls is not PushError]  # whose receipts cross no channel
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


def _assert_same(copied: BaseException, error: RaycollectError) -> None:
    assert type(copied) is type(error)
    assert _values(copied) == _values(error)  # type: ignore[arg-type]
    assert str(copied) == str(error)


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
    received = from_wire(msgpack.unpackb(msgpack.packb(to_wire(error))))
    assert (type(received), _values(received)["detail"]) == (VersionError, "1 of 2")


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
    for reasons, cls in ((violations, REFUSALS[kind]), ((replace(VIOLATION, kind="other"), *violations), RefusedError)):
        error = refusal("allreduce", "g", reasons)
        assert (type(error), error.violations) == (cls, reasons)


# ---------------------------------------------------------------------------------------------- messages


def _variants() -> list[RaycollectError]:
    """Errors whose messages depend on their fields: on which are given, and on what they hold."""
    mismatch = replace(VIOLATION, ref="", value="what call 1 (grow) of W(aa) gave", call=2, is_step=True)
    piece = replace(VIOLATION, field="shape of output 0")
    late = VersionTimeoutError(name="policy", missing=(1,), reports=(REPORT,))
    doing = [
        replace(REPORT, answers=False, awaited_s=1.5),
        replace(REPORT, has_begun=True, step="call 3", doing="", ended=0),
        replace(REPORT, actor="", doing=""),
        replace(REPORT, doing=f"{errors.COULD_NOT_LOOK}no thread"),
        replace(REPORT, doing=f"{errors.COULD_NOT_LOOK}no thread", has_begun=True),
    ]
    refused = refusal("reduce", "g", (VIOLATION, replace(VIOLATION, rank=5)))
    why = [brief(error) for error in (refused, ParticipantDiedError(op="x"), UnknownGroupError(group_name="g"))]
    return [
        refusal("allreduce", "", (Violation(kind="unsupported", field="op", found="None"), mismatch)),
        refusal("alltoall", "g", (piece, replace(mismatch, is_step=False))),
        refusal("gather_object", "g", (replace(VIOLATION, kind="not_tensor"),)),
        CollectiveTimeoutError(detail="late", reports=tuple(doing)),
        CollectiveTimeoutError(detail="late", missing=(3,), timeout_s=1.0, story=("0.1 begin",)),
        MethodError(op="step", actor="W(aa)", call=3, detail="a value of type set"),
        PushError(name="policy", detail="1 of 2", receipts=("receipt", None), errors=(None, late)),
        VersionTimeoutError(name="policy", version="3 of epoch 1"),
        VersionTimeoutError(name="policy", missing=(1,), is_shown=True),
        VersionTimeoutError(name="policy", missing=(1,), is_shown=True, has_given_up=True),
        errors.TracedValueError(detail="d", value="rate", use="+", where="train.py:12"),
        *(CaptureBrokenError(detail="broken", why=text) for text in why),
        errors.HolderUnreachableError(op="get", peer="10.0.0.1:5", ref="00c0", detail="refused"),
        errors.ResourceLimitError(resource="threads", limit=7, actor="W(aa)", rank=1, detail="no start"),
        errors.ArenaFullError(nbytes=7, in_use=3, limit=9),
    ]


def test_messages_are_as_in_the_file() -> None:
    """`RAYCOLLECT_UPDATE_GOLDEN=1` rewrites the file; read the difference before you keep it."""
    by_name = sorted(CLASSES, key=lambda cls: cls.__name__)
    given = [_sample(cls, in_full=in_full) for cls in by_name for in_full in (False, True)]
    texts = dict.fromkeys(f"{type(error).__name__}\n{error}\n" for error in (*given, *_variants()))
    messages = "\n".join(texts)
    path = Path(__file__).with_name("messages.txt")
    if os.environ.get("RAYCOLLECT_UPDATE_GOLDEN"):
        path.write_text(messages, encoding="utf-8")
        pytest.skip(f"{path.name} was rewritten")
    assert messages == path.read_text(encoding="utf-8")


def test_the_message_of_thousands_of_ranks_is_short_and_the_fields_have_all() -> None:
    many = tuple(Violation(kind="mismatch", rank=rank, field="shape", found="(1,)") for rank in range(5000))
    error = refusal("allreduce", "g", many)
    late = CollectiveTimeoutError(detail="late", missing=tuple(range(5000)), reports=(REPORT,) * 5000)
    assert error.violations == many
    assert max(len(str(error)), len(str(late))) < 10_000
    assert all(str(raised).endswith(f"{raised.cure}.") for raised in (error, late))


def test_an_error_in_brief_is_one_line() -> None:
    error = PlanAbortedError(op="x", detail="no", story=("0.1 begin",))
    assert brief(error) == f"PlanAbortedError: {str(error).splitlines()[0]}"
    refused = refusal("reduce", "g", (VIOLATION, replace(VIOLATION, rank=5)))
    assert str(VIOLATION) in brief(refused)
    assert len(brief(refused).splitlines()) == 1


def test_errors_are_hashed_by_identity_and_violations_are_frozen() -> None:
    first, other = KernelError(detail="x"), KernelError(detail="x")
    assert first != other
    assert len({first, other}) == 2
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
    received = from_wire(msgpack.unpackb(msgpack.packb(to_wire(error))))
    assert type(received) is KernelError
    assert "the link is down" in str(received)
