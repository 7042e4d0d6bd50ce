"""Archives from a sandbox are hostile: nothing outside the target is written, and no link is left that leads outside."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from harness_rl.sandboxes.transfer import ArchiveRefused, pack, unpack

LIMIT = 1 << 20


def archive(*members: tuple[tarfile.TarInfo, bytes]) -> io.BytesIO:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for info, content in members:
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    file.seek(0)
    return file


def member(
    name: str, kind: bytes = tarfile.REGTYPE, link: str = "", content: bytes = b"", mode: int = 0o644
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, mode
    return info, content


def test_ordinary_trees_come_out_as_they_were(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "bin").mkdir(parents=True)
    (source / "empty").mkdir()
    (source / "bin" / "run").write_text("#!/bin/sh\n")
    (source / "bin" / "run").chmod(0o4755)
    (source / "link").symlink_to("bin/run")
    os.link(source / "bin" / "run", source / "hard")
    file = io.BytesIO()
    pack(source, file, LIMIT)
    file.seek(0)
    target = tmp_path / "target"
    assert unpack(file, target, LIMIT) == []
    assert (target / "bin" / "run").stat().st_mode & 0o7777 == 0o755
    assert (target / "hard").read_text() == "#!/bin/sh\n" and (target / "hard").stat().st_nlink == 1
    assert os.readlink(target / "link") == "bin/run" and (target / "empty").is_dir()


@pytest.mark.parametrize("name", ["../escape", "a/../../escape", "/../escape"])
def test_names_that_climb_out_are_skipped(tmp_path: Path, name: str) -> None:
    target = tmp_path / "in" / "target"
    assert unpack(archive(member(name, content=b"x")), target, LIMIT)
    assert [path.name for path in tmp_path.rglob("*")] == ["in", "target"]


def test_absolute_names_land_below_the_target(tmp_path: Path) -> None:
    unpack(archive(member("/etc/passwd", content=b"x")), tmp_path / "target", LIMIT)
    assert (tmp_path / "target" / "etc" / "passwd").read_bytes() == b"x"


@pytest.mark.parametrize("aim", ["/etc", "..", "../..", "sub/../../..", "a/../.."])
def test_symlinks_that_lead_outside_are_skipped(tmp_path: Path, aim: str) -> None:
    target = tmp_path / "target"
    skipped = unpack(archive(member("link", tarfile.SYMTYPE, aim), member("link/file", content=b"x")), target, LIMIT)
    assert any("link that leads outside" in entry for entry in skipped)
    assert not (target / "link").is_symlink() and (target / "link" / "file").read_bytes() == b"x"


def test_links_may_climb_inside(tmp_path: Path) -> None:
    target = tmp_path / "target"
    assert unpack(archive(member("a/b/link", tarfile.SYMTYPE, "../../c"), member("c", content=b"x")), target, LIMIT) == []
    assert (target / "a" / "b" / "link").read_bytes() == b"x"


def test_two_links_that_bend_each_other_do_not_escape(tmp_path: Path) -> None:
    target = tmp_path / "target"
    unpack(archive(member("d/up", tarfile.SYMTYPE, ".."), member("out", tarfile.SYMTYPE, "d/up/../secret")), target, LIMIT)
    assert not (target / "out").is_symlink()


def test_existing_links_in_the_target_are_not_followed(tmp_path: Path) -> None:
    outside, target = tmp_path / "outside", tmp_path / "target"
    outside.mkdir()
    target.mkdir()
    (target / "folder").symlink_to(outside)
    (target / "file").symlink_to(outside / "file")
    unpack(archive(member("folder/x", content=b"x"), member("file", content=b"y")), target, LIMIT)
    assert list(outside.iterdir()) == [] and (target / "folder" / "x").read_bytes() == b"x" and (target / "file").read_bytes() == b"y"


def test_hard_links_to_outside_and_special_files(tmp_path: Path) -> None:
    target = tmp_path / "target"
    with pytest.raises(ArchiveRefused, match="hard link"):
        unpack(archive(member("hard", tarfile.LNKTYPE, "/etc/shadow")), target, LIMIT)
    skipped = unpack(archive(member("pipe", tarfile.FIFOTYPE), member("disk", tarfile.BLKTYPE)), target, LIMIT)
    assert len(skipped) == 2 and list(target.iterdir()) == []


def test_size_limits(tmp_path: Path) -> None:
    big = tarfile.TarInfo("big")
    big.size = LIMIT + 1
    file = io.BytesIO(big.tobuf())
    with pytest.raises(ArchiveRefused, match="1 MiB"):
        unpack(file, tmp_path / "target", LIMIT)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "big").write_bytes(b"x" * (LIMIT + 1))
    with pytest.raises(ArchiveRefused, match="larger than the transfer limit"):
        pack(tmp_path / "source", io.BytesIO(), LIMIT)
