"""The processes of `make test`: all files are run, once each, and none without Ray in a process that has it."""

from __future__ import annotations

import types

import pytest

pytest.importorskip("xdist")

from tests.scheduling import WITH_RAY, BothSides

TESTS = 4


class Config:
    """What xdist asks of pytest's."""

    class option:
        loadscopereorder = False

    def getvalue(self, name: str) -> list[str]:
        assert name == "tx"
        return ["3*popen"]


class Node:
    """A process that runs what it is sent, when it is told to."""

    def __init__(self, collection: list[str]) -> None:
        self.collection = collection
        self.gateway = types.SimpleNamespace(id="gw")
        self.waiting: list[int] = []
        self.files: list[str] = []
        self.shutting_down = False

    def send_runtest_some(self, indices: list[int]) -> None:
        self.waiting += indices
        self.files.append(self.collection[indices[0]].split("::")[0])

    def shutdown(self) -> None:
        self.shutting_down = True


def play(pure: int, ray: int, pace: dict[int, int]) -> list[Node]:
    """Has three processes run so many files of either kind, some of them more tests at a time."""
    files = [f"tests/pure/test_{at}.py" for at in range(pure)] + [f"tests/ray/test_{at}.py" for at in range(ray)]
    collection = [f"{file}::test_{at}" for file in files for at in range(TESTS)]
    scheduler = BothSides(Config())
    nodes = [Node(collection) for _ in range(3)]
    for node in nodes:
        scheduler.add_node(node)
    for node in nodes:
        scheduler.add_node_collection(node, collection)
    scheduler.schedule()
    done, turn = [], 0
    while not scheduler.tests_finished:
        turn += 1
        assert turn < 10_000, "some are never run"
        for at, node in enumerate(nodes):
            for _ in range(pace.get(at, 1)):
                if node.waiting:
                    done.append(node.waiting.pop(0))
                    scheduler.mark_test_complete(node, done[-1])
    done += [index for node in nodes for index in node.waiting]
    assert sorted(done) == list(range(len(collection)))
    return nodes


@pytest.mark.parametrize(("pure", "ray"), [(30, 20), (30, 0), (0, 30), (3, 40), (40, 3), (1, 1), (0, 2)])
@pytest.mark.parametrize("pace", [{}, {0: 5}, {1: 5, 2: 5}], ids=["even", "quick without", "quick with"])
def test_every_file_is_run_and_none_without_ray_after_one_with_it(pure, ray, pace):
    for node in play(pure, ray, pace):
        kinds = [file.startswith(WITH_RAY) for file in node.files]
        assert kinds == sorted(kinds)


def test_both_kinds_begin_at_once():
    nodes = play(30, 20, {})
    assert [node.files[0] for node in nodes] == ["tests/pure/test_0.py", "tests/ray/test_0.py", "tests/ray/test_1.py"]
