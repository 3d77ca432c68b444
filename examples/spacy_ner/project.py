"""Runs a module of this package from the project's own folder, for ``project.yml``.

python project.py <module> [arguments]
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    module = f"examples.spacy_ner.{sys.argv[1]}"
    sys.argv = sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
