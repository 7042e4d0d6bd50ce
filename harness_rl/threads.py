"""Who gets which cores: fixed thread shares for engine and learner on a small machine, and one OpenMP runtime for both.

Two processes that each believe they own the machine spin against each other. The shares below were measured, not guessed
(tests/reports/threads.md; `make bench` measures again).
"""

from __future__ import annotations

import glob
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ThreadPlan:
    """OpenMP threads per process on a machine whose engine and learner both compute on the CPU."""

    engine: int
    learner: int
    pin: bool
    """Bind the two to disjoint cores, engine first. Only where the shares add up to the cores."""

    def engine_cores(self, cores: list[int]) -> list[int]:
        return cores[: self.engine]

    def learner_cores(self, cores: list[int]) -> list[int]:
        return cores[-self.learner :]


def usable_cores() -> list[int]:
    """The cores this process may run on (a container's cpuset counts, its quota does not)."""
    return sorted(os.sched_getaffinity(0))


def thread_plan(cores: int | None = None) -> ThreadPlan:
    """The measured plan for `cores` (None: this machine's).

    - 1 core: one thread each, nothing to share.
    - 2 to 4 cores: see the report.
    - more: disjoint halves, the larger one for the engine, which is busy all the time; beyond 16 threads a small batch gains nothing.
    """
    count = cores or len(usable_cores())
    if count <= 2:
        return ThreadPlan(engine=count, learner=count, pin=False)
    engine = min((count + 1) // 2, 16)
    return ThreadPlan(engine=engine, learner=min(count - engine, 32), pin=False)


def openmp_env(python: Path, threads: int) -> dict[str, str]:
    """Environment that gives a process of the torch environment `threads` threads of Intel's OpenMP runtime, and tcmalloc if installed.

    torch's CPU wheel brings GNU's runtime, vLLM's kernels ask for Intel's: preloading the latter puts one runtime under both.
    """
    env = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    preload = [*tcmalloc(), *intel_openmp(python)]
    if preload:
        env["LD_PRELOAD"] = ":".join(str(path) for path in preload)
    return env


def intel_openmp(python: Path) -> list[Path]:
    """`libiomp5.so` of the `intel-openmp` wheel in `python`'s environment, if it is there."""
    library = python.parent.parent / "lib" / "libiomp5.so"
    return [library] if library.exists() else []


def tcmalloc() -> list[Path]:
    """Debian's `libtcmalloc-minimal4`, if it is there."""
    found = sorted(glob.glob("/usr/lib/*-linux-gnu/libtcmalloc_minimal.so.4"))
    return [Path(found[0])] if found else []


def learner_env(python: Path) -> dict[str, str]:
    """What a learner process on the CPU needs in its environment, added to ours."""
    return openmp_env(python, thread_plan().learner)
