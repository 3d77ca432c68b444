"""A release: `python .ci/release.py check` says what hinders it; `tag` tags it, with its section of the changelog.

`upload` says what hinders the upload of dist/ after that.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path.cwd()
_SECTION = re.compile(r"^## \[(?P<version>[^]]+)\] - (?P<date>.+)\n(?P<text>(?:(?!## ).*\n?)*)", re.MULTILINE)


def version() -> str:
    """Returns the version of the package."""
    match = re.search(r'^__version__ = "(.+)"$', (ROOT / "raycollect/__init__.py").read_text(), re.MULTILINE)
    assert match is not None
    return match[1]


def newest_section() -> re.Match[str]:
    """Returns the first section of the changelog."""
    match = _SECTION.search((ROOT / "CHANGELOG.md").read_text())
    assert match is not None
    return match


def problems(command: str) -> list[str]:
    """Returns what hinders a command, in words."""
    section, tag = newest_section(), f"v{version()}"
    found = []
    if git("status", "--porcelain"):
        found.append("the tree has changes that are not committed: git status")
    if command == "upload":
        if tag not in git("tag", "--points-at", "HEAD").split():
            found.append(f"HEAD is not the tag {tag}: git checkout {tag}")
        files = sorted(path.name for path in ROOT.glob("dist/*"))
        if files != [f"raycollect-{version()}{end}" for end in ("-py3-none-any.whl", ".tar.gz")]:
            found.append(f"dist/ has {', '.join(files) or 'no files'}, not the two of {version()}: make wheel")
        return found
    if section["version"] != version():
        found.append(f"the changelog begins with {section['version']}, and the package is {version()}")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", section["date"]):
        found.append(f"the changelog's section of {section['version']} has {section['date']!r} in place of a date")
    if git("tag", "--list", tag):
        found.append(f"the tag {tag} exists: raise __version__ in raycollect/__init__.py")
    return found


def git(*arguments: str) -> str:
    """Returns what git prints."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def main(command: str = "") -> int:
    """Runs a command; returns its exit code."""
    if command not in ("check", "tag", "upload"):
        print(__doc__, file=sys.stderr)
        return 2
    if found := problems(command):
        print("\n".join(found), file=sys.stderr)
        return 1
    tag = f"v{version()}"
    if command == "tag":
        notes = f"raycollect {version()}\n\n{newest_section()['text'].strip()}\n"
        git("tag", "--annotate", "--cleanup=verbatim", "--message", notes, tag)
        print(f"tagged; now: git push origin {tag}")
    else:
        print(f"nothing hinders {tag}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
