"""What counts as a replaced program, on two plain trees; test_sandbox.py has the same on a real overlay."""

from __future__ import annotations

import os
import shutil
import stat
import struct
from pathlib import Path

import pytest

from harness_rl.sandboxes.changed import Changes
from harness_rl.sandboxes.launch import DEFAULT_PATH
from harness_rl.sandboxes.loader import same_libraries

SITE = "usr/local/lib/python3.11/dist-packages"


def cache(*libraries: tuple[str, str]) -> bytes:
    """A loader cache with these (name, path) entries."""
    start = 48 + 24 * len(libraries)
    entries, texts = b"", b""
    for name, path in libraries:
        key = start + len(texts)
        texts += name.encode() + b"\0"
        entries += struct.pack("=iIIIQ", 0x303, key, start + len(texts), 0, 0)
        texts += path.encode() + b"\0"
    return b"glibc-ld.so.cache1.1" + struct.pack("=II20x", len(libraries), len(texts)) + entries + texts


LIBC = ("libc.so.6", "/lib/libc.so.6")


class Trees:
    def __init__(self, folder: Path) -> None:
        self.upper, self.image = folder / "upper", folder / "image"
        self.upper.mkdir()
        for name in ("usr/bin/bash", "usr/bin/python3.11", "usr/lib/libc.so.6", "usr/lib/python3.11/json/decoder.py", "opt/app/main.py"):
            self.write(self.image, name, "old")
        for name in ("usr/lib/python3.11/os.py", "usr/lib/python3/dist-packages/pytest/__init__.py", "usr/share/doc/x", "etc/hosts"):
            self.write(self.image, name, "old")
        self.write(self.image, "etc/passwd", "root:x:0:0:root:/root:/bin/bash\n")
        self.write(self.image, "root/.local/bin/tool", "old")
        self.write(self.image, "root/.local/share/state", "old")
        (self.image / "app").mkdir()
        (self.image / "usr/sbin").mkdir()
        (self.image / SITE).mkdir(parents=True)
        (self.image / "usr/local/bin").mkdir()
        (self.image / "etc/ld.so.cache").write_bytes(cache(LIBC))
        (self.image / "bin").symlink_to("usr/bin")
        (self.image / "lib").symlink_to("usr/lib")
        (self.image / "usr/bin/python3").symlink_to("python3.11")

    def write(self, tree: Path, name: str, text: str = "new") -> None:
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def find(self, work: str = "/app", search: str = DEFAULT_PATH) -> Changes:
        upper, image = (os.open(tree, os.O_RDONLY) for tree in (self.upper, self.image))
        try:
            changes = Changes(upper, image, search.split(":"), work)
            changes.find()
            return changes
        finally:
            os.close(upper)
            os.close(image)


@pytest.fixture
def trees(tmp_path: Path) -> Trees:
    return Trees(tmp_path)


REPLACED = [
    ("usr/bin/bash", ["/usr/bin/bash"]),
    ("bin/bash", ["/bin"]),
    ("lib/libc.so.6", ["/lib"]),
    ("usr/lib/libc.so.6", ["/usr/lib/libc.so.6"]),
    ("usr/lib/python3.11/json/decoder.py", ["/usr/lib/python3.11/json/decoder.py"]),
    ("usr/local/bin/bash", ["/usr/local/bin/bash (in front of another)"]),
    ("usr/lib/python3.11/os/__init__.py", ["/usr/lib/python3.11/os (new)"]),
    ("usr/lib/python3.11/os.cpython-311-x86_64-linux-gnu.so", ["/usr/lib/python3.11/os.cpython-311-x86_64-linux-gnu.so (new)"]),
    ("usr/lib/python311.zip", ["/usr/lib/python311.zip (new)"]),
    ("usr/bin/pyvenv.cfg", ["/usr/bin/pyvenv.cfg (new)"]),
    (f"{SITE}/evil.pth", [f"/{SITE}/evil.pth (loaded by itself)"]),
    (f"{SITE}/pytest.py", [f"/{SITE}/pytest.py (in front of another)"]),
    (f"{SITE}/usercustomize/__init__.py", [f"/{SITE}/usercustomize (loaded by itself)"]),
    ("usr/lib/python3.11/pytest.py", ["/usr/lib/python3.11/pytest.py (in front of another)"]),
    (
        "root/.local/lib/python3.11/site-packages/a.pth",
        ["/root/.local/lib/python3.11/site-packages/a.pth (loaded by itself)"],
    ),
    ("root/.local/bin/tool", ["/root/.local/bin/tool"]),
    ("etc/ld.so.preload", ["/etc/ld.so.preload (new)"]),
    ("etc/passwd", ["/etc/passwd"]),
    ("etc/ld.so.cache", ["/etc/ld.so.cache"]),
    ("conftest.py", ["/conftest.py (new)"]),
]


@pytest.mark.parametrize(("name", "found"), REPLACED)
def test_what_is_found_first_or_loaded_by_itself_counts(trees: Trees, name: str, found: list[str]) -> None:
    trees.write(trees.upper, name)
    assert trees.find().replaced == found


@pytest.mark.parametrize(
    "name",
    [
        "usr/bin/newtool", "usr/local/bin/mytool", f"{SITE}/requests/__init__.py", f"{SITE}/requests-2.0.dist-info/RECORD", "app/pytest.py",
        "root/.local/lib/python3.11/site-packages/requests.py", "root/.bashrc", "etc/hosts", "etc/nginx/nginx.conf", "usr/share/doc/x",
        "usr/lib/libnew.so.1", "var/lib/dpkg/status", "opt/new/bin/bash", "tmp/bash", "home/me/.local/bin/x",
        "root/.local/share/state",
    ],
)  # fmt: skip
def test_an_installed_package_and_the_agents_own_work_do_not_count(trees: Trees, name: str) -> None:
    trees.write(trees.upper, name)
    changes = trees.find()
    assert (changes.replaced, changes.caches) == ([], [])


def test_the_same_content_again_is_no_change(trees: Trees) -> None:
    trees.write(trees.upper, "usr/bin/bash", "old")
    (trees.upper / "usr/bin/python3").symlink_to("python3.11")
    assert trees.find().replaced == []
    (trees.upper / "usr/bin/python3").unlink()
    (trees.upper / "usr/bin/python3").symlink_to("/tmp/python")
    (trees.upper / "usr/bin/bash").chmod(0o600)
    assert sorted(trees.find().replaced) == ["/usr/bin/bash", "/usr/bin/python3"]


def test_accounts_and_libraries_may_be_added(trees: Trees) -> None:
    trees.write(trees.upper, "etc/passwd", "root:x:0:0:root:/root:/bin/bash\nme:x:1000:1000::/home/me:/bin/sh\n")
    (trees.upper / "etc/ld.so.cache").write_bytes(cache(LIBC, ("libnew.so.1", "/usr/lib/libnew.so.1")))
    assert trees.find().replaced == []
    trees.write(trees.upper, "etc/passwd", "root:x:0:0:root:/tmp:/bin/bash\n")
    (trees.upper / "etc/ld.so.cache").write_bytes(cache(("libc.so.6", "/tmp/libc.so.6"), LIBC))
    assert sorted(trees.find().replaced) == ["/etc/ld.so.cache", "/etc/passwd"]
    assert not same_libraries(cache(LIBC), cache(LIBC)[:60])


@pytest.mark.root
def test_removed_programs_count(trees: Trees) -> None:
    (trees.upper / "usr/bin").mkdir(parents=True)
    os.mknod(trees.upper / "usr/bin/bash", stat.S_IFCHR, 0)
    os.mknod(trees.upper / "app", stat.S_IFCHR, 0)
    os.mknod(trees.upper / "lib", stat.S_IFCHR, 0)
    assert sorted(trees.find().replaced) == ["/lib", "/usr/bin/bash"]


def test_a_link_on_the_way_to_modules_counts(trees: Trees) -> None:
    shutil.rmtree(trees.image / "root/.local")
    (trees.upper / "root").mkdir()
    (trees.upper / "root/.local").symlink_to("/tmp/mine")
    assert trees.find().replaced == ["/root/.local (a link)"]


def test_a_plugin_that_pytest_loads_by_itself_counts(trees: Trees) -> None:
    trees.write(trees.upper, f"{SITE}/mine-1.dist-info/entry_points.txt", "[pytest11]\nmine = mine\n")
    assert trees.find().replaced == [f"/{SITE}/mine-1.dist-info (loaded by itself)"]


def test_new_compiled_modules_are_to_be_removed(trees: Trees) -> None:
    trees.write(trees.upper, "usr/lib/python3.11/__pycache__/os.cpython-311.pyc")
    changes = trees.find()
    assert (changes.replaced, changes.caches) == ([], ["usr/lib/python3.11/__pycache__"])


def test_the_tasks_own_folder_may_lie_among_programs(trees: Trees) -> None:
    trees.write(trees.upper, "opt/app/main.py")
    assert trees.find(work="/opt/app").replaced == []
    assert trees.find(work="/app").replaced == ["/opt/app/main.py"]
    trees.write(trees.upper, "usr/bin/bash")
    assert "/usr/bin/bash" in trees.find(work="/usr").replaced
