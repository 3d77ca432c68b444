"""One BLAS thread per worker: several workers share the cores, and the bits do not depend on how a library splits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

_ONE: dict[str, str] = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS"), "1"
)

ONE_THREAD: dict[str, Any] = {
    "env_vars": {**_ONE, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
}
"""The ``runtime_env`` of all workers; they find this package wherever the driver was started."""


def set_here() -> None:
    """The same for this process; it has to come before numpy is imported."""
    os.environ.update(_ONE)
