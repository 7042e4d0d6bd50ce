"""The one internal form of a call that every dialect is translated to, and what makes two messages the same message.

Invariant: nothing the agent sent that can reach the model is lost or reordered. The message form is the engine's own chat form (dicts with
`role`, `content`, `tool_calls`, ...), so that what is rendered is what was recorded. `message_key` decides identity across the rewriting
that clients do to an answer (JSON spacing, outer whitespace, string or one-item list, ids), never across a change of text.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Any

from capture_proxy import fastjson

Message = dict[str, Any]

_THINK = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """A call the model made, as the agent gets it."""

    id: str
    name: str
    arguments: str
    """The argument string as the engine's parser gave it; not necessarily valid JSON."""


@dataclass(frozen=True)
class Reply:
    """An assistant turn as the agent gets it."""

    content: str | None
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    stop: str | None = None
    """The stop string that ended it, of those that the agent asked for."""

    def message(self) -> Message:
        """The reply as a message of the history."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


@dataclass(frozen=True)
class ToolForm:
    """How a tool that is a function to the model is written on the wire."""

    kind: str
    """`function`, `custom` (free text) or `local_shell`."""
    name: str
    namespace: str | None = None


@dataclass(frozen=True)
class AgentCall:
    """What an agent asks for, whichever dialect it spoke."""

    dialect: str
    model: str
    """The name the agent used; every name maps to the one policy and is echoed."""
    messages: list[Message]
    tools: list[dict[str, Any]]
    stream: bool = False
    include_usage: bool = False
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    tool_choice: Any = None
    response_format: Any = None
    requested_sampling: dict[str, Any] = field(default_factory=dict)
    """What the agent asked of the sampler; recorded, and overridden by the session's policy."""
    retry_mark: bool = False
    """The client's SDK says that this request repeats one that it gave up."""
    tool_forms: dict[str, ToolForm] = field(default_factory=dict)
    """By the name that the model sees; empty where every tool is a plain function."""
    left_out: tuple[str, ...] = ()
    """What of the request the model is not shown, by name: tools that a server would run, volatile blocks."""
    role: tuple[str, str] | None = None
    """The role that a rule gives the call, and the rule's name (`roles`)."""
    agent_id: str | None = None
    """The client's own name for the (sub-)agent that calls, where it sends one."""


def text_of(content: Any) -> str:
    """The text of a message's content: a string, or a list whose text parts are joined as the engine joins them."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part["type"] == "text")


def message_key(message: Message, reasoning: bool = True) -> bytes:
    """A digest that is equal for the same message in any of the forms in which clients send it back.

    Of an assistant message the outer whitespace of text and reasoning and the spelling of tool arguments do not count, and a leading
    `<think>` block is reasoning wherever it stands. Everything else counts in full; tool-call ids never do. Without `reasoning` a message
    is the same whether or not it still has its reasoning.
    """
    parts = [str(message.get("role"))]
    content = text_of(message.get("content"))
    if message.get("role") == "assistant":
        thoughts = message.get("reasoning") or ""
        if match := _THINK.match(content):
            thoughts, content = thoughts + match[1], content[match.end() :]
        parts += [content.strip(), thoughts.strip() if reasoning else ""]
        for call in message.get("tool_calls") or ():
            parts += [call["function"]["name"], _canonical_arguments(call["function"]["arguments"])]
    else:
        parts += [content, message.get("name") or ""]
        if isinstance(message.get("content"), list):  # an image counts where it stands
            parts += [f"{at} {part['image_url']['url']}" for at, part in enumerate(message["content"]) if part["type"] == "image_url"]
    raw = [part.encode("utf-8", "surrogatepass") for part in parts]
    return hashlib.blake2b(repr([len(part) for part in raw]).encode() + b"".join(raw), digest_size=16).digest()


def chain_keys(messages: list[Message], seed: bytes, reasoning: bool = True) -> list[bytes]:
    """`keys[i]` identifies the conversation `messages[:i]`; `keys[0]` is `seed`. Linear in the text."""
    keys = [seed]
    for message in messages:
        keys.append(extend_key(keys[-1], message, reasoning))
    return keys


def extend_key(key: bytes, message: Message, reasoning: bool = True) -> bytes:
    """The key of a conversation with one more message."""
    return hashlib.blake2b(key + message_key(message, reasoning), digest_size=16).digest()


def context_key(tools: list[dict[str, Any]], template_kwargs: dict[str, Any]) -> bytes:
    """What else shapes the prompt: two conversations with different tools are different conversations."""
    return hashlib.blake2b(fastjson.dumps([tools, template_kwargs]), digest_size=16).digest()


def _canonical_arguments(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), ensure_ascii=True, sort_keys=False, separators=(",", ":"))
    except (ValueError, RecursionError):
        return arguments.strip()
