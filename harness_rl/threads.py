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
    """OpenMP threads per process where engine and learner both compute on the CPU. Nothing is bound to a core: that only cost."""

    engine: int
    learner: int


def usable_cores() -> list[int]:
    """The cores this process may run on (a container's cpuset counts, its quota does not)."""
    return sorted(os.sched_getaffinity(0))


def thread_plan(cores: int | None = None) -> ThreadPlan:
    """The plan for `cores` (None: this machine's).

    - 2 cores, measured: one thread for the engine, which decodes small batches and gains little from a second; two for the learner, which
      has the machine to itself during a warm start. Two threads each is the worst choice with one runtime.
    - more, by the same reasoning but not measured: half each; beyond 16 threads a small batch gains nothing.
    """
    count = cores or len(usable_cores())
    if count <= 2:
        return ThreadPlan(engine=1, learner=count)
    engine = min(count // 2, 16)
    return ThreadPlan(engine=engine, learner=min(count - engine, 32))


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
