"""`EnvironmentSessionFactory`: environments, tools and reward functions of a user's script, as sessions in this process.

Invariant: what can be known wrong from the arguments and the data set (a class without `reset`, a tool without a docstring, a row that
names no environment, columns that `reset` does not take, no reward at all) is refused here, in one line, before anything starts.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from capture_proxy.roles import RULES
from harness_rl.errors import UserError
from harness_rl.sessions.base import SessionServices
from harness_rl.sessions.capture import Capture, mint
from harness_rl.sessions.environment_session import EnvironmentSession, EpisodeSpec
from harness_rl.sessions.environments import PROBE_S, EnvironmentFactory, EnvironmentKind, first_messages
from harness_rl.sessions.openenv import CLIENT_MODULE
from harness_rl.sessions.openenv_servers import check_room
from harness_rl.sessions.rewardfuncs import RewardFunc, check_reserved, weighted_rewards
from harness_rl.sessions.rollout_func_session import RolloutFuncSession, UsersLoop
from harness_rl.sessions.toolschema import function_name

Demonstrations = Callable[[dict[str, Any]], list[dict[str, Any]]]
"""Data set row -> the assistant turns that solve it: `[{"content": ..., "tool_calls": [{"name": ..., "arguments": {...}}]}, ...]`."""
ROUTE = "environment"
"""The column that names a row's environment, where there are several."""
CHECKED_ROWS = 8
"""About so many rows of each environment are tried to see which servers it uses (one class may route on a column of its own)."""


class EnvironmentSessionFactory:
    """Episodes in this process.

        factory = EnvironmentSessionFactory(MyEnv, rows=[{"prompt": [{"role": "user", "content": "Play."}]}])
        factory.bind(services)
        session = await factory.create(factory.prompt_rows()[0], seed=0, episode_id="e0")

    `environments` is a factory (a class, or a callable without arguments), a mapping of names to factories, or None for tools alone.
    `demonstrations` gives the turns of a policy that solves a row, for a warm start. Raises UserError for what cannot work.
    """

    def __init__(
        self,
        environments: EnvironmentFactory | Mapping[str, EnvironmentFactory] | None = None,
        *,
        rows: Iterable[dict[str, Any]],
        tools: Sequence[Callable[..., Any]] = (),
        reward_funcs: RewardFunc | Sequence[RewardFunc] | None = None,
        reward_weights: Sequence[float] = (),
        demonstrations: Demonstrations | None = None,
        trainer_state: Any = None,
        rollout_func: UsersLoop | None = None,
    ) -> None:
        if rollout_func is not None:
            if environments is not None or tools:
                raise UserError("rollout_func: the loop is yours, and so are its environments and tools; leave the others out")
            if not callable(rollout_func.function) or inspect.iscoroutinefunction(rollout_func.function):
                raise UserError("rollout_func: give a plain function (prompts, trainer) -> dict; each rollout has a thread of its own")
        self._loop = rollout_func
        self._routed = isinstance(environments, Mapping)
        self._demonstrations = demonstrations
        self._trainer_state = trainer_state
        self._services: SessionServices | None = None
        if isinstance(environments, Mapping):
            if not environments:
                raise UserError("environment_factory: the mapping is empty; name at least one environment")
            self.kinds = {name: EnvironmentKind(factory, name, tools) for name, factory in environments.items()}
        else:
            self.kinds = {"": EnvironmentKind(environments, None, tools)}
        self.rewards = weighted_rewards(reward_funcs, reward_weights)
        owned = {kind.label for kind in self.kinds.values() if kind.has_reward}
        if not self.rewards and not owned:
            raise UserError("no reward: give reward_funcs, or an environment with a method get_reward(self)")
        taken = owned & {reward.name for reward in self.rewards}
        if taken:
            raise UserError(f"reward_funcs: {min(taken)} is also an environment's class, whose reward is logged by that name; rename it")
        self._rows = [dict(row) for row in rows]
        if not self._rows:
            raise UserError("train_dataset: it has no rows")
        for index, row in enumerate(self._rows):
            self._check(row, f"train_dataset row {index}")

    def prompt_rows(self) -> list[dict[str, Any]]:
        return self._rows

    def on(self, rows: Iterable[dict[str, Any]]) -> EnvironmentSessionFactory:
        """The same environments and rewards on other rows (for evaluation), with the same instances. Raises UserError."""
        other = copy.copy(self)
        other._rows = [dict(row) for row in rows]
        for index, row in enumerate(other._rows):
            other._check(row, f"eval_dataset row {index}")
        return other

    def identity(self) -> dict[str, Any]:
        """What a model sees of environments and tools."""
        if self._loop is not None:
            return {"harness": "rollout_func", "function": function_name(self._loop.function)}
        return {"harness": "environments", "environments": {name: [kind.label, kind.schemas] for name, kind in self.kinds.items()}}

    def demonstration(self, task: dict[str, Any]) -> list[dict[str, Any]]:
        """Raises UserError where the user gave none."""
        if self._demonstrations is None:
            raise UserError("warm-up: white-box environments have no solutions of their own; give demonstrations=, row -> assistant turns")
        return self._demonstrations(task)

    def bind(self, services: SessionServices) -> None:
        self._services = services
        for kind in self.kinds.values():
            kind.run_sandbox = services.config.sandbox

    async def create(
        self,
        task: dict[str, Any],
        seed: int,
        episode_id: str,
        *,
        script: list[dict[str, Any]] | None = None,
        temperature: float | None = None,
    ) -> EnvironmentSession:
        """A session for one row. Raises UserError for a bad row, RolloutFailure where no capture session can be had."""
        if self._services is None:
            raise RuntimeError("call bind() first")
        kind = self._check(task, f"data set row {str(task)[:80]}")
        services, rollout = self._services, self._services.config.rollout
        await services.proxy_up.wait()
        about = {
            "episode_id": episode_id,
            "environment": task[ROUTE] if self._routed else kind.label,
            "seed": seed,
            "harness": "environments",
            "demonstration": script is not None,
            "started_at": time.time(),
        }
        sampling: dict[str, Any] = {**services.sampling, "seed": seed}
        if temperature is not None:
            sampling["temperature"] = temperature
        created = await mint(
            services.proxy,
            metadata=about,
            sampling=sampling,
            limits=services.limits,
            template=services.template,
            history=services.history,
            roles={"off": [rule.name for rule in RULES]},  # this agent makes no side calls, whatever its prompts say
            script=script,
        )
        spec = EpisodeSpec(
            name=episode_id,
            row=task,
            columns=self._columns(task),
            kind=kind,
            rewards=self.rewards,
            trainer_state=self._trainer_state,
            max_calls=rollout.max_calls,
            episode_s=rollout.agent_timeout_s,
            deadline_s=rollout.deadline_s,
        )
        capture = Capture(created, services, services.config.sandbox.stop_timeout_s)
        if self._loop is not None:
            return RolloutFuncSession(spec, capture, services, about, self._loop)
        return EnvironmentSession(spec, capture, services, about)

    async def check_servers(self, sessions: int) -> None:
        """Whether the OpenEnv servers that the environments use take that many sessions at once. Raises UserError.

        Which servers these are, the environments themselves show: two instances of each are reset with a few rows, one after the other, and
        given up. Where the second goes to servers that the first did not use, each instance has servers of its own (a script hands out
        several URLs in turn), and each of these is asked for one session. What several environments want of one server is added up: idle
        instances keep their sessions. Where no script has imported OpenEnv's client, nothing is done.
        """
        if CLIENT_MODULE not in sys.modules or self._loop is not None:
            return
        wanted: dict[str, list[int]] = {}
        for name, kind in self.kinds.items():
            rows = [row for row in self._rows if not self._routed or row[ROUTE] == name]
            if kind.type is None or not rows:
                continue
            first = await self._urls_of(kind, rows[:: max(1, len(rows) // CHECKED_ROWS)])
            second = await self._urls_of(kind, rows[:1]) if sessions > 1 and first else first
            each = sessions if first & second or not second else 1
            for url in first | second:
                wanted.setdefault(url, []).append(each)
        for url, counts in sorted(wanted.items()):
            await check_room(url, sum(counts), len(counts))

    async def _urls_of(self, kind: EnvironmentKind, rows: list[dict[str, Any]]) -> set[str]:
        instance = await kind.take()
        found: set[str] = set()
        try:
            for row in rows:
                instance.watch.begin()
                async with asyncio.timeout(PROBE_S):
                    await instance.call(instance.environment.reset, **self._columns(row))
                found |= instance.watch.urls | instance.watch.made_for
        except TimeoutError:
            raise UserError(f"{kind.label}.reset took more than {PROBE_S:g} s before the run; is its OpenEnv server up?") from None
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            raise UserError(
                f"{kind.label}.reset failed before the run: {type(error).__name__}: {' '.join(str(error).split())[:400]}"
            ) from None
        finally:
            await instance.retire()
        return found

    async def close(self) -> None:
        """Give up all idle environments and close their OpenEnv sessions."""
        for kind in self.kinds.values():
            await kind.close()

    def _columns(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """What `reset` gets: every column, less the one that only chooses the environment."""
        return {name: value for name, value in row.items() if not (self._routed and name == ROUTE)}

    def _check(self, row: Mapping[str, Any], where: str) -> EnvironmentKind:
        """The row's environment. Raises UserError."""
        if self._routed and ROUTE not in row:
            raise UserError(f"{where}: it has no column {ROUTE!r}; with several environments each row names its own: {self._names}")
        name = row[ROUTE] if self._routed else ""
        if name not in self.kinds:
            raise UserError(f"{where}: {ROUTE} is {name!r}; known: {self._names}")
        kind = self.kinds[name]
        if kind.type is None and "prompt" not in row:
            raise UserError(f"{where}: it has no prompt")
        first_messages(row, where)
        check_reserved(row, where)
        kind.check_columns(self._columns(row), where)
        return kind

    @property
    def _names(self) -> str:
        return ", ".join(repr(name) for name in self.kinds)
