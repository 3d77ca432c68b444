"""The old path of what backend authors now import from `raycollect.backends`."""

import warnings

from raycollect.core.protocols import *  # noqa: F403 - all that was there

warnings.warn(
    "raycollect.contracts has moved: import its names from raycollect.backends", DeprecationWarning, stacklevel=2
)
