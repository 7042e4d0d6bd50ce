"""The filter's bytes, run through a small BPF interpreter: what a kernel would decide for a call."""

from __future__ import annotations

import errno
import struct

import pytest

from harness_rl.sandboxes import seccomp

ALLOW = seccomp.RET_ALLOW


def decide(machine: str, nr: int, *arguments: int, audit: int | None = None) -> int:
    """Run the program over a `struct seccomp_data`."""
    audit = seccomp.ARCHITECTURES[machine].audit if audit is None else audit
    data = struct.pack("=IIQ6Q", nr, audit, 0, *[*arguments, *[0] * (6 - len(arguments))])
    program = seccomp.build_filter(machine)
    code = [struct.unpack_from("=HBBI", program, offset) for offset in range(0, len(program), 8)]
    accumulator, at = 0, 0
    for _ in range(4096):
        op, jump_true, jump_false, k = code[at]
        at += 1
        if op == 0x20:
            accumulator = struct.unpack_from("=I", data, k)[0]
        elif op == 0x54:
            accumulator &= k
        elif op == 0x06:
            return int(k)
        else:
            holds = {0x15: accumulator == k, 0x35: accumulator >= k, 0x45: bool(accumulator & k)}[op]
            at += jump_true if holds else jump_false
    raise AssertionError("the program does not end")


@pytest.mark.parametrize("machine", seccomp.ARCHITECTURES)
@pytest.mark.parametrize("name", ["mount", "unshare", "setns", "ptrace", "bpf", "keyctl", "io_uring_setup", "userfaultfd", "reboot"])
def test_dangerous_calls_are_refused(machine: str, name: str) -> None:
    nr = seccomp.number(seccomp.ARCHITECTURES[machine], name)
    assert nr is not None
    assert decide(machine, nr) == seccomp.RET_EPERM


def test_ordinary_calls_are_allowed() -> None:
    for nr in (0, 1, 2, 9, 39, 56, 57, 59, 61, 231, 257, 318, 332, 439):  # read write open mmap getpid clone fork execve wait4 ...
        assert decide("x86_64", nr) == ALLOW
    for nr in (29, 56, 63, 64, 93, 172, 220, 221, 222):
        assert decide("aarch64", nr) == ALLOW


def test_clone_may_fork_but_not_make_namespaces() -> None:
    assert decide("x86_64", 56, 0x01200011) == ALLOW
    for flag in (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert decide("x86_64", 56, flag | 17) == seccomp.RET_EPERM
    assert decide("x86_64", 435) == seccomp.RET_ENOSYS


def test_mknod_makes_pipes_but_no_devices() -> None:
    assert decide("x86_64", 133, 0, 0o010644) == ALLOW
    assert decide("x86_64", 133, 0, 0o020644) == seccomp.RET_EPERM
    assert decide("x86_64", 259, 0, 0, 0o060644) == seccomp.RET_EPERM
    assert decide("aarch64", 33, 0, 0, 0o020644) == seccomp.RET_EPERM


def test_only_socket_families_that_a_network_namespace_contains() -> None:
    refused = 0x00050000 | errno.EAFNOSUPPORT
    for family, answer in ((1, ALLOW), (2, ALLOW), (10, ALLOW), (16, ALLOW), (17, refused), (38, refused), (40, refused)):
        assert decide("x86_64", 41, family) == answer  # 17 packet, 38 alg, 40 vsock
        assert decide("aarch64", 198, family) == answer


def test_no_typing_into_terminals() -> None:
    assert decide("x86_64", 16, 0, 0x5412) == seccomp.RET_EPERM
    assert decide("x86_64", 16, 0, 0x541C) == seccomp.RET_EPERM
    assert decide("x86_64", 16, 0, 0x5413) == ALLOW


def test_foreign_call_tables_are_refused() -> None:
    assert decide("x86_64", 1, audit=0x40000003) == seccomp.RET_KILL_PROCESS
    assert decide("x86_64", 0x40000001) == seccomp.RET_ENOSYS
    with pytest.raises(seccomp.UnsupportedArchitecture, match="riscv64"):
        seccomp.build_filter("riscv64")
