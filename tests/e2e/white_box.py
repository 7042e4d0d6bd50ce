"""A white-box run for tests: real steps whatever the model says. Usage: white_box.py OUTPUT_DIR ENGINE_URL STEPS"""

from __future__ import annotations

import sys
from typing import Any

from harness_rl import GRPOConfig, GRPOTrainer


class Steps:
    """Hears of every step, as a TRL callback does."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        print(f"callback: step {state.global_step} of {state.max_steps}", flush=True)


class Notes:
    """Takes notes; what a model without practice says is never a call, so the reward looks at its words."""

    def reset(self, topic: str, **columns: Any) -> str:
        self.notes: list[str] = []
        return f" The topic is {topic}."

    def note(self, text: str) -> str:
        """Take a note.

        Args:
            text: What to write down.
        """
        self.notes.append(text)
        return f"{len(self.notes)} notes"


def short(completion_ids: list[list[int]], environments: list[Notes], **columns: Any) -> list[float]:
    """Differs from completion to completion."""
    return [-len(ids) / 40 + len(environment.notes) for ids, environment in zip(completion_ids, environments, strict=True)]


def vowels(completions: list[list[dict[str, Any]]], log_metric: Any, **columns: Any) -> list[float]:
    text = "".join(str(message.get("content") or "") for message in completions[0])
    log_metric("characters", len(text))
    return [sum(text.count(vowel) for vowel in "aeiou") / (len(text) + 1)]


if __name__ == "__main__":
    folder, engine, steps = sys.argv[1:]
    trainer = GRPOTrainer(
        "smollm2-135m",
        [short, vowels],
        GRPOConfig(
            output_dir=folder,
            max_steps=int(steps),
            num_generations=4,
            per_device_train_batch_size=8,
            max_completion_length=40,
            max_tool_calling_iterations=1,
            learning_rate=1e-5,
            reward_weights=[1.0, 0.5],
            vllm_mode="server",
            vllm_server_base_url=engine,
            log_completions=True,
            learner={"audit": True},
        ),
        [{"prompt": [{"role": "user", "content": "Write something."}], "topic": topic} for topic in ("cats", "rain", "trains")],
        callbacks=[Steps],
        environment_factory=Notes,
    )
    outcome = trainer.train()
    assert outcome.result is not None and trainer.state.global_step == int(steps)
    print(f"saved: {trainer.save_model(folder + '-model')}")
    held_out = [{"prompt": [{"role": "user", "content": "Write something."}], "topic": "snow"}]
    print(f"evaluated: {trainer.evaluate(held_out)['eval_unscored']}")
