"""Files of safetensors: written, and how much of them is in memory."""

from __future__ import annotations

import json
import re
from pathlib import Path

from raycollect.weights.safetensors import _DTYPES

NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def write(path, tensors, align=8):
    """Writes a file as the format's page says."""
    header, at = {"__metadata__": {"format": "np"}}, 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % align)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensor.tobytes() for tensor in tensors.values()))
    return path


def resident(path):
    """How much of a file this process has in its memory, in bytes."""
    sizes_kb = re.findall(
        rf"{re.escape(str(path))}\n(?:\w+:.*\n)*?Rss: +(\d+) kB", Path("/proc/self/smaps").read_text()
    )
    return sum(map(int, sizes_kb)) << 10
