"""What a machine lacks for the local sandbox is named, each with its remedy, before anything starts."""

from __future__ import annotations

import os
import platform
import shutil
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest

from harness_rl.errors import UserError
from harness_rl.sandboxes import preflight
from harness_rl.sandboxes.cgroups import CgroupUnavailable
from harness_rl.sandboxes.preflight import refuse_unless_able

_USAGE = namedtuple("usage", "total used free")


def _no_cgroups() -> Any:
    raise CgroupUnavailable("no pids controller")


@pytest.mark.parametrize(
    ("where", "name", "value", "words"),
    [
        (os, "geteuid", lambda: 1000, "root: user id 1000 (run as root, or use a remote sandbox)"),
        (platform, "release", lambda: "4.19.0-5-amd64", "kernel: 4.19.0-5-amd64 (needs Linux 5.11 or later)"),
        (platform, "machine", lambda: "riscv64", "seccomp: riscv64 (only on "),
        (shutil, "which", lambda _: None, "apt-get install bubblewrap"),
        (shutil, "disk_usage", lambda _: _USAGE(9, 9, 100 << 20), "disk: 100 MiB free at "),
        (preflight, "detect", _no_cgroups, "cgroups: no pids controller"),
        (preflight, "_in_child", lambda _: "unshare: Operation not permitted", "user.max_user_namespaces"),
    ],
)
def test_each_lack_is_one_line_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, where: object, name: str, value: Callable[..., Any], words: str
) -> None:
    monkeypatch.setattr(where, name, value)
    with pytest.raises(UserError) as refused:
        refuse_unless_able()
    assert words in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.root
def test_this_machine_can() -> None:
    refuse_unless_able()
