"""Files in and out of a sandbox. Invariant: the host never opens a path of the sandbox's, and an archive made inside can neither write
outside the target folder nor leave a link there that a later write would follow.

Archives are packed and unpacked by `tar` *inside* the sandbox and cross over as a stream in an unnamed file. What comes out is data of
the agent's: `unpack` walks every name from the target folder with O_NOFOLLOW, writes new files only, copies hard links, makes symbolic
links last and only those that stay inside the tree, and skips device nodes, pipes and sockets. What a session may leave on the host is
bounded in total (`download_mb`): quota that a sparse file does not use inside, it would use here."""

from __future__ import annotations

import asyncio
import os
import posixpath
import shutil
import stat
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from .errors import RuntimeRequestError
from .limits import ExecResult
from .sandbox import Sandbox

_UNPACK = 'mkdir -p -- "$1" && exec tar -xf - --no-same-owner -p -C "$1"'
_RECEIVE = 'mkdir -p -- "$(dirname -- "$1")" && rm -f -- "$1" && cat > "$1" && chmod "$2" "$1"'
_PACK = 'exec tar -cf - -C "$1" --one-file-system --sort=name .'
_SEND = 'test -f "$1" && exec cat -- "$1"'
VERIFIER_OUTPUT = "/logs/verifier"
_MAX_MEMBERS = 200_000
_TRANSFER_TIMEOUT_S = 600.0


class ArchiveRefused(ValueError):
    """The archive breaks a limit or is damaged."""


async def upload_dir(sandbox: Sandbox, source: Path, target: str) -> None:
    """Copy the content of a host folder into a folder of the sandbox, owned by its root."""
    with tempfile.TemporaryFile() as file:
        await asyncio.to_thread(pack, source, file, sandbox.spec.limits.transfer_bytes)
        file.seek(0)
        _check(await _run(sandbox, _UNPACK, [target], sandbox.spec.limits.transfer_bytes, stdin=file), f"upload to {target}")


async def upload_file(sandbox: Sandbox, source: Path, target: str) -> None:
    with tempfile.TemporaryFile() as file:
        with source.open("rb") as original:
            mode = stat.S_IMODE(os.fstat(original.fileno()).st_mode) & 0o755 | 0o444
            await asyncio.to_thread(shutil.copyfileobj, original, file)
        file.seek(0)
        result = await _run(sandbox, _RECEIVE, [target, f"{mode:o}"], sandbox.spec.limits.transfer_bytes, stdin=file)
        _check(result, f"upload to {target}")


async def download_dir(sandbox: Sandbox, source: str, target: Path) -> list[str]:
    """Copy the content of a folder of the sandbox into a host folder; returns what was skipped."""
    left = _allowance(sandbox, source)
    with tempfile.TemporaryFile() as file:
        result = await _run(sandbox, _PACK, [source], left, stdout=file)
        changed = result.code == 1 and all(line.endswith(b"file changed as we read it") for line in result.stderr.splitlines() if line)
        if not changed:
            _check(result, f"download of {source}")
        _charge(sandbox, source, file)
        file.seek(0)
        try:
            return await asyncio.to_thread(unpack, file, target, left)
        except (ArchiveRefused, tarfile.TarError, OSError) as error:
            raise RuntimeRequestError(f"download of {source} failed: {error}") from error


async def download_file(sandbox: Sandbox, source: str, target: Path) -> None:
    left = _allowance(sandbox, source)
    with tempfile.TemporaryFile() as file:
        _check(await _run(sandbox, _SEND, [source], left, stdout=file), f"download of {source}")
        _charge(sandbox, source, file)
        file.seek(0)
        await asyncio.to_thread(_store, file, target)


def _account(source: str) -> str:
    """What the agent left cannot use up what the verifier's output may take: its verdict would be lost."""
    return "verifier" if f"{posixpath.normpath(source)}/".startswith(f"{VERIFIER_OUTPUT}/") else "agent"


def _allowance(sandbox: Sandbox, source: str) -> int:
    limits = sandbox.spec.limits
    left = limits.download_bytes - sandbox.downloaded.get(_account(source), 0)
    if left <= 0:
        raise RuntimeRequestError(f"download of {source} refused: the session's {limits.download_mb} MiB (sandbox.download_mb) are used up")
    return left


def _charge(sandbox: Sandbox, source: str, file: IO[bytes]) -> None:
    account = _account(source)
    sandbox.downloaded[account] = sandbox.downloaded.get(account, 0) + os.fstat(file.fileno()).st_size


async def _run(
    sandbox: Sandbox, script: str, arguments: Sequence[str], limit: int, *, stdin: IO[bytes] | None = None, stdout: IO[bytes] | None = None
) -> ExecResult:
    return await sandbox.exec(
        ["/bin/sh", "-c", script, "sh", *arguments],
        user=0,
        timeout_s=_TRANSFER_TIMEOUT_S,
        stdin=None if stdin is None else stdin.fileno(),
        stdout=None if stdout is None else stdout.fileno(),
        file_bytes=limit,
    )


def _check(result: ExecResult, what: str) -> None:
    if result.code != 0:
        raise RuntimeRequestError(f"{what} failed ({result.code}): {result.stderr.decode('utf-8', 'replace').strip()[-300:]}")


def pack(source: Path, file: IO[bytes], limit: int) -> None:
    """Write the content of `source` (not the folder itself) as a tar stream, owned by root, links kept as links."""

    def ours(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if not (member.isfile() or member.isdir() or member.issym() or member.islnk()):
            return None
        member.uid = member.gid = 0
        member.uname = member.gname = "root"
        if file.tell() + member.size > limit:
            raise ArchiveRefused(f"{source} is larger than the transfer limit of {limit >> 20} MiB")
        return member

    with tarfile.open(fileobj=file, mode="w") as archive:
        for child in sorted(source.iterdir()):
            archive.add(child, arcname=child.name, filter=ours)


def _store(file: IO[bytes], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_symlink() or target.is_file():
        target.unlink()
    with target.open("xb") as copy:
        shutil.copyfileobj(file, copy)


def unpack(file: IO[bytes], target: Path, limit: int) -> list[str]:
    """Unpack an untrusted tar stream below `target`; returns the names that were skipped, each with the reason."""
    target.mkdir(parents=True, exist_ok=True)
    skipped: list[str] = []
    links: list[tuple[list[str], str]] = []
    total = 0
    root = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            for count, member in enumerate(archive):
                total += member.size
                if count >= _MAX_MEMBERS or total > limit:
                    raise ArchiveRefused(f"the archive holds more than {_MAX_MEMBERS} entries or {limit >> 20} MiB")
                parts = _parts(member.name)
                if parts is None:
                    skipped.append(f"{member.name}: leads outside")
                elif member.isdir():
                    os.close(_folder(root, parts))
                elif member.isfile() or member.islnk():
                    content = archive.extractfile(member)
                    if content is None or not parts:
                        skipped.append(f"{member.name}: no content")
                    else:
                        _write(root, parts, content, member.mode)
                elif member.issym() and parts and _inside(parts, member.linkname):
                    links.append((parts, member.linkname))
                else:
                    skipped.append(f"{member.name}: {'link that leads outside' if member.issym() else 'special file'}")
        for parts, aim in links:
            _link(root, parts, aim, skipped)
    except KeyError as error:
        raise ArchiveRefused(f"a hard link names an entry that is not in the archive: {error}") from error
    finally:
        os.close(root)
    return skipped


def _parts(name: str) -> list[str] | None:
    """Components of a member's name below the target; None if it climbs out."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    return None if ".." in parts or "\0" in name else parts


def _inside(parts: list[str], aim: str) -> bool:
    """Whether a symbolic link at `parts` that points to `aim` stays below the target. It may climb only at its start, through real
    folders: after a name, which may be another link, ".." would climb from wherever that link leads."""
    steps = [step for step in aim.split("/") if step not in ("", ".")]
    climbs = next((index for index, step in enumerate(steps) if step != ".."), len(steps))
    return not aim.startswith("/") and ".." not in steps[climbs:] and climbs < len(parts)


def _folder(root: int, parts: list[str]) -> int:
    """Open (and make) a folder below `root`, following no link: whatever else has the name gives way."""
    fd = os.dup(root)
    for part in parts:
        try:
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
        except FileNotFoundError:
            os.mkdir(part, 0o755, dir_fd=fd)
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
        except OSError:
            os.unlink(part, dir_fd=fd)
            os.mkdir(part, 0o755, dir_fd=fd)
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
        os.close(fd)
        fd = below
    return fd


def _clear(folder: int, name: str) -> bool:
    """Make room for a new entry; False if a folder is in the way."""
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _write(root: int, parts: list[str], content: IO[bytes], mode: int) -> None:
    folder = _folder(root, parts[:-1])
    try:
        _clear(folder, parts[-1])
        fd = os.open(parts[-1], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644 | (mode & 0o111), dir_fd=folder)
        with open(fd, "wb") as file:
            shutil.copyfileobj(content, file, 1 << 20)
    finally:
        os.close(folder)


def _link(root: int, parts: list[str], aim: str, skipped: list[str]) -> None:
    folder = _folder(root, parts[:-1])
    try:
        if _clear(folder, parts[-1]):
            os.symlink(aim, parts[-1], dir_fd=folder)
        else:
            skipped.append(f"{'/'.join(parts)}: a folder has the name of a link")
    finally:
        os.close(folder)
