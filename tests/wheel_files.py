"""Checks what is in a built sdist and wheel: the package whole, nothing else in the wheel, the tests in the sdist.

python tests/wheel_files.py dist
"""

from __future__ import annotations

import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
ALSO_IN_SDIST = ("tests/conftest.py", "tests/golden/ring.txt", "examples/quickstart.py", "docs/backends.md", "LICENSE")


def problems(folder: Path) -> list[str]:
    """What is wrong with the one wheel and the one sdist in a folder, in words."""
    (wheel,), (sdist,) = folder.glob("raycollect-*.whl"), folder.glob("raycollect-*.tar.gz")
    package = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "raycollect").rglob("*")
        if path.suffix in (".py", ".html") or path.name == "py.typed"
    }
    with zipfile.ZipFile(wheel) as opened:
        names = {name for name in opened.namelist() if not name.endswith("/")}
        (about,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(opened.read(about).decode())
    info = about.rpartition("/")[0] + "/"
    code = {name for name in names if not name.startswith(info)}
    found = [f"the wheel lacks {name}" for name in sorted(package - code)]
    found += [f"the wheel has {name}" for name in sorted(code - package)]
    if not any(name.startswith(info) and name.endswith("LICENSE") for name in names):
        found.append("the wheel lacks the license")
    classifiers = metadata.get_all("Classifier", [])
    found += [
        f"no classifier for Python {version}"
        for version in PYTHONS
        if f"Programming Language :: Python :: {version}" not in classifiers
    ]
    if "# raycollect" not in str(metadata.get_payload()):
        found.append("the wheel's description is not README.md")
    with tarfile.open(sdist) as packed:
        inside = {name.partition("/")[2] for name in packed.getnames()}
    return found + [f"the sdist lacks {name}" for name in sorted({*package, *ALSO_IN_SDIST} - inside)]


if __name__ == "__main__":
    wrong = problems(Path(sys.argv[1]))
    for one in wrong:
        print(one, file=sys.stderr)
    sys.exit(bool(wrong))
