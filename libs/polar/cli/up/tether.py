"""Runs a program that dies with its parent: `python -I -S tether.py PARENT_PID PROGRAM ARGUMENTS…`.

The kernel is asked to kill this process when its parent is gone, however that came, and then it becomes PROGRAM: the
request outlives exec. A process of its own and not a `preexec_fn`, which may deadlock where the parent has threads.
On systems without prctl (macOS) the program runs untethered. Standard library only: it starts in 20 ms.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, program = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
        if os.getppid() != parent:  # it died before the request
            sys.exit(1)
    os.execv(program[0], program)


if __name__ == "__main__":
    main()
