"""The command line: what it prints, where it writes, how it ends; no traceback for a user's mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from raycollect.cli.commands import main
from raycollect.errors import RaycollectError
from raycollect.group.rank_table import RankTable
from tests.pure.cli.command_line import ROOT, run_command


def _python(*args: str) -> str:
    done = subprocess.run([sys.executable, *args], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_module_runs_as_a_program() -> None:
    printed = _python("-m", "raycollect", "rank-table", "--device-id", "[[0, 1]]", "--output", "-")
    assert RankTable.from_dict(json.loads(printed)) == RankTable.of_device_ids([[0, 1]])


def test_it_starts_without_ray_and_array_libraries() -> None:
    code = """
import sys
from raycollect.cli.commands import main
main(["rank-table", "--device-id", "[[0]]", "--output", "-"], standalone_mode=False)
print(sorted({"ray", "numpy", "torch"} & set(sys.modules)), file=sys.stdout)
"""
    assert _python("-c", code).splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", sorted(main.commands))
def test_every_command_is_listed_documented_and_explains_itself_with_examples(name: str) -> None:
    [line] = (line for line in run_command("--help").output.splitlines() if line.startswith(f"  {name} "))
    assert not line.endswith("..."), "the list has room for a short line"
    result = run_command(name, "-h")
    assert result.exit_code == 0
    assert f"\n    raycollect {name} " in result.output
    assert f"| `{name}` |" in (ROOT / "docs" / "command-line.md").read_text()


@pytest.mark.parametrize("option", ["--device-id", "--device_id"])
@pytest.mark.parametrize("text", ["[[2, 0], [1]]", "[['2', '0'], ['1']]", '[["2",0],[1]]'])
def test_a_table_goes_to_stdout(option: str, text: str) -> None:
    result = run_command("rank-table", option, text)
    assert (result.exit_code, result.stderr) == (0, "")
    assert RankTable.from_dict(json.loads(result.stdout)) == RankTable.of_device_ids([[2, 0], [1]])


@pytest.mark.parametrize(
    ("output", "variable", "goes"),
    [
        ("table.json", None, "table.json"),
        (None, "named.json", "named.json"),
        ("table.json", "named.json", "table.json"),
        ("-", "named.json", "-"),
        (None, "", "-"),
    ],
)
def test_the_command_line_or_else_the_environment_says_where_a_table_goes(
    tmp_path: Path, output: str | None, variable: str | None, goes: str
) -> None:
    def at(name: str | None) -> str | None:
        return str(tmp_path / name) if name and name != "-" else name

    args = [] if output is None else ["--output", str(at(output))]
    environ: dict[str, str | None] = {"RANK_TABLE_FILE": at(variable)}
    result = run_command("rank-table", "--device-id", "[[0, 1]]", *args, environ=environ)
    assert result.exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ([] if goes == "-" else [goes])
    written = result.stdout if goes == "-" else (tmp_path / goes).read_text()
    assert RankTable.from_dict(json.loads(written)) == RankTable.of_device_ids([[0, 1]])
    origin = " (from RANK_TABLE_FILE)" if output is None else ""
    assert result.stderr == ("" if goes == "-" else f"2 ranks on 1 node, written to {at(goes)}{origin}\n")


def test_a_good_table_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    RankTable.of_device_ids([[4, 2], [0]]).write(path)
    result = run_command(
        "rank-table", "--check", str(path), environ={"RANK_TABLE_FILE": str(tmp_path / "untouched.json")}
    )
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        f"{path}: 3 ranks on 2 nodes",
        "rank 0: node 0, device 4",
        "rank 1: node 0, device 2",
        "rank 2: node 1, device 0",
    ]
    assert [file.name for file in tmp_path.iterdir()] == ["table.json"]
    rows = json.loads(run_command("rank-table", "--check", str(path), "--json").stdout)
    assert rows == [{"rank": rank, "node": rank // 2, "device": device} for rank, device in enumerate((4, 2, 0))]


def test_a_refused_table_ends_with_1_and_every_reason(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    device = {"device_id": "x", "rank": "7"}
    path.write_text(json.dumps({"version": "3", "node_list": [{"device_list": [device]}]}))
    result = run_command("rank-table", "--check", str(path))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"Error: rank table {str(path)!r} is refused:\n")
    assert "version is '3'" in result.stderr
    assert "node_list[0].device_list[0] is {'device_id': 'x'" in result.stderr
    assert "group" not in result.stderr, "no group is meant here"
    absent = run_command("rank-table", "--check", str(tmp_path / "absent.json"))
    assert (absent.exit_code, "absent.json" in absent.stderr) == (1, True)
    assert "No such file" in absent.stderr
    twice = run_command("rank-table", "--device-id", "[[0, 0]]", "--output", str(tmp_path / "twice.json"))
    assert (twice.exit_code, (tmp_path / "twice.json").exists()) == (1, False)
    assert "as in node_list[0].device_list[0]" in twice.stderr


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((), "Usage:"),
        (("--output", "t.json"), "either --device-id or --check"),
        (("--device-id", "[[0]]", "--check", "t.json"), "either --device-id or --check"),
        (("--check", "t.json", "--output", "u.json"), "--check writes nothing"),
        (("--device-id", "[[0"), "not a nested list"),
        (("--device-id", ""), "not a nested list"),
        (("--device-id", "[" * 100_000), "not a nested list"),
        (("--device-id", "[[0]]", "--output", "{tmp}"), "can't be written: Is a directory"),
        (("--device-id", "[[0]]", "--output", "{tmp}/absent/t.json"), "can't be written: No such file"),
        (("--device-id", "[[0]]", "--output", "nul\0"), "can't be written"),
        (("--device-id", "[[0]]", "--emulator"), "--emulator"),
    ],
)
def test_a_wrong_command_line_ends_with_2(tmp_path: Path, args: tuple[str, ...], says: str) -> None:
    result = run_command("rank-table", *(arg.replace("{tmp}", str(tmp_path)) for arg in args))
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in result.stderr


@pytest.mark.parametrize("command", [("status",), ("top", "--cluster")], ids=" ".join)
@pytest.mark.parametrize("address", ["ray://10.0.0.1:10001", "127.0.0.1:1", "nowhere"])
def test_an_error_for_the_user_is_text_and_a_traceback_on_request(command: tuple[str, ...], address: str) -> None:
    result = run_command(*command, "--address", address)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: ")
    raised = CliRunner().invoke(main, [*command, "--address", address], env={"RAYCOLLECT_DEBUG": "1"}).exception
    assert isinstance(raised, RaycollectError | ConnectionError)
