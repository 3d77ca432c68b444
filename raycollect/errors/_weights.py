"""Errors of versions of weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raycollect.errors._base import RaycollectError, culprit
from raycollect.errors._faults import RankReport
from raycollect.errors.text import listed


@dataclass(eq=False, kw_only=True)
class VersionError(RaycollectError):
    """A version of weights can't be put or read; what methods see is as it was.

    Attributes:
        name: That of the publication.
        version: Which version, in words; empty for none.
        rank: The rank at fault, of the publisher or of the receiver group; -1 for none.
        actor: The actor of that rank.
        detail: What happened.
    """

    name: str
    detail: str = ""
    version: str = ""
    rank: int = -1
    actor: str = ""

    def _text(self) -> str:
        which = f"version {self.version} of {self.name!r}" if self.version else f"publication {self.name!r}"
        return f"{which}{culprit(self.rank, self.actor)}: {super()._text()}"


class UnknownVersionError(VersionError):
    """No version of that name is there: none was put, or the publication was closed."""

    cure = "call publish() and put() first, and update to one of the two newest versions, which a publisher keeps"


class PublisherReplacedError(VersionError):
    """Another publisher has taken this name since."""

    cure = "let one publisher put versions of a name; the newer one goes on"


class PublicationExistsError(VersionError):
    """Another process publishes under this name, and lives."""

    cure = "publish under another name; or close() the other publication, or end its process, and call publish() again"


class VersionNotPutError(VersionError):
    """A version was not put: a rank of the publisher failed, or replicas differ; no receiver can see anything of it."""

    cure = "see the cause, and call put() again; after a death, call publish() again with the actors that live"


class VersionNotWholeError(VersionError):
    """A receiver could not get all parts with the right digests; the group's methods see what they saw before."""

    cure = (
        "call update() again: it reads only what is missing; where the subscription has ended, or all of its actors, "
        "call subscribe() again"
    )


class VersionDirtyError(VersionError):
    """A method was refused: an update has begun to write this actor's tensors in place, and has not ended."""

    cure = "update again; what has landed is not read again"


@dataclass(eq=False, kw_only=True)
class VersionTimeoutError(VersionError):
    """Ranks did not answer in time.

    Attributes:
        missing: These ranks.
        timeout_s: The limit, in seconds.
        is_shown: Whether the others show the version already; the missing ones will, before their next method.
        reports: What the missing ranks were doing just after.
    """

    missing: tuple[int, ...] = ()
    timeout_s: float = 0.0
    is_shown: bool = False
    reports: tuple[RankReport, ...] = ()
    cure = "see what these ranks are doing; raise timeout_s if they are only busy, and call update() again"

    def _text(self) -> str:
        text = super()._text()
        return f"{text}\n  - " + listed(self.reports, "\n  - ") if self.reports else text

    def _advice(self) -> str:
        return self.cure if self.missing else "call it again; raise timeout_s if what it waited for takes so long"


@dataclass(eq=False, kw_only=True)
class PushError(VersionError):
    """Some of several receiver groups could not be updated; the others show the version.

    Attributes:
        receipts: The receipt of each group, in the order of the subscriptions; None for one that was not updated.
        errors: The error of each group, as `Subscription.update` raises it; None for one that was updated.
    """

    receipts: tuple[Any, ...] = ()
    errors: tuple[RaycollectError | None, ...] = ()
    cure = "see the error of each group, and update those groups again"

    def _text(self) -> str:
        told = (f"group {at}: {type(error).__name__}: {error._text()}" for at, error in enumerate(self.errors) if error)
        return f"{super()._text()}\n  - " + listed(told, "\n  - ")
