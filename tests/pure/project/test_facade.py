"""The package itself: names come on first use, and the pure rooms import where there is no Ray."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import raycollect
from raycollect import planner

ROOT = Path(raycollect.__file__).parents[1]

BLOCKED = """
import sys

class Wall:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {walled!r}:
            raise ImportError(f"{{name}} is behind the wall")

sys.meta_path.insert(0, Wall())
"""


def _python(code: str, *walled: str) -> str:
    """Runs code in a fresh interpreter in which some packages can't be imported; gives what it printed."""
    source = BLOCKED.format(walled=walled) + code
    done = subprocess.run(
        [sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_an_actor_loads_no_algorithm_no_proof_and_no_report() -> None:
    code = """
import sys
from raycollect import CollectiveParticipant

print(*(name.removeprefix("raycollect.planner.") for name in sys.modules if name.startswith("raycollect.planner.")))
"""
    loaded = set(_python(code).split())
    assert "program" in loaded
    assert not loaded & {"algorithms", "cost", "passes", "prediction", "report", "reshard.proof", "verify"}


def test_every_name_of_the_planner_is_found() -> None:
    for name in planner._HOMES:
        assert getattr(planner, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        planner.nothing  # noqa: B018


def test_no_cluster_is_started_for_what_can_not_be() -> None:
    code = """
import ray
import raycollect as col

for call in (
    lambda: col.allreduce_refs([]),
    lambda: col.allreduce_refs([3], op="avg"),
    lambda: col.reduce_refs([], timeout_s=0),
    lambda: col.scatter_refs(None, None),
    lambda: col.declare_collective_group([]),
):
    try:
        call()
    except (col.errors.RefusedError, col.errors.InvalidGroupError) as exc:
        print(type(exc).__name__, ray.is_initialized())
"""
    expected = ["MissingMember", "ForeignRef", "Refused", "ForeignRef", "InvalidGroup"]
    assert _python(code).splitlines() == [f"{name}Error False" for name in expected]


def test_the_pure_rooms_import_without_ray() -> None:
    rooms = "backends, backends.local, channel, engine.run, errors, member.sequencer, observe, planner, pos"
    imports = "\n".join(f"import raycollect.{room.strip()}" for room in rooms.split(","))
    assert _python(f"import raycollect\n{imports}\nprint('ray' in sys.modules)", "ray") == "False"


def test_the_planner_check_and_channel_import_without_an_array_library() -> None:
    rooms = ("channel", "engine.agreement", "errors", "member.sequencer", "core.model", "observe", "planner", "pos")
    imports = "\n".join(f"import raycollect.{room}" for room in rooms)
    assert _python(f"{imports}\nprint('numpy' in sys.modules)", "ray", "numpy", "torch", "cupy") == "False"


def test_a_request_is_planned_without_ray() -> None:
    code = """
from raycollect import ReduceOp, planner
from raycollect.core.model import GroupSpec, OpKind, task_key
group = GroupSpec(name="g", group_id="1", backend="local", world_size=2)
keys = tuple((rank, task_key(bytes([rank] * 24), 1), None) for rank in range(2))
request = planner.Request(kind=OpKind.ALLREDUCE, group=group, operands=keys, op=ReduceOp.SUM)
program = planner.plan([request]).program(1)
assert planner.decode_program(planner.encode_program(program)) == program
print(program.name, program.agreement.rank)
"""
    assert _python(code, "ray") == "allreduce 1"


def test_importing_the_package_loads_nothing_of_it() -> None:
    code = "import raycollect\nprint([n for n in sys.modules if n.startswith('raycollect.') or n == 'numpy'])"
    assert _python(code) == "[]"


def test_a_name_that_needs_ray_says_that_ray_is_missing() -> None:
    code = """
import raycollect
from raycollect import backends, planner
try:
    raycollect.allreduce_refs
except ImportError as exc:
    print(exc)
"""
    assert "ray" in _python(code, "ray")


def test_every_name_resolves_and_is_what_it_is_called() -> None:
    aliases = {"create_collective_group": "declare_collective_group", "destroy_group": "destroy_collective_group"}
    for name in raycollect.__all__:
        value = getattr(raycollect, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__module__.startswith("raycollect.")
            assert value.__name__ in (name, aliases.get(name))
        else:
            assert name in ("errors", "types", "__version__")
        assert vars(raycollect)[name] is value, "kept after the first use"
    assert set(raycollect.__all__) <= set(dir(raycollect))
    with pytest.raises(AttributeError, match="module 'raycollect' has no attribute 'alreduce_refs'"):
        raycollect.alreduce_refs  # noqa: B018


def test_every_name_is_in_the_reference() -> None:
    """`test_docs_site` builds the pages, which takes most of a minute."""
    folder = Path(__file__).parents[3] / "docs" / "reference"  # not beside an installed package
    pages = (path.read_text(encoding="utf-8") for path in folder.glob("*.md"))
    entries = {name for page in pages for name in re.findall(r"^::: raycollect\.(\w+)$", page, re.MULTILINE)}
    assert set(raycollect.__all__) - entries == {"__version__", "errors"}


def test_the_type_checker_sees_the_names_that_exist() -> None:
    source = inspect.getsource(raycollect).split("if TYPE_CHECKING:", 1)[1].split("__version__", 1)[0]
    typed = {line.rpartition(" as ")[2] for line in source.splitlines() if " as " in line}
    assert typed == set(raycollect.__all__) - {"__version__"}


SHOWN = {
    "Batch": "cancel done refs wait work",
    "Capture": "argument call close explain plan returns run",
    "CapturedRun": "cancel done progress wait",
    "CollectiveParticipant": "",
    "DirectoryBulletin": "post read remove where",
    "Group": "actors add backend call destroy epoch get_rank name rank_table rebuild remove replace "
    "statistics status world_size",
    "LiveView": "close is_open",
    "Pending": "actor_id key ref request step",
    "ProgressBars": "",
    "Publication": "close push put stream",
    "Step": "cache_info close explain plan start",
    "Subscription": "close update version",
    "Timeline": "dropped missing stop summary",
    "Work": "cancel done progress retry wait",
}
"""What `help` shows of each class that is not a value: what users call, and nothing else."""


def test_help_shows_what_users_call() -> None:
    public = {name: getattr(raycollect, name) for name in raycollect.__all__}
    classes = {name: one for name, one in public.items() if inspect.isclass(one)}
    shown = {
        name: " ".join(sorted({own for base in one.__mro__[:-1] for own in vars(base) if not own.startswith("_")}))
        for name, one in classes.items()
        if not dataclasses.is_dataclass(one) and not issubclass(one, enum.Enum)
    }
    assert shown == SHOWN


@pytest.mark.skipif(not hasattr(typing, "get_overloads"), reason="Python 3.10 does not keep overloads")
def test_overloads_have_all_parameters() -> None:
    for name in raycollect.__all__:
        function = getattr(raycollect, name)
        if inspect.isfunction(function):
            for overload in typing.get_overloads(function):
                assert list(inspect.signature(overload).parameters) == list(inspect.signature(function).parameters), (
                    name
                )
