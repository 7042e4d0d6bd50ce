"""What a run needs, checked before it is started: each check is one line that says what was found and, where it fails, what to do.

A check never raises for what it looks for: a missing part is its result. Sections are functions of the config, so that a part adds its own
by one line in `SECTIONS`.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness_rl.config import RunConfig
from harness_rl.engines.environment import TorchEnvironment, require_engine, torch_python
from harness_rl.engines.patchable import check_patchable
from harness_rl.errors import EngineError, HarnessRLError, UserError
from harness_rl.models import resolve_model
from harness_rl.threads import intel_openmp, tcmalloc, thread_plan, usable_cores

if TYPE_CHECKING:
    from harness_rl.bench.rates import Rates

MIB = 1 << 20


@dataclass(frozen=True)
class Check:
    name: str
    ok: bool
    detail: str
    """What was found."""
    remedy: str = ""
    """What to do; empty when it is in order."""


Section = Callable[[RunConfig], list[Check]]


def engine_checks(config: RunConfig) -> list[Check]:
    """The model's folder and either the running engine of `engine.url` or all that launching one takes."""
    checks = [_model(config)]
    if config.engine.urls:
        return checks + [check for url in config.engine.urls for check in _running_engine(url, config.sync.lora == "adapter")]
    try:
        environment = require_engine(torch_python(config.engine.python))
    except UserError as error:
        return [*checks, _failed("torch environment", error)]
    checks.append(
        Check(
            "torch environment",
            True,
            f"Python {environment.python}, torch {environment.torch}, vLLM {environment.vllm} ({environment.path})",
        )
    )
    checks.append(_plugin(environment))
    if environment.is_cpu_build:
        checks += _cpu(environment)
    checks.append(_memory(config))
    return checks


def _model(config: RunConfig) -> Check:
    try:
        folder = resolve_model(config.model.name)
        check_patchable(config, Path(folder))
        return Check("model", True, folder)
    except UserError as error:
        return _failed("model", error)


def _running_engine(url: str, adapters: bool) -> list[Check]:
    from harness_rl.engines.probe import probe

    try:
        info = asyncio.run(probe(url))
    except EngineError as error:
        return [_failed("engine", error)]
    found = Check("engine", True, f"vLLM {info.version} at {url} serves {info.model}, {info.max_model_len} tokens")
    return [found, *(Check(missing.what, False, f"{url} has none", missing.remedy) for missing in info.missing(adapters))]


def _plugin(environment: TorchEnvironment) -> Check:
    name = "weight transfer"
    if environment.has_plugin:
        return Check(name, True, "vLLM finds harness-rl's plugin")
    return Check(name, not environment.is_cpu_build, "harness-rl is not installed beside vLLM", "run `make setup`")


def _cpu(environment: TorchEnvironment) -> list[Check]:
    cores, plan = usable_cores(), thread_plan()
    runtime = intel_openmp(environment.path)
    return [
        Check("cores", True, f"{len(cores)}; engine {plan.engine} and learner {plan.learner} threads"),
        Check(
            "OpenMP runtime",
            bool(runtime),
            "one for engine and learner" if runtime else "two kinds: each slows the other down",
            "" if runtime else "install intel-openmp into the torch environment (make setup)",
        ),
        Check(
            "tcmalloc",
            True,
            "preloaded" if tcmalloc() else "not installed; the engine is slower without (apt-get install libtcmalloc-minimal4)",
        ),
    ]


def _memory(config: RunConfig) -> Check:
    """About what both take for a model of this size on a CPU: four copies in the learner, one and the cache in the engine."""
    try:
        weights = sum(path.stat().st_size for path in Path(resolve_model(config.model.name)).glob("*.safetensors"))
    except UserError:
        weights = 0
    wanted = 5 * weights / MIB + config.engine.kv_cache_gib * 1024 + 3 * 1024
    free = _available_mib()
    detail = f"{free / 1024:.1f} GiB available, about {wanted / 1024:.1f} GiB wanted"
    return Check("memory", free >= wanted, detail, "" if free >= wanted else "free memory, or use a smaller model or engine.kv_cache_gib")


def _available_mib() -> float:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 1024
    return 0.0


def disk_checks(config: RunConfig) -> list[Check]:
    """Room for the run folder."""
    folder = config.run.dir.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free / MIB / 1024
    return [Check("disk", free >= 5, f"{free:.0f} GiB free at {folder}", "" if free >= 5 else "free some space, or set run.dir")]


def sandbox_section(config: RunConfig) -> list[Check]:
    """What the local sandbox needs of the kernel and the machine."""
    from harness_rl.sandboxes.preflight import sandbox_checks

    return sandbox_checks() if config.sandbox.kind == "local" else []


SECTIONS: dict[str, Section] = {"engine": engine_checks, "sandbox": sandbox_section, "disk": disk_checks}


async def overlapped_rates(config: RunConfig, seconds: float = 20.0) -> Rates:
    """Launch (or connect to) the config's engine, run the learner load beside it with the run's own thread shares, and measure both.

    Raises UserError, EngineError, LearnerError.
    """
    from tempfile import TemporaryDirectory

    from harness_rl.bench.rates import measure
    from harness_rl.engines.vllm import connect, launch
    from harness_rl.threads import learner_env

    model = resolve_model(config.model.name)
    python = torch_python(config.learner.python or config.engine.python)
    with TemporaryDirectory() as folder:
        if config.engine.urls:
            engine = await connect(config.engine.urls[0])
        else:
            engine = await launch(config.engine, Path(model), run_dir=Path(folder), served_model="policy")
        try:
            return await measure(engine.url, engine.model, python, model, learner_env(python), seconds)
        finally:
            await engine.stop()


def report(config: RunConfig, *, rates: bool = False, as_json: bool = False) -> int:
    """Print every section (and the rates, which take minutes); 0 when all is in order, else 1."""
    sections = {name: section(config) for name, section in SECTIONS.items()}
    if rates:
        sections["overlapped rates"] = [_rates_check(config)]
    if as_json:
        print(json.dumps({name: [asdict(check) for check in checks] for name, checks in sections.items()}, indent=2))
    else:
        for name, checks in sections.items():
            print(name)
            for check in checks:
                print(f"  {'ok ' if check.ok else 'NO '} {check.name}: {check.detail}" + (f"  →  {check.remedy}" if check.remedy else ""))
    return 0 if all(check.ok for checks in sections.values() for check in checks) else 1


def _rates_check(config: RunConfig) -> Check:
    try:
        found = asyncio.run(overlapped_rates(config))
    except HarnessRLError as error:
        return _failed("tokens/s", error)
    return Check(
        "tokens/s",
        True,
        f"engine {found.engine_alone:.0f} alone, {found.engine_overlapped:.0f} overlapped; "
        f"learner {found.learner_alone:.0f} alone, {found.learner_overlapped:.0f} overlapped (shares add up to {found.sum_of_shares:.2f})",
    )


def _failed(name: str, error: HarnessRLError) -> Check:
    """Our errors already say what to do after their last semicolon."""
    detail, _, remedy = str(error).rpartition("; ")
    return Check(name, False, detail or str(error), remedy if detail else "")
