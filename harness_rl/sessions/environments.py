"""White-box environments: what a user's class offers, and its instances.

Invariant: an instance belongs to one running episode at a time, and goes back to its pool only after a whole one; an instance that failed,
was lost or still works on something when its episode is over is given up. All its synchronous code runs in one thread of its own, its
asynchronous code on the event loop, so that resets, tools and rewards of different episodes never wait for each other.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from harness_rl.config import SandboxSection
from harness_rl.errors import Cause, UserError
from harness_rl.sessions.base import RolloutFailure
from harness_rl.sessions.openenv import SessionWatch
from harness_rl.sessions.ownthread import OwnThread, awaited
from harness_rl.sessions.toolloop import Message, Tool
from harness_rl.sessions.toolschema import Schema, function_name, tool_schema

logger = logging.getLogger(__name__)

EnvironmentFactory = Callable[[], Any]
"""A class, or a callable without arguments that makes an instance."""
LEAVE_S = 90.0
"""How long an environment may take to let go of what it holds."""
PROBE_S = 120.0
"""How long the first instance of each environment may take to be made."""
RESERVED = ("prompts", "completions", "completion_ids")
"""What reward functions get under these names is not a column's to take."""


class LocalSandboxes:
    """Base of an environment class that keeps sandboxes of this machine.

    A run with such an environment checks the machine first, reclaims what killed runs left, and audits leaks at its end.
    """

    own_sandbox: SandboxSection | None = None
    """Limits that its maker gave; they leave no room for the run's."""
    run_sandbox: SandboxSection | None = None
    """The run's `[sandbox]`, set before each `reset`; None outside a run."""


class Instance:
    """One environment and its thread; without an environment, just a thread for plain tools and reward functions."""

    def __init__(self, environment: Any, thread: OwnThread, watch: SessionWatch) -> None:
        self.environment = environment
        self.watch = watch
        """Of the OpenEnv clients that its code uses."""
        self._thread = thread

    @property
    def busy(self) -> bool:
        """Synchronous code is still running."""
        return self._thread.busy

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a method of the environment, or a function that may touch it, returns or raises.

        Raises RolloutFailure where an OpenEnv session was lost, whatever the function made of that.
        """
        try:
            with self.watch.active():
                result = await self._call(function, *args, **kwargs)
        except Exception:
            self.watch.check()
            raise
        self.watch.check()
        return result

    async def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if inspect.iscoroutinefunction(function):
            return await awaited(function(*args, **kwargs))
        result = await self._thread.call(function, *args, **kwargs)
        return await awaited(result) if inspect.isawaitable(result) else result

    async def retire(self) -> None:
        """No further work: it is left, where it is a context manager, and its OpenEnv sessions are closed. Bounded; never raises."""
        try:
            async with asyncio.timeout(LEAVE_S):
                await self._leave()
        except Exception as error:  # noqa: BLE001 - it is given up; what it says about that is for the log
            logger.warning("leaving %s: %s: %s", type(self.environment).__name__, type(error).__name__, error)
        self._thread.close()
        await self.watch.close()

    async def _leave(self) -> None:
        """What it holds outside of this process (a sandbox, a browser) it lets go of in `__aexit__` or `__exit__`."""
        kind = type(self.environment)
        if hasattr(kind, "__aexit__"):
            await awaited(self.environment.__aexit__(None, None, None))
        elif hasattr(kind, "__exit__"):
            await self._thread.call(self.environment.__exit__, None, None, None)


class EnvironmentKind:
    """What one factory makes: its tools, whether it gives a reward, and the pool of its instances.

    The first instance is made at once, so that a mistake shows before anything starts. Raises UserError.
    """

    def __init__(self, factory: EnvironmentFactory | None, name: str | None = None, tools: Sequence[Callable[..., Any]] = ()) -> None:
        self._factory = factory
        self._idle: deque[Instance] = deque()
        self.made = 0
        """Instances that were made so far."""
        self.functions = {function_name(tool): tool for tool in tools}
        self.methods: list[str] = []
        self.schemas: list[Schema] = [tool_schema(tool) for tool in tools]
        self.type: type | None = None
        self.has_reward = False
        self.keeps_sandboxes = False
        """Its instances have sandboxes of this machine."""
        self.own_sandbox = False
        """... whose limits its factory gives."""
        self.run_sandbox: SandboxSection | None = None
        """Limits of those that have none of their own."""
        if factory is not None:
            self._probe(factory, f"environment {name!r}" if name else "environment_factory")

    @property
    def label(self) -> str:
        """The class's name; what its reward is logged by."""
        return self.type.__name__ if self.type is not None else "none"

    def _probe(self, factory: EnvironmentFactory, where: str) -> None:
        if not callable(factory):
            raise UserError(f"{where}: {factory!r:.80} is not callable; give the class itself, or a function that makes an instance")
        thread, watch = OwnThread(f"{where} 0"), SessionWatch()
        try:
            with watch.active():
                making = thread.submit(factory)
            environment = making.result(PROBE_S)
        except TimeoutError:
            raise UserError(f"{where}: making an instance took more than {PROBE_S:g} s; connect lazily, in reset()") from None
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            raise UserError(f"{where}: it cannot be made without arguments: {type(error).__name__}: {error}") from None
        self.type = type(environment)
        if isinstance(environment, LocalSandboxes):
            self.keeps_sandboxes, self.own_sandbox = True, environment.own_sandbox is not None
        members = dict(inspect.getmembers(self.type, predicate=inspect.isfunction))
        if "reset" not in members:
            raise UserError(f"{where}: {self.label} has no method reset; define reset(self, **kwargs), which may return a text")
        self.has_reward = "get_reward" in members
        self.methods = [member for member in members if member not in ("reset", "get_reward") and not member.startswith("_")]
        taken = sorted(set(self.methods) & set(self.functions))
        if taken:
            raise UserError(f"{where}: {self.label}.{taken[0]} and the tool {taken[0]} have one name; rename one of them")
        self.schemas += [tool_schema(members[method], self.label) for method in self.methods]
        self.made = 1
        self._idle.append(Instance(environment, thread, watch))

    def check_columns(self, columns: Mapping[str, Any], where: str) -> None:
        """Whether `reset` takes these columns. Raises UserError."""
        if self.type is None:
            return
        try:
            inspect.signature(self.type.reset).bind(None, **columns)  # type: ignore[attr-defined]
        except TypeError as error:
            raise UserError(f"{where}: {self.label}.reset: {error}; it gets every column by name: define reset(self, **kwargs)") from None

    async def take(self) -> Instance:
        """An idle instance, or a new one. Raises RolloutFailure."""
        if self._idle:
            return self._idle.popleft()
        self.made += 1
        thread, watch = OwnThread(f"{self.label} {self.made - 1}"), SessionWatch()
        if self._factory is None:
            return Instance(None, thread, watch)
        try:
            with watch.active():
                making = thread.submit(self._factory)
            return Instance(await asyncio.wrap_future(making), thread, watch)
        except Exception as error:
            thread.close()
            raise environment_failure(error, f"{self.label} could not be made") from error
        except asyncio.CancelledError:
            thread.close()
            raise

    def put(self, instance: Instance) -> None:
        """It may be reset for another episode."""
        self._idle.append(instance)

    async def close(self) -> None:
        """Give up the idle instances."""
        while self._idle:
            await self._idle.popleft().retire()


def is_lost(error: BaseException) -> bool:
    """An OpenEnv client's `SessionLostError`, known by its name because OpenEnv may not be installed."""
    return "SessionLostError" in {kind.__name__ for kind in type(error).__mro__}


def environment_failure(error: Exception, words: str) -> RolloutFailure:
    """The rollout's failure for what the environment's own code raised."""
    if isinstance(error, RolloutFailure):
        return error
    cause = Cause.ENVIRONMENT_LOST if is_lost(error) else Cause.ENVIRONMENT
    return RolloutFailure(cause, f"{words}: {type(error).__name__}: {' '.join(str(error).split())[:400]}")


async def begun(instance: Instance, kind: EnvironmentKind, row: Mapping[str, Any], columns: Mapping[str, Any]) -> list[Message]:
    """The first messages of a new episode: the row's prompt, and what `reset` shows. Raises RolloutFailure."""
    messages = first_messages(row, "data set row")
    instance.watch.begin()
    if kind.type is None:
        return messages
    if isinstance(instance.environment, LocalSandboxes):
        instance.environment.run_sandbox = kind.run_sandbox
    try:
        observation = await instance.call(instance.environment.reset, **columns)
    except Exception as error:
        raise environment_failure(error, f"{kind.label}.reset raised") from error
    instance.watch.play()
    return with_observation(messages, observation, kind.label)


def tools_of(instance: Instance, kind: EnvironmentKind) -> dict[str, Tool]:
    """What a policy may call in this episode: plain tools and the environment's methods."""
    functions = kind.functions | {name: getattr(instance.environment, name) for name in kind.methods}

    async def run(name: str, arguments: dict[str, Any]) -> Any:
        try:
            return await instance.call(functions[name], **arguments)
        except Exception as error:
            if is_lost(error):
                raise environment_failure(error, f"{kind.label}.{name} raised") from error
            raise

    return {name: partial(run, name) for name in functions}


def first_messages(row: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """The row's prompt as messages; without one, an empty user message that `reset` fills. Raises UserError."""
    prompt = row.get("prompt")
    if prompt is None:
        return [{"role": "user", "content": ""}]
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, list) and prompt and all(isinstance(part, dict) and isinstance(part.get("role"), str) for part in prompt):
        return [{**part} for part in prompt]
    raise UserError(f"{where}: its prompt is {prompt!r:.80}; write a text, or a list of messages with role and content")


def with_observation(messages: list[dict[str, Any]], observation: Any, label: str) -> list[dict[str, Any]]:
    """What `reset` returned, at the end of the last message and without a separator. Raises RolloutFailure."""
    if observation is None:
        return messages
    last = messages[-1]
    content = last.get("content") or ""
    if isinstance(observation, str) and isinstance(content, str):
        shown: Any = content + observation
    elif isinstance(observation, str | list):
        shown = [*_blocks(content), *_blocks(observation)]
    else:
        kind = type(observation).__name__
        raise RolloutFailure(Cause.ENVIRONMENT, f"{label}.reset returned a {kind}; return None, a text or a list of content blocks")
    return [*messages[:-1], {**last, "content": shown}]


def _blocks(content: Any) -> list[Any]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []
