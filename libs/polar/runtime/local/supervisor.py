"""A script of its own process: run one command and outlive it until every process that it started is dead.

It makes itself the reaper of orphans (PR_SET_CHILD_SUBREAPER), so a daemon that left its session, its group and its
parent becomes its child and is found; no child left means nothing left. It kills when the command has ended, and when
the control handle ends: the node asked for it, or the node itself is dead. Standard library only.

Called with the handles of: the plan (JSON), control (a byte starts the command), status (takes the exit code).
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def descendants() -> list[int]:
    """Ids of all processes below this one."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b") ")[2].split()[1])
            except (OSError, IndexError):
                continue  # it ended meanwhile
            children.setdefault(parent, []).append(int(name))
    found, queue = [], [os.getpid()]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def kill_rest() -> None:
    """Kill everything below this process and reap it; returns when there is nothing."""
    while True:
        for pid in descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return


def become(plan: dict[str, Any], libc: ctypes.CDLL, started: int) -> None:
    """In the child: turn into the command. Never returns."""
    code = 1
    try:
        os.setsid()
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and what is ignored is inherited
            signal.signal(number, signal.SIG_DFL)
        for kind, value in plan["rlimits"]:
            resource.setrlimit(kind, (value, value))
        os.chdir(plan["cwd"])
        os.write(started, b"!")
        code = 127
        os.execvpe(plan["command"][0], plan["command"], plan["env"])
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        what = plan["cwd"] if code == 1 else plan["command"][0]
        code = 126 if code == 127 and not missing else code
        os.write(2, f"{what}: {error.strerror}\n".encode())
    finally:
        os._exit(code)


def main(plan_fd: int, control: int, status: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER")
    with os.fdopen(plan_fd, "rb") as file:
        plan = json.load(file)
    if not os.read(control, 1):
        return
    came, started = os.pipe2(os.O_CLOEXEC)
    for handle in (control, status):
        os.set_inheritable(handle, False)
    pid = os.fork()
    if pid == 0:
        become(plan, libc, started)
    os.close(started)
    quiet = os.open(os.devnull, os.O_RDWR)
    for handle in (0, 1, 2):  # the command's pipes must end with the command
        os.dup2(quiet, handle)
    child = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(child, select.POLLIN)
    poll.register(control, select.POLLIN | select.POLLHUP)
    poll.poll()
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    kill_rest()
    if ended is not None and os.read(came, 1):
        code = ended.si_status if ended.si_code == os.CLD_EXITED else 128 + ended.si_status
        os.write(status, json.dumps({"exit-code": code}).encode())


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
