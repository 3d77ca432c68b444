"""Plans whose progress is shown."""

from __future__ import annotations

from raycollect.driver.progress import Progress, ProgressProbe


def look(one: ProgressProbe) -> Progress:
    one.ask()
    one.hear()
    return one.read()
