"""Copies between many places of this process's memory and one contiguous place, by one system call per 1,024 places.

The kernel copies from and to the memory of a process by vectors (process_vm_readv), this process's own included. For
hundreds of arrays of at most 256 bytes that takes down to half the time of copies that Python starts one by one; larger
arrays are copied slower, as the kernel looks up each page.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any

_MOST = 1024  # vectors of one call
_ENTRY_NBYTES = 16


class MemoryVectors:
    """Many places in this process's memory, of at least one byte each.

    Args:
        places: The address and the bytes of each.
    """

    __slots__ = ("_calls", "_table")

    def __init__(self, places: Sequence[tuple[int, int]]) -> None:
        self._table = (ctypes.c_size_t * (2 * len(places)))(*[number for place in places for number in place])
        self._calls: list[tuple[int, int, int]] = []  # (address of the first vector, their number, their bytes)
        for at in range(0, len(places), _MOST):
            some = places[at : at + _MOST]
            nbytes = sum(nbytes for _, nbytes in some)
            self._calls.append((ctypes.addressof(self._table) + at * _ENTRY_NBYTES, len(some), nbytes))

    def gather(self, address: int) -> bool:
        """Copies all places to one after the other from `address` on; False: the system does not allow it."""
        return self._call("process_vm_writev", address)

    def scatter(self, address: int) -> bool:
        """Copies what lies at `address` to all places; False: the system does not allow it."""
        return self._call("process_vm_readv", address)

    def _call(self, name: str, address: int) -> bool:
        call, pid = _function(name), os.getpid()
        if call is None:
            return False
        for vectors, count, nbytes in self._calls:
            copied = call(pid, vectors, count, (ctypes.c_size_t * 2)(address, nbytes), 1, 0)
            if copied != nbytes:
                if copied < 0:  # such as by a container's filter of system calls: it would refuse the next ones too
                    _functions[name] = None
                return False
            address += nbytes
        return True


_functions: dict[str, Any] = {}  # None: the system refuses it


def _function(name: str) -> Any:
    if name in _functions:
        return _functions[name]
    span, number = ctypes.c_void_p, ctypes.c_ulong
    function = _functions[name] = getattr(ctypes.CDLL(None), name)
    function.argtypes = (ctypes.c_int, span, number, span, number, number)
    function.restype = ctypes.c_ssize_t
    return function
