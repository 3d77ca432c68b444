"""Measures what the tests of `tests/pure` catch: changes the package in one place at a time, and runs the tests there.

    python -m tests.mutation map reach.json  # runs the tests once, to see which functions they enter
    python -m tests.mutation run reach.json mutants.json --count 600 --seed 7
    python -m tests.mutation run reach.json after.json --again mutants.json

A mutant is identified by its file, its function, and the text of the expression or statement before and after, so that
`--again` finds it in later versions, as long as its code stands. It is killed if a test that enters its function fails
or does not end in time. Functions that no test enters are counted on their own.

The map is of the same state: a test that is gone since then would count as one that fails.

`tests/mutants.json` has 509. 390 are left of 600 of the state before the tests were cut: at their last run, which was
earlier, 275 were killed, 56 survived, and 59 stood in functions that no pure test enters. 119 are left of 120 that were
drawn on 28 November 2026, with seed 28, from the 40 files of engine, group and member of which at most one was left.
First 77 were killed, 28 survived, and 15 were not entered: by the most specific tests alone, with a map of those of
captured, driver, engine, errors, group, member, observe and traced. With 23 that new tests kill, 2 that the shortest
tests kill, and one less whose code is deleted, it is 102, 6 and 11. A later run ``--again`` may not kill a smaller
share; mutants of code that has moved or changed are left out.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
AREAS = ("planner", "engine", "pos", "channel", "group", "member", "driver")
MAPPING = "RAYCOLLECT_MUTATION_MAP"  # the folder into which the test workers of `map` write

MOST_S = 20.0  # the time that the most specific tests of a mutant take unchanged, at most
MOST_FILES = 8  # that these are in
SHORT_S = 10.0  # the time of the shortest ones among the others, at most
OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
LIMIT_S, LIMIT_TIMES = 60.0, 8.0  # a run has failed after this, and after so many times the time it takes unchanged

_PAIRS = ((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn), (ast.Is, ast.IsNot))
_PAIRS += ((ast.And, ast.Or), (ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv))
SWAPPED: dict[type[ast.AST], type[Any]] = {one: other for pair in _PAIRS for one, other in (pair, pair[::-1])}


@dataclass(frozen=True)
class Mutant:
    """One change; `number` distinguishes those of the same text in one function."""

    file: str
    function: str
    before: str
    after: str
    number: int = 0
    outcome: str = ""  # killed, survived or unreached


@dataclass(frozen=True)
class Candidate:
    """A mutant in the code of today."""

    mutant: Mutant
    lines: tuple[int, int]  # of its function
    tree: ast.Module
    node: ast.AST
    other: ast.AST

    def source(self) -> str:
        """The file's source with the change."""
        for owner in ast.walk(self.tree):
            for name, value in ast.iter_fields(owner):
                nodes = value if isinstance(value, list) else [value]
                if all(one is not self.node for one in nodes):
                    continue
                changed = [self.other if one is self.node else one for one in nodes]
                setattr(owner, name, changed if nodes is value else self.other)
                try:
                    return ast.unparse(ast.fix_missing_locations(self.tree))
                finally:
                    setattr(owner, name, value)
        raise ValueError(f"no {ast.unparse(self.node)!r} in {self.mutant.file}")


# ---------------------------------------------------------------------------------------------- mutants


def candidates() -> Iterator[Candidate]:
    """All mutants of the areas."""
    for area in AREAS:
        for path in sorted((ROOT / "raycollect" / area).rglob("*.py")):
            file, tree = str(path.relative_to(ROOT)), ast.parse(path.read_text())
            seen: Counter[tuple[str, str, str]] = Counter()
            for function, lines, statement in _nodes(tree, "", (1, sys.maxsize)):
                for node, other in _changes(statement):
                    text = (function, ast.unparse(node), ast.unparse(ast.fix_missing_locations(other)))
                    yield Candidate(Mutant(file, *text, seen[text]), lines, tree, node, other)
                    seen[text] += 1


def _nodes(node: ast.AST, function: str, lines: tuple[int, int]) -> Iterator[tuple[str, tuple[int, int], ast.AST]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            first = min([child.lineno, *(one.lineno for one in child.decorator_list)])
            inner = first, child.end_lineno or first
            for part in child.body:
                yield from _nodes(ast.Module([part], []), f"{function}.{child.name}".lstrip("."), inner)
        elif isinstance(child, ast.ClassDef):
            yield from _nodes(ast.Module(child.body, []), f"{function}.{child.name}".lstrip("."), lines)
        elif not _is_ignored(child):
            yield function, lines, child
            yield from _nodes(child, function, lines)


def _is_ignored(node: ast.AST) -> bool:
    """Imports, docstrings, messages, and what only type checkers see."""
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_docstring or isinstance(node, ast.Import | ast.ImportFrom | ast.JoinedStr | ast.arguments)


def _changes(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    match node:
        case ast.Compare(left, [operation, *more], comparators) if swapped := SWAPPED.get(type(operation)):
            yield node, ast.Compare(left, [swapped(), *more], comparators)
        case ast.BoolOp(operation, values):
            yield node, ast.BoolOp(SWAPPED[type(operation)](), values)
        case ast.BinOp(ast.Constant(str()), _, _) | ast.BinOp(_, _, ast.Constant(str())):
            return
        case ast.BinOp(left, operation, right) if swapped := SWAPPED.get(type(operation)):
            yield node, ast.BinOp(left, swapped(), right)
        case ast.UnaryOp(ast.Not(), operand):
            yield node, operand
        case ast.Constant(bool(value)):
            yield node, ast.Constant(not value)
        case ast.Constant(int(value)):
            yield node, ast.Constant(value + 1)
        case ast.If(test) | ast.IfExp(test):
            yield test, ast.UnaryOp(ast.Not(), test)
        case ast.Expr(ast.Call(function)) if not ast.unparse(function).startswith("_log."):
            yield node, ast.Pass()
        case ast.Return(value) if value is not None and not isinstance(value, ast.Constant):
            yield node, ast.Return(ast.Constant(None))


# ---------------------------------------------------------------------------------------------- which tests enter what


class Reach:
    """A plugin of pytest that notes the functions of the package that each test enters, and how long the test takes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: dict[str, tuple[float, list[str]]] = {}

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        entered: set[Any] = set()

        def note(frame: Any, event: str, _: object) -> None:
            if event == "call":
                entered.add(frame.f_code)

        threading.setprofile(note)
        sys.setprofile(note)
        began_s = time.perf_counter()
        yield
        took_s = time.perf_counter() - began_s
        sys.setprofile(None)
        threading.setprofile(None)
        home = str(ROOT / "raycollect") + os.sep
        places = [(code.co_filename, code.co_firstlineno) for code in entered if code.co_filename.startswith(home)]
        self._found[item.nodeid] = took_s, [f"{Path(file).relative_to(ROOT)}:{line}" for file, line in places]

    def pytest_sessionfinish(self) -> None:
        if self._found:
            (self._folder / f"{os.getpid()}.json").write_text(json.dumps(self._found))


def pytest_configure(config: pytest.Config) -> None:
    """Begins to note, in the test workers of `map`."""
    if folder := os.environ.get(MAPPING):
        config.pluginmanager.register(Reach(Path(folder)))


def draw_map(out: Path) -> None:
    """Runs the pure tests once, and writes for each how long it took and what it entered."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.mutation", "-n", "2", "-o", "timeout=1200"]
        command += ["tests/pure", "--ignore", "tests/pure/project"]
        subprocess.run(command, cwd=ROOT, env=os.environ | {MAPPING: folder}, check=False)
        found = [json.loads(one.read_text()) for one in Path(folder).iterdir()]
    out.write_text(json.dumps({test: entered for one in found for test, entered in one.items()}))


class Tests:
    """Which tests to run for a function: of those that enter it the most specific, and the shortest of the others."""

    def __init__(self, reach: dict[str, tuple[float, list[str]]]) -> None:
        self.took_s = {test: took_s for test, (took_s, _) in reach.items()}
        self._breadth = {test: len(entered) for test, (_, entered) in reach.items()}
        self._entering: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for test, (_, entered) in reach.items():
            for file, line in (place.rsplit(":", 1) for place in entered):
                self._entering[file][int(line)].add(test)

    def of(self, candidate: Candidate) -> list[str]:
        """The tests for a mutant."""
        first, last = candidate.lines
        places = self._entering.get(candidate.mutant.file, {})
        entering = {test for line, tests in places.items() if first <= line <= last for test in tests}
        chosen: list[str] = []
        files: set[str] = set()
        left_s = MOST_S
        for test in sorted(entering, key=lambda one: (self._breadth[one], one)):
            file = test.partition("::")[0]
            if self.took_s[test] <= left_s and (file in files or len(files) < MOST_FILES):
                left_s -= self.took_s[test]
                files.add(file)
                chosen.append(test)
        left_s = SHORT_S
        for test in sorted(entering.difference(chosen), key=lambda one: (self.took_s[one], one)):
            left_s -= self.took_s[test]
            if left_s < 0:
                break
            chosen.append(test)
        return chosen


# ---------------------------------------------------------------------------------------------- runs


class Runner:
    """Runs tests in a copy of the repository, each time in a fork of one process that has imported what is slow.

    Args:
        copy: The folder of the copy.
    """

    def __init__(self, copy: Path) -> None:
        self.copy = copy
        command = [sys.executable, "-m", "tests.mutation", "serve"]
        self._process = subprocess.Popen(command, cwd=copy, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def passes(self, tests: list[str], limit_s: float) -> bool:
        """Whether all tests pass in time."""
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None
        assert answers is not None
        print(json.dumps([tests, limit_s]), file=requests, flush=True)
        return bool(json.loads(answers.readline()))

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()


def serve() -> None:
    """Answers the requests of a `Runner`; called in its copy, before anything of the package was imported."""
    for name in ("hypothesis", "msgpack", "numpy", "ray", "torch"):
        importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for line in sys.stdin:
        tests, limit_s = json.loads(line)
        child = os.fork()
        if child == 0:
            os.setsid()
            os._exit(int(pytest.main([*OPTIONS, *tests])))
        end = os.pidfd_open(child)
        has_ended = bool(select.select([end], [], [], limit_s)[0])
        os.close(end)
        with suppress(ProcessLookupError):  # it has started no other processes, or they have ended
            os.killpg(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        print(json.dumps(has_ended and status == 0), file=answers, flush=True)


def outcome_of(candidate: Candidate, tests: Tests, runner: Runner) -> Mutant:
    """Runs the tests of one mutant."""
    chosen = tests.of(candidate)
    if not chosen:
        return replace(candidate.mutant, outcome="unreached")
    target = runner.copy / candidate.mutant.file
    original = target.read_text()
    target.write_text(candidate.source())
    try:
        passed = runner.passes(chosen, max(LIMIT_S, LIMIT_TIMES * sum(map(tests.took_s.__getitem__, chosen))))
    finally:
        target.write_text(original)
    return replace(candidate.mutant, outcome="survived" if passed else "killed")


def run(candidates: list[Candidate], tests: Tests, out: Path, workers: int) -> None:
    """Runs mutants beside each other, and writes their outcomes after each."""
    runners: SimpleQueue[Runner] = SimpleQueue()
    done: list[Mutant] = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
        for number in range(workers):
            copy = Path(folder) / str(number)
            shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__"))
            runners.put(Runner(copy))

        def one(candidate: Candidate) -> None:
            runner = runners.get()
            try:
                done.append(outcome_of(candidate, tests, runner))
            finally:
                runners.put(runner)
            out.write_text(json.dumps([asdict(mutant) for mutant in done], indent=1))
            print(len(done), done[-1], flush=True)

        list(pool.map(one, candidates))
        for _ in range(workers):
            runners.get().close()
    told(done)


def told(done: list[Mutant]) -> None:
    """Prints the share killed, by area."""
    by_area: dict[str, Counter[str]] = defaultdict(Counter)
    for mutant in done:
        for area in (mutant.file.split("/")[1], "all"):
            by_area[area][mutant.outcome] += 1
    for area, counts in sorted(by_area.items()):
        print(f"{area:8} {counts['killed'] / counts.total():6.1%} of {counts.total()}, {dict(counts)}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("serve", help="what `run` starts")
    commands.add_parser("map").add_argument("map", type=Path)
    running = commands.add_parser("run")
    running.add_argument("map", type=Path)
    running.add_argument("out", type=Path)
    running.add_argument("--count", type=int, default=600)
    running.add_argument("--seed", type=int, default=7)
    running.add_argument("--workers", type=int, default=2)
    running.add_argument(
        "--files", nargs="*", default=["raycollect/"], help="how the names of the files to draw from begin"
    )
    running.add_argument("--again", type=Path, help="outcomes of an earlier run: the same mutants, if they still exist")
    given = parser.parse_args()
    if given.command == "serve":
        serve()
        return
    if given.command == "map":
        draw_map(given.map)
        return
    found = list(candidates())
    if given.again is not None:
        known = {replace(Mutant(**one), outcome="") for one in json.loads(given.again.read_text())}
        found = [one for one in found if one.mutant in known]
    else:
        found = [one for one in found if one.mutant.file.startswith(tuple(given.files))]
        found = random.Random(given.seed).sample(found, min(given.count, len(found)))
    run(found, Tests(json.loads(given.map.read_text())), given.out, given.workers)


if __name__ == "__main__":
    main()
