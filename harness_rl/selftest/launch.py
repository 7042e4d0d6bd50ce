"""Becomes a client in a network namespace of its own, in which only the handed-over port leads anywhere.

`unshare --net python launch.py FD PORT COMMAND...`: brings loopback up, sends a listener on PORT over the Unix socket FD, runs COMMAND.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys

SIOCSIFFLAGS, IFF_UP, IFF_RUNNING = 0x8914, 0x1, 0x40


def main() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP | IFF_RUNNING))
    with socket.create_server(("127.0.0.1", int(sys.argv[2])), backlog=64) as listener, socket.socket(fileno=int(sys.argv[1])) as parent:
        socket.send_fds(parent, [b"listener"], [listener.fileno()])
    os.execvp(sys.argv[3], sys.argv[3:])


if __name__ == "__main__":
    main()
