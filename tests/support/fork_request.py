"""What Ray's raylet runs in place of a worker's program: has a worker forked, or becomes one (`forked_workers.py`).

It runs for each worker, without `site`, and imports what takes no time to import: a third of what it took otherwise.
"""

import _signal
import _socket
import marshal
import os
import sys

FORKS = "RAYCOLLECT_TEST_FORKS"
"""The variable of the environment that has the path of the socket of the process that forks."""
PROGRAM = "RAYCOLLECT_TEST_PROGRAM"
"""That of Ray's own program."""


def main() -> None:
    asked = {
        "program": os.environ[PROGRAM],
        "arguments": sys.argv[1:],
        "environment": dict(os.environ),
        "folder": os.getcwd(),  # noqa: PTH109 - pathlib takes longer to import than all of this
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "leads": os.getpgrp() == os.getpid(),
        "blocked": sorted(_signal.pthread_sigmask(_signal.SIG_BLOCK, ())),
    }
    streams = b"".join(number.to_bytes(4, sys.byteorder) for number in range(3))
    sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    try:
        sock.connect(os.environ[FORKS])
        sock.sendmsg([marshal.dumps(asked)], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)])
        is_forked = sock.recv(1) == b"y"
    except OSError:  # nobody forks any more
        is_forked = False
    sock.close()
    if not is_forked:
        os.execv(sys.executable, [sys.executable, asked["program"], *sys.argv[1:]])


if __name__ == "__main__":
    main()
