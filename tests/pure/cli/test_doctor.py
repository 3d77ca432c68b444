"""The table of `raycollect doctor`, in surroundings that are made up and where it runs, and its child processes."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import raycollect
from raycollect import backends
from raycollect.backends import Capabilities
from raycollect.cli import doctor
from raycollect.cli.doctor import findings, software
from raycollect.cli.doctor.findings import MISSING, OK, WARNING, ChildError, Finding, Machine, Probe
from tests.pure.cli.machines import machine_of


def test_every_probe_has_a_row_of_its_own_name_and_heading() -> None:
    """On the machine of the tests, whatever it has; only the libraries' children are left out."""
    machine = Machine(run=machine_of(said=ChildError("none here")).run)
    rows = doctor.examine(machine)
    single = [probe for probe in doctor.PROBES if probe.check != "backends"]
    assert [row.check for row in rows if row.section != "backends"] == [probe.check for probe in single]
    assert [row.check for row in rows if row.section == "backends"] == list(backends.names())
    assert {row.state for row in rows} <= {OK, WARNING, MISSING}
    assert not any(row.found.startswith("the check failed") for row in rows), rows
    assert set(doctor.lacking(rows)) == {*software.REQUIRED, "local", "shm", "tcp"}, "no child has said that they load"


@pytest.mark.parametrize(("required", "state"), [(True, MISSING), (False, WARNING)])
def test_a_probe_that_fails_is_a_row_and_the_others_go_on(required: bool, state: str) -> None:
    def fail(machine: Machine) -> Finding:
        raise ZeroDivisionError("by zero")

    def late(machine: Machine) -> Iterator[Finding]:
        yield Finding(check="first", state=OK, found="")
        raise KeyError("second")

    def well(machine: Machine) -> Finding:
        return Finding(check="third", state=OK, found="it works")

    probes = [
        Probe(section="a", check="zero", look=fail, required=required),
        Probe(section="a", check="late", look=late),
        Probe(section="b", check="third", look=well),
    ]
    rows = doctor.examine(machine_of(), probes)
    assert [(row.section, row.check, row.state) for row in rows] == [
        ("a", "zero", state),
        ("a", "late", WARNING),
        ("b", "third", OK),
    ]
    assert rows[0].found == "the check failed: ZeroDivisionError: by zero"
    assert doctor.lacking(rows) == (("zero",) if required else ())


def test_the_table_has_headings_and_says_what_to_do_below() -> None:
    long = " ".join(["word"] * 30)
    rows = [
        Finding(section="a", check="one", state=OK, found="well"),
        Finding(section="a", check="another", state=MISSING, found=long, cure="pip install it"),
        Finding(section="b", check="last", state=WARNING, found=""),
    ]
    lines = doctor.table(rows, width=60)
    assert lines[:2] == ["a", "  ok       one      well"]
    assert lines[2].startswith("  missing  another  word word")
    assert max(map(len, lines)) <= 60
    assert " ".join(" ".join(lines).split()).count("word") == 30
    assert lines[-4:] == [" " * 20 + "-> pip install it", "", "b", "  warning  last"]
    assert doctor.table([]) == []


def test_one_code_is_run_once() -> None:
    ran = []

    def said(code: str) -> dict[str, str]:
        ran.append(code)
        return {"code": code}

    machine = machine_of(said=said)
    machine.start("1")
    assert [machine.ask(code)["code"] for code in ("1", "2", "1")] == ["1", "2", "1"]
    assert sorted(ran) == ["1", "2"]


def test_a_child_answers_with_its_last_line() -> None:
    code = "import raycollect\nprint('noise')\nprint('{\"from\": \"%s\"}' % raycollect.__file__)"
    assert findings.run_child(code, 60.0) == {"from": raycollect.__file__}


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV"),
        ("raise ImportError('libfoo.so.1: cannot open')", r"ImportError: libfoo.so.1: cannot open"),
        ("import sys; sys.exit(3)", "ended with 3"),
        ("print('hello')", "it said 'hello'"),
        ("print('[1]')", r"it said \[1\]"),
        ("import sys; sys.stdout.buffer.write(bytes([255, 254]))", "it said"),
        ("", "it said ''"),
    ],
)
def test_a_child_that_does_not_answer_is_an_error(code: str, says: str) -> None:
    with pytest.raises(ChildError, match=says):
        findings.run_child(code, 60.0)


def test_a_child_that_hangs_is_given_up() -> None:
    with pytest.raises(ChildError, match=r"no answer after 0\.3 s"):
        findings.run_child("import threading; threading.Event().wait()", 0.3)


def test_a_child_that_can_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ChildError, match="no process could be started"):
        findings.run_child("print({})", 1.0)


def test_these_files_know_every_probe() -> None:
    """A new probe needs a test, and a name there."""
    files = Path(__file__).parent.glob("test_doctor_*.py")
    known = {name for file in files for name in re.findall(r"(?:software|surroundings)\.(\w+)", file.read_text())}
    looks = {getattr(probe.look, "__qualname__", "").partition(".")[0] for probe in doctor.PROBES} - {"this_package"}
    assert looks <= known
    assert isinstance(backends.BACKENDS["shm"], Capabilities)
