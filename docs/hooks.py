"""Hooks of the site: copies of files outside of docs/, the tree of errors, links of public names, search offline.

The pages can be read in the repository as well. On the site, a link that leads out of docs/ points to a copy of that
file under ``repository/``, made during the build: pages and pictures unchanged, programs and notebooks as a page. A
link to any other file outside is a warning, which fails a strict build. A public name in code font links to its entry
in the reference.
"""

from __future__ import annotations

import ast
import functools
import logging
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = "repository"
"""The folder of the site for copies of files outside of docs/."""

SHOWN = (
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "examples/*.py",
    "examples/*/",
    "examples/notebooks/*.ipynb",
    "tests/faults/results.md",
)
"""The files that the site has copies of; the programs of a folder are on one page."""

SHIM, SHIM_HERE = re.compile(r"https://[^\"]*/iframe-worker/shim"), "iframe-worker.js"
"""What material's `offline` plugin loads for web workers on file://, and the copy in docs/."""

ERRORS = "<!-- the tree of errors -->"
"""Marks where a page shows the tree from the docstring of `raycollect.errors`."""

_log = logging.getLogger("mkdocs.hooks.raycollect")
_LINK = re.compile(r"(?P<open>!?\[[^\]]*\]\()(?P<path>[^)#\s]+)(?P<rest>[^)]*\))")
_FENCE = re.compile(r"^( *)(`{3,})[^\n]*\n.*?^\1\2[ ]*$", re.DOTALL | re.MULTILINE)
_LIST = re.compile(r"^((?!\d+\. )[^\s|#<>*-].*\n)(?=(?:[-*]|\d+\.) )", re.MULTILINE)
"""A line of text before a list: on the site a list needs an empty line before it."""
_PATTERN = re.compile(r"[*?]")
_CODE = re.compile(r"<(a|pre|h[1-6]|autoref)\b.*?</\1>|<code>(?P<path>[A-Za-z_][\w.]*)(?:\(\))?</code>", re.DOTALL)
"""Code in a text, and elements whose code must stay unchanged."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replaces patterns in the navigation with files, in the order of their names."""
    if config.nav is not None:
        config.nav = list(_listed(config.nav, Path(config.docs_dir)))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the copies."""
    for path, place in outside().items():
        if path.suffix in (".md", ".png"):
            files.append(File.generated(config, place, abs_src_path=str(path)))
        elif path.suffix == ".ipynb":
            for name, content in _notebook_page(path, place).items():
                files.append(File.generated(config, name, content=content))
        else:
            files.append(File.generated(config, place, content=_program_page(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points links out of docs/ to the copies, and inserts the tree of errors."""
    place = page.file.src_uri
    here = _origin(place)
    parts: list[str] = []
    end = 0
    for fence in _FENCE.finditer(markdown):
        parts += [_relinked(markdown[end : fence.start()], here, place), fence[0]]
        end = fence.end()
    parts.append(_relinked(markdown[end:], here, place))
    return "".join(parts).replace(ERRORS, f"```text\n{tree_of_errors()}\n```")


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links public names to their entries: `allreduce_refs`, `col.get`, `Group.status()`."""
    return _CODE.sub(_entry, html)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Has the search load what it needs on file:// from the site itself; see `SHIM`."""
    return SHIM.sub(posixpath.relpath(SHIM_HERE, posixpath.dirname(page.url) or "."), output)


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:
    """The same for pages that are made of templates alone, such as 404.html."""
    return SHIM.sub(SHIM_HERE, output_content)


@functools.cache
def outside() -> dict[Path, str]:
    """The files and folders outside of docs/ that are shown -> their place on the site."""
    found = (path for pattern in SHOWN for path in sorted(ROOT.glob(pattern.rstrip("/"))))
    shown = [path for path in found if not path.name.startswith("_")]
    return {path: f"{OUTSIDE}/{_named(path)}" for path in shown}


def tree_of_errors() -> str:
    """The tree from the docstring of `raycollect.errors`."""
    told = ast.get_docstring(_parsed("raycollect/errors/__init__.py")) or ""
    return "\n".join(line[4:] for line in told.splitlines() if line.startswith("    "))


@functools.cache
def public_names() -> dict[str, str]:
    """What users import: the name -> the anchor of its entry."""
    top = " ".join(_assigned("raycollect/__init__.py", "_NAMES").values()).split()
    files = sorted((ROOT / "raycollect/errors").glob("_*.py"))
    bodies = (node for path in files for node in _parsed(path.relative_to(ROOT).as_posix()).body)
    raised = (node.name for node in bodies if isinstance(node, ast.ClassDef))
    return {name: f"raycollect.{name}" for name in top} | {name: f"raycollect.errors.{name}" for name in raised}


def _assigned(file: str, name: str) -> Any:
    """The literal that a module assigns to a name; it is read, not imported."""
    for node in _parsed(file).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(one, ast.Name) and one.id == name for one in targets):
            return ast.literal_eval(node.value)  # type: ignore[attr-defined]
    raise LookupError(f"{file} assigns nothing to {name}")


@functools.cache
def _parsed(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text(encoding="utf-8"))


def _entry(found: re.Match[str]) -> str:
    path = found["path"]
    if path is None:
        return found[0]
    first, _, rest = path.removeprefix("raycollect.").removeprefix("col.").partition(".")
    is_said = "_" in first or first[:1].isupper() or path != first  # not `get` or `full`: too common
    anchor = public_names().get(first) if is_said else None
    if first == "errors" and rest in public_names():
        anchor, rest = public_names()[rest], ""
    if anchor is None:
        return found[0]
    return f'<autoref optional identifier="{anchor}{rest and f".{rest}"}">{found[0]}</autoref>'


# ---------------------------------------------------------------------------------------------- navigation


def _listed(items: list[Any], folder: Path) -> Iterator[Any]:
    for item in items:
        if isinstance(item, dict):
            yield {
                title: list(_listed(under, folder)) if isinstance(under, list) else under
                for title, under in item.items()
            }
        elif _PATTERN.search(item):
            yield from sorted(path.relative_to(folder).as_posix() for path in folder.glob(item))
        else:
            yield item


# ---------------------------------------------------------------------------------------------- copies and links


def _named(path: Path) -> str:
    name = path.relative_to(ROOT).as_posix()
    return name if path.suffix in (".md", ".png") else f"{name.removesuffix('.py').removesuffix('.ipynb')}.md"


def _notebook_page(path: Path, place: str) -> dict[str, str | bytes]:
    """A notebook as a page with its pictures: place on the site -> content."""
    named = {"unique_key": path.stem, "output_files_dir": _pictures(path)}
    text, made = MarkdownExporter().from_filename(str(path), resources=named)
    folder = posixpath.dirname(place)
    return {place: text} | {f"{folder}/{name}": content for name, content in made["outputs"].items()}


def _pictures(path: Path) -> str:
    """The folder for the pictures of a notebook, beside its page."""
    return f"{path.stem}_pictures"


def _program_page(path: Path) -> str:
    programs = sorted(path.glob("[!_]*.py")) if path.is_dir() else [path]
    shown = [f"## {one.name}\n\n```python\n{one.read_text(encoding='utf-8')}```\n" for one in programs]
    return "\n".join([f"# {path.relative_to(ROOT).as_posix()}\n", *shown])


def _origin(place: str) -> Path:
    """The file in the repository that a page of the site is made from."""
    for path, copy in outside().items():
        if copy == place:
            return path
    return ROOT / "docs" / place


def _relinked(text: str, here: Path, place: str) -> str:
    """Rewrites links for the site, and puts an empty line before lists.

    Args:
        text: Markdown.
        here: The file that it is from.
        place: The page of the site that it is on.
    """

    def relink(found: re.Match[str]) -> str:
        if ":" in found["path"] or found["path"].startswith(_pictures(here)):
            return found[0]
        target = Path(os.path.normpath(here.parent / found["path"]))
        place_there = _place(target)
        if place_there is None:
            _log.warning("%s links to %s, which is not on the site", place, found["path"])
            return found[0]
        return f"{found['open']}{posixpath.relpath(place_there, posixpath.dirname(place) or '.')}{found['rest']}"

    return _LINK.sub(relink, _LIST.sub(r"\1\n", text))


def _place(target: Path) -> str | None:
    """Where a file or folder of the repository is on the site; None: nowhere."""
    docs = ROOT / "docs"
    if target.is_relative_to(docs):
        place = target.relative_to(docs)
        return (place / "README.md" if target.is_dir() else place).as_posix()
    return outside().get(target)
