"""The site builds without a warning and without a network, every page is found, and every public name is on one."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

import raycollect
from raycollect import errors

pytest.importorskip("mkdocs")
pytest.importorskip("material")
pytest.importorskip("mkdocstrings_handlers.python")

pytestmark = pytest.mark.full  # mkdocs takes most of a minute

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"

NOT_BY_THEMSELVES = {"__version__", "errors"}
"""Public names without an entry of their own: a number, and a module whose names are all on the page of errors."""

ALLOWED_ELSEWHERE = re.compile(r"^https?://")
"""Where links may lead besides; only what a reader clicks on."""


class Page(HTMLParser):
    """What a page has and loads.

    Attributes:
        ids: The anchors.
        loaded: What a browser fetches by itself: scripts, styles, fonts, pictures.
        text: What is read.
    """

    LOADS: ClassVar = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.loaded: list[str] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if found.get("id"):
            self.ids.add(found["id"] or "")
        place = found.get(self.LOADS.get(tag, ""))
        if place and found.get("rel") not in ("canonical", "prev", "next"):
            self.loaded.append(place)

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def tools() -> Iterator[dict[str, ModuleType]]:
    """The modules of docs/, which is no package."""
    sys.path.insert(0, str(DOCS))
    try:
        import hooks
        import results

        yield {"hooks": hooks, "results": results}
    finally:
        sys.path.remove(str(DOCS))
        for name in ("hooks", "results"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from mkdocs.config import load_config

    return load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path_factory.mktemp("site")))


@pytest.fixture(scope="module")
def warned(config: Any) -> list[str]:
    """What building the site has warned of. Ends with an error where a page or the build is wrong altogether."""
    from mkdocs.commands.build import build
    from mkdocs.exceptions import Abort

    told: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    listener, log = Listener(logging.WARNING), logging.getLogger("mkdocs")
    log.addHandler(listener)
    try:
        build(config)
    except Abort as exc:
        told.append(str(exc))
    finally:
        log.removeHandler(listener)
    return told


@pytest.fixture(scope="module")
def pages(config: Any, warned: list[str]) -> dict[str, Page]:
    site = Path(config.site_dir)
    assert not list(site.rglob("*.py[co]"))
    found = {path.relative_to(site).as_posix(): path for path in site.rglob("*.html")}
    return {name: Page(path.read_text(encoding="utf-8")) for name, path in found.items()}


def test_the_site_builds_without_a_warning(warned):
    """Links, anchors, and pages that the navigation lacks or has too many are warnings: see mkdocs.yml."""
    assert warned == []


def test_every_page_of_the_folder_is_on_the_site(pages):
    wanted = {path.relative_to(DOCS).with_suffix(".html").as_posix() for path in DOCS.rglob("*.md")}
    wanted = {name.replace("README.html", "index.html") for name in wanted}
    assert wanted <= set(pages)
    assert {"repository/ARCHITECTURE.html", "repository/CHANGELOG.html", "repository/examples/digits.html"} <= set(
        pages
    )


def test_nothing_is_loaded_from_elsewhere(pages):
    elsewhere = {
        name: away
        for name, page in pages.items()
        if (away := [one for one in page.loaded if one.startswith("//") or ALLOWED_ELSEWHERE.match(one)])
    }
    assert elsewhere == {}


def test_the_search_has_its_index_and_its_shim_without_a_server(config, pages):
    site = Path(config.site_dir)
    assert (site / "search" / "search_index.js").is_file()  # a page on file:// can load scripts, but not read files
    for name in ("index.html", "recipes/pipeline.html"):
        (shim,) = [one for one in pages[name].loaded if "iframe-worker" in one]
        assert (site / name).parent.joinpath(shim).is_file()


def test_every_picture_is_there(config, pages):
    site = Path(config.site_dir)
    missing = [
        (name, place)
        for name, page in pages.items()
        if name != "404.html"  # its places are those of a server's root
        for place in page.loaded
        if not place.startswith("data:") and not (site / name).parent.joinpath(place.partition("?")[0]).is_file()
    ]
    assert missing == []


def test_every_public_name_has_an_entry(pages):
    there = {one for name, page in pages.items() if name.startswith("reference/") for one in page.ids}
    public = {f"raycollect.{name}" for name in set(raycollect.__all__) - NOT_BY_THEMSELVES}
    shown = {name for name in errors.__all__ if isinstance(getattr(errors, name), type)}
    assert public | {f"raycollect.errors.{name}" for name in shown} <= there


def test_every_error_is_in_the_tree(tools):
    words = set(re.findall(r"\w+", tools["hooks"].tree_of_errors()))
    raised = {name for name in errors.__all__ if isinstance(getattr(errors, name), type)}
    assert raised - {"RankReport", "Violation"} <= words


def variables(*folders: str) -> set[str]:
    """The variables of the environment that are named there."""
    files = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return {name for path in files for name in re.findall(r"\bRAYCOLLECT_[A-Z_]+\b", path.read_text(encoding="utf-8"))}


def test_every_variable_of_the_environment_is_on_its_page():
    page = (DOCS / "reference" / "options.md").read_text(encoding="utf-8")
    told = set(re.findall(r"\bRAYCOLLECT_[A-Z_]+\b", page))

    assert variables("raycollect") - told == set()
    assert told - variables("raycollect", "tests", "benchmarks") == set()


def test_the_tables_of_measurements_are_those_of_the_results(tools):
    for page in tools["results"].PAGES:
        text = page.read_text(encoding="utf-8")
        assert tools["results"].fill(text) == text, "python docs/results.py --write"
