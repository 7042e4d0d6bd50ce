"""The thread plan, by table, and the environment that carries it out."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness_rl.threads import openmp_env, thread_plan


@pytest.mark.parametrize(("cores", "engine", "learner"), [(1, 1, 1), (2, 1, 2), (3, 1, 2), (4, 2, 2), (8, 4, 4), (64, 16, 32)])
def test_plan(cores: int, engine: int, learner: int) -> None:
    plan = thread_plan(cores)
    assert (plan.engine, plan.learner) == (engine, learner)


def test_this_machine_has_a_plan() -> None:
    assert thread_plan().engine >= 1 and thread_plan().learner >= 1


def test_one_runtime_for_both(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    python = tmp_path / "bin" / "python"
    assert "libiomp5" not in openmp_env(python, 2).get("LD_PRELOAD", "")
    (tmp_path / "lib" / "libiomp5.so").touch()
    env = openmp_env(python, 2)
    assert env["LD_PRELOAD"].endswith(f"{tmp_path}/lib/libiomp5.so") and env["OMP_NUM_THREADS"] == env["MKL_NUM_THREADS"] == "2"
