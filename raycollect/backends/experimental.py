"""The warning at a process's first use of a feature that has never run on its hardware."""

from __future__ import annotations

import warnings


class ExperimentalWarning(UserWarning):
    """The feature has been tested without its hardware only.

    Attributes:
        feature: Its name, such as ``"backend 'nccl'"``.
    """

    def __init__(self, feature: str) -> None:
        self.feature = feature
        super().__init__(feature)

    def __str__(self) -> str:
        """Explains the warning, and how to silence it."""
        return (
            f"{self.feature} is experimental: it was tested with fake libraries, never on its hardware; see"
            " docs/gpu.md. Check results, and tell us. To silence this:"
            " warnings.simplefilter('ignore', raycollect.backends.experimental.ExperimentalWarning)"
        )


_has_warned = False


def warn_once(feature: str) -> None:
    """Warns of an experimental feature, once per process."""
    global _has_warned
    if not _has_warned:
        _has_warned = True
        warnings.warn(ExperimentalWarning(feature), stacklevel=3)
