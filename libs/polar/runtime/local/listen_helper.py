"""A script of its own process: make a listening socket inside another process's network namespace.

Called with: pid, port, handle of a Unix socket, seconds to try. It joins the user namespace that owns the network
namespace of `pid`, then the network namespace, binds 127.0.0.1:port and passes the socket back. A process of its own
because joining a user namespace needs one thread; it imports the standard library only and runs in about 20 ms.
"""

import ctypes
import fcntl
import os
import socket
import sys
import time

NS_GET_USERNS = 0xB701
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000


def main(pid: int, port: int, channel: int, patience: float) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    # the owner of the network, not /proc/pid/ns/user: bubblewrap may have gone on into a nested one
    owner = fcntl.ioctl(network, NS_GET_USERNS)
    for handle, kind in ((owner, CLONE_NEWUSER), (network, CLONE_NEWNET)):
        if libc.setns(handle, kind) != 0:
            raise OSError(ctypes.get_errno(), f"setns {kind:#x}: {os.strerror(ctypes.get_errno())}")
    deadline = time.monotonic() + patience
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    while True:
        try:
            listener.bind(("127.0.0.1", port))
            break
        except OSError:  # the loopback device is not up yet; bubblewrap does that
            if time.monotonic() > deadline:
                raise
            time.sleep(0.001)
    listener.listen(128)
    with socket.socket(fileno=channel) as back:
        socket.send_fds(back, [b"!"], [listener.fileno()])


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
