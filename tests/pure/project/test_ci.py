"""The continuous integration runs files that exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[3]


def expanded(pattern: str) -> list[str]:
    """The paths of a pattern with braces."""
    parts = [part.split(",") for part in re.split(r"[{}]", pattern)]
    return ["".join(chosen) for chosen in product(*parts)]


def test_every_test_file_that_is_named_exists() -> None:
    scripts = [ROOT / ".ci/run", *(ROOT / "tests").glob("*.sh")]
    text = re.sub(r"\s*\\\n\s*", " ", "\n".join(script.read_text() for script in scripts))
    named = [path for word in re.findall(r"tests/[\w/{},.]+", text) for path in expanded(word)]
    assert len(named) > 10
    assert [path for path in named if not (ROOT / path).exists()] == []


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=A", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


def release(folder: Path, command: str) -> int:
    environ = {f"GIT_COMMITTER_{key}": "a" for key in ("NAME", "EMAIL")}
    program = [sys.executable, str(ROOT / ".ci/release.py"), command]
    return subprocess.run(program, cwd=folder, env={**os.environ, **environ}, check=False).returncode


def test_a_release_needs_a_date_a_clean_tree_and_a_new_number(tmp_path: Path) -> None:
    changelog = tmp_path / "CHANGELOG.md"
    (tmp_path / "raycollect").mkdir()
    (tmp_path / "raycollect/__init__.py").write_text('__version__ = "1.2.0"\n')
    changelog.write_text(
        "# Changelog\n\n## [1.2.0] - unreleased\n\n### Added\n\n- One.\n\n## [1.1.0] - 2026-01-01\n\n- Old.\n"
    )
    git(tmp_path, "init", "--quiet")

    def commit() -> None:
        git(tmp_path, "add", "--all")
        git(tmp_path, "commit", "--quiet", "--message", "A change")

    commit()
    assert release(tmp_path, "check") == 1
    changelog.write_text(changelog.read_text().replace("unreleased", "2026-02-01"))
    assert release(tmp_path, "check") == 1
    commit()
    assert release(tmp_path, "check") == 0
    assert release(tmp_path, "tag") == 0
    assert git(tmp_path, "tag", "--list", "--format=%(contents)").strip() == "raycollect 1.2.0\n\n### Added\n\n- One."
    assert release(tmp_path, "tag") == 1

    (tmp_path / ".git/info/exclude").write_text("dist\n")
    (tmp_path / "dist").mkdir()
    assert release(tmp_path, "upload") == 1
    for name in ("raycollect-1.2.0.tar.gz", "raycollect-1.2.0-py3-none-any.whl"):
        (tmp_path / "dist" / name).touch()
    assert release(tmp_path, "upload") == 0
    (tmp_path / "dist/raycollect-1.1.0.tar.gz").touch()
    assert release(tmp_path, "upload") == 1
    (tmp_path / "dist/raycollect-1.1.0.tar.gz").unlink()
    (tmp_path / "more").touch()
    commit()
    assert release(tmp_path, "upload") == 1


def test_an_unknown_command_is_refused(tmp_path: Path) -> None:
    assert release(tmp_path, "chek") == 2
