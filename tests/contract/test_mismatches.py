"""Every mismatch is one typed error for all who called, in every way and on every backend.

The error names the rank, its actor and the field. No tensor has been written, no process has ended, and the next
collective of the same group works.
"""

from __future__ import annotations

import pytest

from tests.contract.actors import Told
from tests.contract.conftest import BACKENDS, Crews, table
from tests.contract.mismatches import DRIVER, MISMATCHES, ODD, PLAN, Mismatch
from tests.contract.ways import BY_MEMBERS, CALL_NUMBERS, WAYS, Crew, refused


def cases_of(way: str) -> dict[str, Mismatch]:
    callers = {way} if way in BY_MEMBERS else {way, DRIVER}
    return {name: case for name, case in MISMATCHES.items() if callers.isdisjoint(case.never)}


def what_is_wrong(case: Mismatch, told: list[Told], crew: Crew, *, number: int) -> str:
    """Says what is not as it must be with what the callers were told."""
    if not all(one.error is not None and issubclass(one.error, case.error) for one in told):
        return f"raised {told}, not {case.error.__name__}"
    first = told[0].fields["violations"]
    if any(one.fields["violations"] != first for one in told):
        return f"the ranks were told different things: {told}"
    if {violation.rank for violation in first} != {ODD}:
        return f"blames {first}"
    if case.field and case.field not in {violation.field for violation in first}:
        return f"names {first}, not {case.field}"
    actor = f"Member({crew.actors[ODD]._actor_id.hex()[:6]}"
    if not all(violation.actor.startswith(actor) for violation in first):
        return f"names other actors than {actor}: {first}"
    if {violation.call for violation in first} != {number}:
        return f"names other calls than {number}: {first}"
    return ""


@pytest.mark.parametrize(("way", "backend"), table((*WAYS, PLAN), BACKENDS))
def test_a_mismatch_is_one_error_for_all_who_called(crews: Crews, way: str, backend: str) -> None:
    crew, cases = crews(backend, way), cases_of(way)
    pids = crew.all("pid")
    found = {}
    for name, (told, wrong) in refused(way, crew, cases).items():
        callers = [one for rank, one in enumerate(told) if way not in BY_MEMBERS or cases[name].part(rank).operation]
        text = what_is_wrong(cases[name], callers, crew, number=CALL_NUMBERS.get(way, -1))
        if text or any(wrong):
            found[name] = (text, wrong)
    assert found == {}
    assert crew.all("pid") == pids
