"""Evaluation of white-box environments, with a real proxy process and a scripted engine: sampled and greedy, with their intervals."""

from __future__ import annotations

import asyncio
import json
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from environments.bench import call
from proxy.fake_engine import FakeEngine

from harness_rl import GRPOConfig, GRPOTrainer
from harness_rl.cli import main
from harness_rl.engines.probe import EngineInfo
from harness_rl.engines.vllm import Engine
from harness_rl.errors import UserError
from harness_rl.orchestrator.main import whose_weights
from harness_rl.sessions.environments import LocalSandboxes


class Level:
    """It is worth its level, whatever is played; level 3 cannot be judged."""

    def reset(self, level: int, **columns: object) -> str:
        self.level = level
        return f" Level {level}."

    def move(self) -> str:
        """Move."""
        return "moved"

    def get_reward(self) -> float | None:
        return None if self.level == 3 else self.level / 2


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    """On a loop of its own: `evaluate()` has one too."""
    served, over = threading.Event(), asyncio.Event()
    found: list[FakeEngine] = []
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with FakeEngine() as engine:
            engine.asides = {"moved": "done", "Level": call("move")}
            found.append(engine)
            served.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert served.wait(30)
    yield found[0]
    loop.call_soon_threadsafe(over.set)
    thread.join(30)


@pytest.fixture(autouse=True)
def connected(monkeypatch: pytest.MonkeyPatch, engine: FakeEngine) -> None:
    """The scripted engine has not all the routes by which a server is looked over."""

    async def connect(url: str) -> Engine:
        assert url == engine.url
        return Engine(url, EngineInfo("0.32.0", "policy", 4096, True, False, None, None, True))

    monkeypatch.setattr("harness_rl.engines.vllm.connect", connect)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / "model" / name).touch()
    return tmp_path / "model"


def temperatures(engine: FakeEngine) -> list[float]:
    return [body["sampling_params"]["temperature"] for body in engine.bodies("/generate")]


def test_an_evaluation_is_sampled_and_greedy_and_says_how_sure_it_is(engine: FakeEngine, model: Path, tmp_path: Path):
    rows = [{"prompt": "Play.", "task_name": f"level {level}", "level": level} for level in (0, 1, 2, 3)]
    args = GRPOConfig(output_dir=tmp_path / "run", max_steps=1, vllm_mode="server", vllm_server_base_url=engine.url)
    trainer = GRPOTrainer(str(model), args=args, train_dataset=rows, environment_factory=Level)
    found = trainer.evaluate(rows, samples=2)
    # Two episodes of each of the levels 0, 1, 2: mean 0.5; Wilson's interval of 3 of 6.
    assert found["eval_reward"] == pytest.approx(0.5) and found["eval_unscored"] == 2.0
    assert (found["eval_reward_low"], found["eval_reward_high"]) == (pytest.approx(0.188, abs=1e-3), pytest.approx(0.812, abs=1e-3))
    assert found["eval_greedy_reward"] == pytest.approx(0.5) and found["eval_greedy_unscored"] == 1.0
    assert (temperatures(engine).count(1.0), temperatures(engine).count(0.0)) == (2 * 4 * 2, 4 * 2)


def test_an_evaluation_on_a_running_engine_says_that_it_is_of_the_weights_there(tmp_path: Path, capsys):
    def running(version: str | None) -> Engine:
        return Engine("http://gpu1:8000", EngineInfo("0.32.0", "policy", 4096, True, False, version, None, True))

    for version, words in (("ab12-30", "http://gpu1:8000: ab12-30"), (None, "http://gpu1:8000: unknown")):
        said = whose_weights(SimpleNamespace(engine=running(version), others=[]), tmp_path)
        assert said.startswith(f"scoring the weights that the running engine holds (version by its own account: {words}); {tmp_path} is")
    config = tmp_path / "c.toml"
    config.write_text('[engine]\nurl = "http://gpu1:8000"\n[tasks]\neval = "examples/tasks/quickstart/eval"\n')
    assert main(["eval", str(config), "--model", "other"]) == 2
    assert "eval: --model other: engine.url is a running engine, whose weights are scored; leave one of them out" in capsys.readouterr().err


class Boxed(LocalSandboxes, Level):
    """Its instances keep sandboxes of this machine."""


def test_environments_with_sandboxes_ask_this_machine_first(
    engine: FakeEngine, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def unable() -> None:
        raise UserError("this machine cannot run the local sandbox: user id 1000")

    monkeypatch.setattr("harness_rl.orchestrator.services.refuse_unless_able", unable)
    rows = [{"prompt": "Play.", "task_name": "level 1", "level": 1}]
    args = GRPOConfig(output_dir=tmp_path / "run", max_steps=1, vllm_mode="server", vllm_server_base_url=engine.url)
    trainer = GRPOTrainer(str(model), args=args, train_dataset=rows, environment_factory=Boxed)
    with pytest.raises(UserError, match="cannot run the local sandbox"):
        trainer.train()
    with pytest.raises(UserError, match="cannot run the local sandbox"):
        trainer.evaluate(rows, samples=1)


def test_the_command_line_evaluates_a_scripts_trainer(engine: FakeEngine, model: Path, tmp_path: Path, capsys):
    (tmp_path / "beside.py").write_text("ROWS = [{'prompt': 'Play.', 'level': 2}]\n")
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f'''
        import sys
        from beside import ROWS
        from trl.test_evaluate import Level
        from harness_rl import GRPOConfig, GRPOTrainer

        def trainer():
            args = GRPOConfig(output_dir="{tmp_path}/run", max_steps=1, vllm_mode="server", vllm_server_base_url="{engine.url}")
            return GRPOTrainer("{model}", args=args, train_dataset=ROWS, environment_factory=Level)

        def nothing():
            return 3
    ''')
    )
    assert main(["eval", f"{script}:trainer", "--samples", "3", "--greedy", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert (found["eval_reward"], found["eval_greedy_reward"], len(temperatures(engine))) == (1.0, 1.0, 2 * 4)
    assert main(["eval", f"{script}:nothing"]) == 2
    assert "returns no trainer; return a GRPOTrainer or an AsyncGRPOTrainer" in capsys.readouterr().err
    assert main(["eval", f"{script}:trainer", "--samples", "0"]) == 2
    assert "--samples 0: play one episode of each task or more" in capsys.readouterr().err
    assert main(["eval", f"{script}:trainer", "--model", "m"]) == 2
    assert "--set and --model are for a CONFIG.toml" in capsys.readouterr().err
