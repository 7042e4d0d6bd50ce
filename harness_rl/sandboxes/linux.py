"""The few Linux calls that Python lacks, as thin ctypes wrappers. Invariant: each either does what its name says or raises OSError with
the call's name.

`load()` must run before a process enters a sandbox: afterwards nothing may be loaded from the file system, which then belongs to the agent.
"""

from __future__ import annotations

import ctypes
import os
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MNT_DETACH = 0x2

_PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15
_PR_SET_SECCOMP = 22
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION_3 = 0x20080522


class _SockFprog(ctypes.Structure):
    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_void_p))


class Linux:
    """The C library, loaded once per process that needs it."""

    def __init__(self, libc: ctypes.CDLL) -> None:
        self.libc = libc

    def _check(self, result: int, call: str) -> None:
        if result != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{call}: {os.strerror(number)}")

    def unshare(self, flags: int) -> None:
        self._check(self.libc.unshare(flags), "unshare")

    def setns(self, fd: int, flags: int) -> None:
        """Join the namespaces `flags` of the process that the pidfd `fd` names (or the one namespace that `fd` is)."""
        self._check(self.libc.setns(fd, flags), "setns")

    def mount(self, source: str, target: str, fstype: str, flags: int = 0, options: str = "") -> None:
        self._check(
            self.libc.mount(source.encode(), target.encode(), fstype.encode(), ctypes.c_ulong(flags), options.encode()),
            f"mount {fstype} on {target}",
        )

    def detach(self, target: str) -> None:
        self._check(self.libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")

    def _prctl(self, option: int, value: int | ctypes.c_void_p, call: str, extra: int | ctypes.c_void_p = 0) -> None:
        self._check(self.libc.prctl(option, value, extra, 0, 0), call)

    def set_undumpable(self) -> None:
        """No process of another user namespace may trace this one or read its memory."""
        self._prctl(_PR_SET_DUMPABLE, 0, "prctl(PR_SET_DUMPABLE)")

    def set_name(self, name: str) -> None:
        buffer = ctypes.create_string_buffer(name.encode()[:15])
        self._prctl(_PR_SET_NAME, ctypes.cast(buffer, ctypes.c_void_p), "prctl(PR_SET_NAME)")

    def no_new_privileges(self) -> None:
        self._prctl(_PR_SET_NO_NEW_PRIVS, 1, "prctl(PR_SET_NO_NEW_PRIVS)")

    def drop_bounding(self, keep: frozenset[int], last: int) -> None:
        for capability in range(last + 1):
            if capability not in keep:
                self._prctl(_PR_CAPBSET_DROP, capability, f"prctl(PR_CAPBSET_DROP, {capability})")

    def set_capabilities(self, keep: frozenset[int]) -> None:
        """Effective and permitted become `keep`, inheritable becomes empty."""
        mask = sum(1 << capability for capability in keep)
        low, high = mask & 0xFFFFFFFF, mask >> 32
        header = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITY_VERSION_3, 0))
        data = ctypes.create_string_buffer(struct.pack("=6I", low, low, 0, high, high, 0))
        self._check(self.libc.capset(header, data), "capset")

    def install_filter(self, program: bytes) -> None:
        """Install a seccomp filter, a string of `struct sock_filter`, for this thread and everything it executes."""
        buffer = ctypes.create_string_buffer(program, len(program))
        prog = _SockFprog(len(program) // 8, ctypes.cast(buffer, ctypes.c_void_p))
        pointer = ctypes.cast(ctypes.pointer(prog), ctypes.c_void_p)
        self._prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, "prctl(PR_SET_SECCOMP)", pointer)


def load() -> Linux:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, unsigned = ctypes.c_void_p, ctypes.c_ulong
    libc.prctl.argtypes = (ctypes.c_int, pointer, pointer, unsigned, unsigned)
    libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, unsigned, ctypes.c_char_p)
    return Linux(libc)


def last_capability() -> int:
    with open("/proc/sys/kernel/cap_last_cap", encoding="ascii") as file:
        return int(file.read())
