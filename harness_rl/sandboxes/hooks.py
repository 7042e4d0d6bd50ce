"""How the code that runs a trial reaches the sandbox that Harbor makes for it. Invariant: one context, one trial, one agent sandbox;
nothing is shared between trials, and a separate verifier's sandbox gets no way out.

Harbor's configuration carries only data, so callables travel in a context variable that the environment reads when Harbor constructs it:

    with sandbox_hooks(on_listener=hand_to_proxy) as hooks:
        trial = await Trial.create(config)
    ...
    await hooks.sandbox.before_verification()      # in the AGENT_END hook
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .bubblewrap import BubblewrapEnvironment

PROXY_PORT = 18080
"""The one port of 127.0.0.1 inside a sandbox that leads out, to its own capture session."""


@dataclass
class SandboxHooks:
    on_listener: Callable[[socket.socket], Awaitable[None]] | None = None
    """Takes over the listening socket of the sandbox's one open port, before the agent is set up; None: no port is opened."""
    environment: BubblewrapEnvironment | None = None
    """Set once Harbor has constructed the agent's environment."""

    @property
    def sandbox(self) -> BubblewrapEnvironment:
        if self.environment is None:
            raise LookupError("no local sandbox was constructed under these hooks: construct the trial inside `with sandbox_hooks(...)`")
        return self.environment


_HOOKS: ContextVar[SandboxHooks | None] = ContextVar("harness_rl_sandbox_hooks", default=None)


@contextmanager
def sandbox_hooks(on_listener: Callable[[socket.socket], Awaitable[None]] | None = None) -> Iterator[SandboxHooks]:
    """Hooks for the trial that is constructed inside this block."""
    hooks = SandboxHooks(on_listener)
    token = _HOOKS.set(hooks)
    try:
        yield hooks
    finally:
        _HOOKS.reset(token)


def claim(environment: BubblewrapEnvironment) -> SandboxHooks:
    """The current hooks, now tied to `environment`; empty hooks outside a block, or when another environment has claimed them."""
    hooks = _HOOKS.get()
    if hooks is None or hooks.environment is not None:
        return SandboxHooks()
    hooks.environment = environment
    return hooks
