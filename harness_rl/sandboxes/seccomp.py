"""The seccomp filter of every process that runs in a sandbox: a pure function from the machine's architecture to BPF bytes.

Invariant: a call that could leave the namespaces, trace another process, reach the host's kernel configuration or open a socket of a
family that network namespaces do not contain (vsock) is refused; everything that ordinary programs use is allowed. A foreign system-call
table (32 bit, x32) is refused whole. `clone3` answers ENOSYS, as its flags cannot be inspected; C libraries then use `clone`, whose flags
can."""

from __future__ import annotations

import errno
import struct
from dataclasses import dataclass

_LD_ABS, _JEQ, _JGE, _JSET, _AND, _RET = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_OFFSET_NR, _OFFSET_ARCH, _OFFSET_ARGS = 0, 4, 16

RET_ALLOW = 0x7FFF0000
RET_KILL_PROCESS = 0x80000000
_X32_BIT = 0x40000000


def _errno(number: int) -> int:
    return 0x00050000 | number


RET_EPERM, RET_ENOSYS, RET_EAFNOSUPPORT = _errno(errno.EPERM), _errno(errno.ENOSYS), _errno(errno.EAFNOSUPPORT)

_NAMESPACE_FLAGS = 0x7E020000
"""CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET}: clone() must not carry any."""
_S_IFMT, _S_IFCHR, _S_IFBLK = 0o170000, 0o020000, 0o060000
_FAMILIES = (1, 2, 10, 16)
"""AF_UNIX, AF_INET, AF_INET6, AF_NETLINK: the families that a network namespace contains."""
_TTY_INPUT = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX type into a terminal."""

# name: (x86_64, aarch64). None: the architecture has no such call.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "open_tree": (428, 428), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467), "unshare": (272, 97), "setns": (308, 268), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "process_madvise": (440, 440), "pidfd_getfd": (438, 438), "kcmp": (312, 272), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "quotactl": (179, 60),
    "quotactl_fd": (443, 443), "syslog": (103, 116), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "clock_adjtime": (305, 266), "adjtimex": (159, 171), "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264),
    "fanotify_init": (300, 262), "lookup_dcookie": (212, 18), "vhangup": (153, 58), "sethostname": (170, 161),
    "setdomainname": (171, 162), "nfsservctl": (180, 42), "move_pages": (279, 239), "migrate_pages": (256, 238), "mbind": (237, 235),
    "set_mempolicy": (238, 237), "set_mempolicy_home_node": (450, 450), "iopl": (172, None), "ioperm": (173, None),
    "modify_ldt": (154, None), "uselib": (134, None), "ustat": (136, None), "sysfs": (139, None),
}  # fmt: skip
_SPECIAL = {
    "clone": (56, 220),
    "clone3": (435, 435),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "ioctl": (16, 29),
}


@dataclass(frozen=True)
class Architecture:
    name: str
    audit: int
    column: int
    """Which column of the tables above is this architecture's."""


ARCHITECTURES = {
    "x86_64": Architecture("x86_64", 0xC000003E, 0),
    "aarch64": Architecture("aarch64", 0xC00000B7, 1),
}


def number(architecture: Architecture, name: str) -> int | None:
    """The system-call number of `name`, if this filter knows it."""
    row = {**_REFUSED, **_SPECIAL}.get(name)
    return row[architecture.column] if row else None


class UnsupportedArchitecture(ValueError):
    pass


def _op(code: int, k: int, jt: int = 0, jf: int = 0) -> bytes:
    return struct.pack("=HBBI", code, jt, jf, k)


def _argument(index: int) -> bytes:
    return _op(_LD_ABS, _OFFSET_ARGS + 8 * index)


def build_filter(machine: str) -> bytes:
    """BPF program (a string of `struct sock_filter`) for `machine`, as `platform.machine()` names it."""
    architecture = ARCHITECTURES.get(machine)
    if architecture is None:
        raise UnsupportedArchitecture(f"no seccomp filter for the architecture {machine!r} (have {', '.join(ARCHITECTURES)})")
    column = architecture.column

    program = [_op(_LD_ABS, _OFFSET_ARCH), _op(_JEQ, architecture.audit, 1, 0), _op(_RET, RET_KILL_PROCESS), _op(_LD_ABS, _OFFSET_NR)]
    if architecture.name == "x86_64":
        program += [_op(_JGE, _X32_BIT, 0, 1), _op(_RET, RET_ENOSYS)]

    for row in _REFUSED.values():
        if (nr := row[column]) is not None:
            program += [_op(_JEQ, nr, 0, 1), _op(_RET, RET_EPERM)]

    def special(name: str, body: list[bytes]) -> None:
        """`body` decides alone: it must end in a return on every path."""
        if (nr := _SPECIAL[name][column]) is not None:
            program.extend([_op(_JEQ, nr, 0, len(body)), *body])

    special("clone3", [_op(_RET, RET_ENOSYS)])
    special("clone", [_argument(0), _op(_JSET, _NAMESPACE_FLAGS, 0, 1), _op(_RET, RET_EPERM), _op(_RET, RET_ALLOW)])
    for name, index in (("mknod", 1), ("mknodat", 2)):
        device = [_argument(index), _op(_AND, _S_IFMT), _op(_JEQ, _S_IFCHR, 1, 0), _op(_JEQ, _S_IFBLK, 0, 1), _op(_RET, RET_EPERM)]
        special(name, [*device, _op(_RET, RET_ALLOW)])
    known = [_op(_JEQ, family, len(_FAMILIES) - position, 0) for position, family in enumerate(_FAMILIES)]
    for name in ("socket", "socketpair"):
        special(name, [_argument(0), *known, _op(_RET, RET_EAFNOSUPPORT), _op(_RET, RET_ALLOW)])
    typing = [_op(_JEQ, request, len(_TTY_INPUT) - position, 0) for position, request in enumerate(_TTY_INPUT)]
    special("ioctl", [_argument(1), *typing, _op(_RET, RET_ALLOW), _op(_RET, RET_EPERM)])

    program.append(_op(_RET, RET_ALLOW))
    return b"".join(program)
