"""torch finds the backend by the package's entry point, which imports next to nothing."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

pytest.importorskip("torch")

PROGRAM = """
import sys

from raycollect.torch_autoload import autoload
import torch

autoload()
autoload()
del torch.distributed.Backend._plugins
autoload()  # of a torch that is not as expected
ours = sorted(name for name in sys.modules if name.startswith("raycollect"))
print("raycollect" in torch.distributed.Backend.backend_list, ours)
"""


def test_the_entry_point_imports_no_other_module_of_the_package() -> None:
    (entry_point,) = entry_points(group="torch.backends", name="raycollect")
    assert entry_point.value == "raycollect.torch_autoload:autoload"
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=120)
    assert run.stdout.split("\n")[0] == "True ['raycollect', 'raycollect.torch_autoload']"
