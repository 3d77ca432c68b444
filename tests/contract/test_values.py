"""Every way to call every operation, on every backend, computes what numpy does."""

from __future__ import annotations

import pytest

from tests.contract.actors import BY_TORCH
from tests.contract.cases import FAMILIES, Case
from tests.contract.conftest import BACKENDS, Crews, table
from tests.contract.ways import BY_MEMBERS, WAYS, run


def can(way: str, case: Case) -> bool:
    """Whether a case can be said in a way."""
    if way not in BY_MEMBERS:
        return case.layout != "no dimensions"  # methods return those by value
    if way == "torch":
        return not case.makes and case.operation in BY_TORCH and case.layout == "plain"
    return not case.makes


def cases_of(way: str, backend: str, family: str) -> list[Case]:
    """The cases of a family; each crew with a tensor of torch takes seconds to import it, so that one does."""
    return [case for case in FAMILIES[family]() if can(way, case) and (backend == "shm" or case.layout != "in torch")]


TABLE = [one for one in table(WAYS, BACKENDS, FAMILIES) if cases_of(*one.values)]


@pytest.mark.parametrize(("way", "backend", "family"), TABLE)
def test_every_rank_holds_what_numpy_makes(crews: Crews, way: str, backend: str, family: str) -> None:
    assert run(way, crews(backend, way), cases_of(way, backend, family)) == {}
