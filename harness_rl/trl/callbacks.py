"""What a script of TRL's sees of a run while it goes: `trainer.state`, `control` and callbacks.

Invariant: the state is written by the run alone. A callback hears of a step after it has been written down, and can end the run after it;
an exception of a callback ends the run with its name, as it would in TRL.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness_rl.errors import HarnessRLError, UserError
from harness_rl.metrics import Metric

log = logging.getLogger(__name__)

EVENTS = ("on_train_begin", "on_step_end", "on_log", "on_save", "on_train_end")


@dataclass
class TrainerState:
    """TRL's names. A reward function gets it as `trainer_state`."""

    global_step: int = 0
    """Optimizer steps done: those of whole batches, which are what a run's own steps count."""
    max_steps: int = 0
    """Optimizer steps that the run will do."""
    epoch: float = 0.0
    num_train_epochs: float = 0.0
    log_history: list[dict[str, float]] = field(default_factory=list)
    is_world_process_zero: bool = True
    is_local_process_zero: bool = True
    best_metric: float | None = None


@dataclass
class TrainerControl:
    should_training_stop: bool = False
    """Set by a callback: the run ends after this step."""
    should_log: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_epoch_stop: bool = False


@dataclass
class Callbacks:
    """The run's observer: it keeps the state up to date and calls the user's callbacks, in order, in the control process."""

    args: Any
    state: TrainerState
    callbacks: list[Any] = field(default_factory=list)
    steps_per_epoch: float = 1.0
    """Batches."""
    updates_per_step: int = 1
    """Optimizer steps of one batch."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments that every callback gets."""
    control: TrainerControl = field(default_factory=TrainerControl)

    def begun(self, step: int) -> None:
        self.state.global_step, self.control.should_training_stop = step * self.updates_per_step, False
        self._call("on_train_begin")

    def step_ended(self, step: int, line: Mapping[str, float]) -> bool:
        """True: the run ends here."""
        self.state.global_step = step * self.updates_per_step
        self.state.epoch = step / self.steps_per_epoch
        logs = {**line, Metric.STEP.value: float(self.state.global_step), "epoch": self.state.epoch}
        self.state.log_history.append(logs)
        self._call("on_step_end")
        self._call("on_log", logs=logs)
        return self.control.should_training_stop

    def saved(self, step: int, path: Path) -> None:
        del step, path
        self._call("on_save")

    def ended(self) -> None:
        self._call("on_train_end")

    def _call(self, event: str, **more: Any) -> None:
        for callback in self.callbacks:
            handler = getattr(callback, event, None)
            if handler is not None:
                try:
                    answered = handler(self.args, self.state, self.control, **self.extra, **more)
                except Exception as error:
                    raise HarnessRLError(f"callback {type(callback).__name__}.{event} raised {type(error).__name__}: {error}") from error
                if isinstance(getattr(answered, "should_training_stop", None), bool):
                    self.control = answered


def checked_callbacks(callbacks: Iterable[Any] | None) -> list[Any]:
    """Instances of the user's callbacks (a class is called); an event that nothing here raises is logged. Raises UserError."""
    found = [callback() if isinstance(callback, type) else callback for callback in callbacks or ()]
    for callback in found:
        name = type(callback).__name__
        if not any(callable(getattr(callback, event, None)) for event in EVENTS):
            raise UserError(f"callbacks: {name} has none of {', '.join(EVENTS)}")
        own = (vars(kind) for kind in type(callback).__mro__ if kind.__name__ != "TrainerCallback")  # its methods do nothing
        unheard = sorted({member for members in own for member in members if member.startswith("on_")} - {*EVENTS, "on_init_end"})
        if unheard:
            log.warning("callbacks: %s.%s is never called; the events are %s", name, unheard[0], ", ".join(EVENTS))
    return found
