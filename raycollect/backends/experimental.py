"""The warning that a process gives when it first uses what has never run on its hardware."""

from __future__ import annotations

import warnings


class ExperimentalWarning(UserWarning):
    """What is used has been tested without its hardware only.

    Attributes:
        feature: What that is, such as ``"backend 'nccl'"``.
    """

    def __init__(self, feature: str) -> None:
        self.feature = feature
        super().__init__(feature)

    def __str__(self) -> str:
        """Says what it means, and how to do without the warning."""
        return (
            f"{self.feature} is experimental: it has run on stand-ins for its libraries, never on its hardware; see"
            " docs/gpu.md. Check results, and tell us. To silence this:"
            " warnings.simplefilter('ignore', raycollect.backends.experimental.ExperimentalWarning)"
        )


_has_warned = False


def warn_once(feature: str) -> None:
    """Warns the first time in this process, of whatever is experimental."""
    global _has_warned
    if not _has_warned:
        _has_warned = True
        warnings.warn(ExperimentalWarning(feature), stacklevel=3)
