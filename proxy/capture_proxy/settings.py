"""The proxy's own settings, in one place with their defaults."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from capture_proxy.store import Durability
from capture_proxy.upstream import Retry

Capture = Literal["auto", "tokens", "chat"]


@dataclass(frozen=True)
class Settings:
    """Everything that one proxy process needs to know."""

    engines: tuple[str, ...]
    """Base URLs."""
    model: str
    """The served model name; agents may use any name."""
    store: Path
    admin_key_hash: str
    """sha256 (hex) of the admin key."""
    host: str = "127.0.0.1"
    port: int = 8300
    tls: ssl.SSLContext | None = None
    """With a certificate: the main listener speaks HTTPS. Handed-off listeners never do."""
    handoff_socket: Path | None = None
    """Unix socket on which control hands over listening sockets."""
    capture: Capture = "auto"
    """`tokens`: render, generate, derender; `chat`: the chat route; `auto`: tokens where the server has the routes."""
    tokenizer: Path | None = None
    """The model's tokenizer.json; sessions with `control_tokens = "split"` need it."""
    salt_prefix_cache: bool = False
    """A session uses only blocks that the engine cached for sessions which began under the same weights: for engines whose cached blocks
    outlive an update of the weights."""
    adapters: bool = False
    """Policies are adapters of the engines' model: no call is sampled before control has named one, and then never by the model alone."""
    certificates: Path | None = None
    """Where certificates of templates are kept; None: in `store`."""
    durability: Durability = "process"
    workers: int = 1
    """Processes that share the sessions (`front`)."""
    worker: int = 0
    """Which of them this one is."""
    keepalive_s: float = 15.0
    """Longest silence on a stream that waits for the engine; clients were seen to give up after 60 s."""
    seal_grace_s: float = 5.0
    """What calls in flight get at a seal, unless the seal says otherwise."""
    admission_wait_s: float = 60.0
    """How long a call waits for one of its session's slots."""
    body_limit: int = 256 * 1024 * 1024
    """Largest request body, after decompression."""
    body_timeout_s: float = 120.0
    """How long a client may take to send its request."""
    answer_timeout_s: float = 120.0
    """How long a client may take none of its answer before it counts as gone."""
    generate_timeout_s: float = 600.0
    """Longest sampling of one call."""
    plain_answer_s: float = 570.0
    """After so long a call that does not stream is ended with a 503 and `Retry-After`: clients were seen to give up at 600 s."""
    retry: Retry = field(default_factory=Retry)
