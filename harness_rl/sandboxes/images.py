"""Task layers: what a task's Dockerfile adds to the root file system. Invariant: the layer under a name is complete and made from exactly
the files and instructions that the name's hash covers.

Built once in a sandbox that has the host's network and writes straight into the layer; sessions mount it read-only below their own writes.
"""

from __future__ import annotations

import asyncio
import glob
import hashlib
import json
import logging
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from harness_rl.paths import cache_dir

from .buildhost import build_environment
from .cache import building, content_key
from .dockerfile import Copy, Recipe, Run, parse
from .errors import RuntimeRequestError, SandboxBuildFailedError
from .limits import SandboxLimits
from .rootfs import KNOWN_IMAGES, ensure_rootfs
from .sandbox import Sandbox, SandboxSpec
from .transfer import upload_dir, upload_file

_FORMAT = 1
_IGNORED = {".git", "__pycache__", ".DS_Store"}
_BUILD_LIMITS = SandboxLimits(cpus=4, memory_mb=4096, pids=2048, boot_timeout_s=60)


@dataclass(frozen=True)
class TaskImage:
    """What a session of a task starts from."""

    lowers: tuple[Path, ...]
    env: dict[str, str] = field(default_factory=dict)
    workdir: str | None = None


def check_definition(folder: Path, docker_image: str | None) -> Recipe:
    """What the environment folder of a task asks for. Raises SandboxBuildFailedError for whatever this sandbox cannot do."""
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if (folder / name).exists():
            raise SandboxBuildFailedError(
                f"{folder / name}: this sandbox has no Docker Compose; use a Dockerfile or another environment type"
            )
    dockerfile = folder / "Dockerfile"
    if dockerfile.exists():
        return parse(dockerfile, KNOWN_IMAGES)
    if docker_image and docker_image not in KNOWN_IMAGES:
        raise SandboxBuildFailedError(f"docker_image {docker_image!r} is not available in this sandbox (known: {', '.join(KNOWN_IMAGES)})")
    return Recipe()


async def prepare(folder: Path, docker_image: str | None, rootfs: Path | None, timeout_s: float, log: logging.Logger) -> TaskImage:
    """The layers for a task, built if they are not in the cache. Raises SandboxBuildFailedError."""
    recipe = check_definition(folder, docker_image)
    base = await asyncio.to_thread(ensure_rootfs) if rootfs is None else rootfs
    if not recipe.steps:
        return TaskImage((base,), recipe.env, recipe.workdir)
    key = content_key([_FORMAT, base.name, (folder / "Dockerfile").read_text(), await asyncio.to_thread(_context_hash, folder)])
    layer = cache_dir("layers", f"task-{key}")
    if not layer.is_dir():
        await _build_locked(layer, folder, recipe, base, timeout_s, log)
    return TaskImage((layer, base), recipe.env, recipe.workdir)


async def _build_locked(layer: Path, folder: Path, recipe: Recipe, base: Path, timeout_s: float, log: logging.Logger) -> None:
    async with building(layer) as draft:
        if draft is not None:
            log.info("building the task layer of %s", folder)
            await _build(draft, folder, recipe, base, timeout_s, log)
            (draft / "upper").rename(layer)


async def _build(work: Path, folder: Path, recipe: Recipe, base: Path, timeout_s: float, log: logging.Logger) -> None:
    host = await asyncio.to_thread(build_environment)
    spec = SandboxSpec(lowers=(base,), limits=_BUILD_LIMITS, host_network=True, upper=work, binds=host.binds)
    sandbox = await Sandbox.start(spec, log=log)
    try:
        for step in recipe.steps:
            if isinstance(step, Run):
                await _command(sandbox, step, host.env, timeout_s)
            else:
                await _copy(sandbox, folder, step)
    except RuntimeRequestError as error:
        raise SandboxBuildFailedError(f"{folder / 'Dockerfile'}: {error}") from error
    finally:
        await sandbox.stop()


async def _command(sandbox: Sandbox, step: Run, host_env: dict[str, str], timeout_s: float) -> None:
    result = await sandbox.exec(
        step.argv, env={**host_env, "DEBIAN_FRONTEND": "noninteractive", **dict(step.env)}, cwd=step.cwd, timeout_s=timeout_s
    )
    if result.code != 0:
        tail = " | ".join((result.stderr or result.stdout).decode("utf-8", "replace").strip().splitlines()[-4:])
        raise SandboxBuildFailedError(f"RUN {step.argv[-1][:200]} failed ({result.code}): {tail[-600:]}")


async def _copy(sandbox: Sandbox, folder: Path, step: Copy) -> None:
    for source in await asyncio.to_thread(_sources, folder, step):
        with tempfile.TemporaryDirectory() as staged:
            if await asyncio.to_thread(_stage, source, Path(staged)):
                await upload_dir(sandbox, Path(staged), step.target)
            else:
                await upload_file(sandbox, source, step.target + source.name if step.target.endswith("/") else step.target)


def _sources(folder: Path, step: Copy) -> list[Path]:
    """The files and folders that a COPY names; all below `folder`, symbolic links resolved."""
    sources: list[Path] = []
    for pattern in step.sources:
        found = [folder] if pattern in (".", "./") else [Path(path) for path in sorted(glob.glob(str(folder / pattern.lstrip("/"))))]
        if not found:
            raise SandboxBuildFailedError(f"COPY {pattern}: no such file in {folder}")
        sources += found
    for source in sources:
        if not source.resolve().is_relative_to(folder.resolve()):
            raise SandboxBuildFailedError(f"COPY {source}: leads outside the task's environment folder")
    return sources


def _stage(source: Path, staged: Path) -> bool:
    """Copy a folder's content, less what no image wants, to `staged`; False if `source` is a file."""
    if not source.is_dir():
        return False
    shutil.copytree(source, staged, symlinks=True, dirs_exist_ok=True, ignore=lambda _path, names: _IGNORED.intersection(names))
    return True


def _context_hash(folder: Path) -> str:
    digest = hashlib.sha256()
    for path, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _IGNORED)
        for name in sorted(files):
            if name in _IGNORED:
                continue
            file = Path(path, name)
            info = file.lstat()
            content = os.readlink(file).encode() if file.is_symlink() else file.read_bytes()
            digest.update(json.dumps([str(file.relative_to(folder)), info.st_mode & 0o777, len(content)]).encode() + content)
    return digest.hexdigest()
