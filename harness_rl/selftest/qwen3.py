"""Qwen3's own tokenizer and chat template, and vLLM's reading of what the model says, without an engine.

Invariant: `render` gives the ids that vLLM gives for the same chat request, and `parse` the message that its hermes and qwen3 parsers read
(a parity test holds both against a real vLLM); the files are the model's own, from a package at a pinned version.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

Chat = dict[str, Any]
"""The body of a chat request."""


@dataclass(frozen=True)
class Qwen3:
    """`folder` holds tokenizer.json and tokenizer_config.json."""

    folder: Path

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    @cached_property
    def end(self) -> int:
        """The id that ends an assistant turn."""
        return self.id_of("<|im_end|>")

    def id_of(self, token: str) -> int:
        found = self.tokenizer.token_to_id(token)
        assert found is not None, token
        return int(found)

    def encode(self, text: str) -> list[int]:
        """The canonical ids of a text; control tokens in it are control tokens."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_oddly(self, text: str) -> list[int]:
        """Ids of the same text that no tokenizer would give: its words are cut in two wherever that is possible."""
        out: list[int] = []
        for i in self.encode(text):
            piece = self.decode([i])
            middle = len(piece) // 2
            cut = self.encode(piece[:middle]) + self.encode(piece[middle:]) if middle and not piece.startswith("<") else [i]
            out += cut if "\ufffd" not in piece else [i]
        return out if self.decode(out) == text else self.encode(text)

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def render(self, chat: Chat) -> list[int]:
        return self.encode(self.text(chat))

    def text(self, chat: Chat) -> str:
        """What the model is shown of a chat request."""
        prompt = self._template.render(
            messages=_placed([_shown(message) for message in chat["messages"]]),
            tools=[_tool(tool) for tool in chat.get("tools") or ()] or None,
            add_generation_prompt=chat.get("add_generation_prompt", True),
            **(chat.get("chat_template_kwargs") or {}),
        )
        if chat.get("continue_final_message"):
            last = _shown(chat["messages"][-1])["content"].strip()
            prompt = prompt[: prompt.rindex(last) + len(last)]
        return prompt

    @cached_property
    def _template(self) -> jinja2.Template:
        source = json.loads((self.folder / "tokenizer_config.json").read_text())["chat_template"]
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        return environment.from_string(source)

    def parse(self, ids: list[int], chat: Chat) -> dict[str, Any]:
        """The assistant message that vLLM makes of sampled ids; of an end of turn the caller has freed them."""
        reasoning, content = self._split_thinking(ids, chat)
        calls: list[dict[str, Any]] = []
        if chat.get("tools") and chat.get("tool_choice") != "none" and content is not None:
            content, calls = _split_calls(content)
        wire = [{"id": f"chatcmpl-tool-{i}", "type": "function", "function": call} for i, call in enumerate(calls)]
        return {"role": "assistant", "content": content, "reasoning": reasoning, "tool_calls": wire}

    def _split_thinking(self, ids: list[int], chat: Chat) -> tuple[str | None, str | None]:
        """(reasoning, content). What is sampled is thinking until that ends or a tool is called, unless thinking is off."""
        if (chat.get("chat_template_kwargs") or {}).get("enable_thinking") is False:
            return None, self.decode(ids)
        begin, end, call = (self.id_of(token) for token in ("<think>", "</think>", "<tool_call>"))
        stop = next((n for n, i in enumerate(ids) if i in (end, call)), len(ids))
        reasoning = self.decode([i for i in ids[:stop] if i != begin])
        unseen = (end, self.end, self.id_of("<|im_start|>"))
        content = self.decode([i for i in ids[stop:] if i not in unseen])
        return reasoning or None, content or None


def _shown(message: dict[str, Any]) -> dict[str, Any]:
    """A message as vLLM hands it to the template."""
    content = message.get("content")
    text = content if isinstance(content, str) else "\n".join(part["text"] for part in content or ())
    shown: dict[str, Any] = {"role": message["role"], "content": text}
    if message["role"] == "assistant":
        if message.get("reasoning") is not None:
            shown["reasoning_content"] = message["reasoning"]
        calls = copy.deepcopy(message.get("tool_calls") or [])
        for call in calls:
            call["function"]["arguments"] = _arguments(call["function"].get("arguments"))
        if calls:
            shown["tool_calls"] = calls
    return shown


def _placed(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The template knows no developer: as soon as there is one, vLLM makes one system message of them all, at the front."""
    if all(message["role"] != "developer" for message in messages):
        return messages
    folded = [message["content"] for message in messages if message["role"] in ("system", "developer")]
    rest = [message for message in messages if message["role"] not in ("system", "developer")]
    return [{"role": "system", "content": "\n\n".join(folded)}, *rest]


def _arguments(text: Any) -> dict[str, Any]:
    """vLLM shows arguments that are no JSON object as an empty one."""
    try:
        value = json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as vLLM's own model of the request writes it out again."""
    function = tool["function"]
    shown = {"name": function["name"], "description": function.get("description"), "parameters": function.get("parameters")}
    return {"type": "function", "function": shown | ({"strict": function["strict"]} if "strict" in function else {})}


def _split_calls(content: str) -> tuple[str | None, list[dict[str, Any]]]:
    """(content, calls); where one call cannot be read all of it stays content."""
    head, *raw = content.split("<tool_call>")
    try:
        found = [json.loads(part.partition("</tool_call>")[0]) for part in raw]
        calls = [{"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)} for call in found]
    except (ValueError, KeyError, TypeError):
        return content, []
    if not calls:
        return content, []
    return (head if head.strip() else None), calls
