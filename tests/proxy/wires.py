"""How a harness of each dialect writes a conversation, echoes an answer, and spells the same history differently the next time."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar

PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
Call = tuple[str, str, dict[str, Any]]
"""(id, name, arguments)."""


@dataclass
class Wire:
    """A conversation on the wire. `items` is what grows."""

    system: str
    tools: bool
    items: list[dict[str, Any]] = field(default_factory=list)
    path: ClassVar[str]

    def forget(self) -> None:
        """The client no longer knows what its answers' reasoning was."""
        for item in self.items:
            item.pop("reasoning_content", None)
            item.pop("reasoning", None)

    def fork(self, length: int | None = None) -> Wire:
        return type(self)(self.system, self.tools, copy.deepcopy(self.items[:length]))


class Chat(Wire):
    path = "/v1/chat/completions"

    def body(self) -> dict[str, Any]:
        function = {"name": "bash", "parameters": PARAMETERS}
        tools = {"tools": [{"type": "function", "function": function}]} if self.tools else {}
        return {"model": "m", "messages": [{"role": "system", "content": self.system}, *self.items], **tools}

    def say(self, text: str) -> None:
        self.items.append({"role": "user", "content": text})

    def result(self, call: Call, text: str) -> None:
        self.items.append({"role": "tool", "tool_call_id": call[0], "content": text})

    def echo(self, reply: dict[str, Any]) -> None:
        self.items.append(copy.deepcopy(reply["choices"][0]["message"]))

    @staticmethod
    def read(reply: dict[str, Any]) -> tuple[str, list[Call]]:
        message = reply["choices"][0]["message"]
        calls = [
            (call["id"], call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message.get("tool_calls") or ()
        ]
        return message["content"] or "", calls

    def respell(self, rng: Random) -> None:
        for item in self.items:
            for call in item.get("tool_calls") or ():
                call["function"]["arguments"] = json.dumps(
                    json.loads(call["function"]["arguments"]), separators=rng.choice([(",", ":"), None])
                )
            if isinstance(item["content"], str) and item["content"] and rng.random() < 0.5:
                text = item["content"].strip() if item["role"] == "assistant" else item["content"]
                item["content"] = rng.choice([text, [{"type": "text", "text": text}]])


class Anthropic(Wire):
    path = "/v1/messages"

    def body(self) -> dict[str, Any]:
        tools = {"tools": [{"name": "bash", "input_schema": PARAMETERS}]} if self.tools else {}
        return {"model": "m", "max_tokens": 2000, "system": self.system, "messages": self.items, **tools}

    def forget(self) -> None:
        for item in self.items:
            if isinstance(item["content"], list):
                item["content"] = [block for block in item["content"] if block["type"] != "thinking"]

    def say(self, text: str) -> None:
        self.items.append({"role": "user", "content": text})

    def result(self, call: Call, text: str) -> None:
        self.items.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": call[0], "content": text}]})

    def echo(self, reply: dict[str, Any]) -> None:
        self.items.append({"role": "assistant", "content": copy.deepcopy(reply["content"])})

    @staticmethod
    def read(reply: dict[str, Any]) -> tuple[str, list[Call]]:
        text = "".join(block["text"] for block in reply["content"] if block["type"] == "text")
        return text, [(block["id"], block["name"], block["input"]) for block in reply["content"] if block["type"] == "tool_use"]

    def respell(self, rng: Random) -> None:
        for item in self.items:
            if isinstance(item["content"], str):
                if rng.random() < 0.5:
                    item["content"] = [{"type": "text", "text": item["content"], "cache_control": {"type": "ephemeral"}}]
            elif len(item["content"]) == 1 and item["content"][0]["type"] == "text" and rng.random() < 0.5:
                item["content"] = item["content"][0]["text"]


class Responses(Wire):
    path = "/v1/responses"

    def body(self) -> dict[str, Any]:
        tools = {"tools": [{"type": "function", "name": "bash", "parameters": PARAMETERS}]} if self.tools else {}
        return {"model": "m", "instructions": self.system, "input": self.items, "store": False, **tools}

    def forget(self) -> None:
        self.items[:] = [item for item in self.items if item.get("type") != "reasoning"]

    def say(self, text: str) -> None:
        self.items.append({"role": "user", "content": text})

    def result(self, call: Call, text: str) -> None:
        self.items.append({"type": "function_call_output", "call_id": call[0], "output": text})

    def echo(self, reply: dict[str, Any]) -> None:
        self.items += copy.deepcopy(reply["output"])

    @staticmethod
    def read(reply: dict[str, Any]) -> tuple[str, list[Call]]:
        text = "".join(part["text"] for item in reply["output"] if item["type"] == "message" for part in item["content"])
        calls = [item for item in reply["output"] if item["type"] == "function_call"]
        return text, [(item["call_id"], item["name"], json.loads(item["arguments"])) for item in calls]

    def respell(self, rng: Random) -> None:
        for item in self.items:
            if item.get("role") == "user" and isinstance(item["content"], str) and rng.random() < 0.5:
                item["content"] = [{"type": "input_text", "text": item["content"]}]
            if item.get("type") == "function_call":
                item["arguments"] = json.dumps(json.loads(item["arguments"]), separators=rng.choice([(",", ":"), None]))
            item.pop("status", None)


class Gemini(Wire):
    path = "/v1beta/models/m:generateContent"

    def body(self) -> dict[str, Any]:
        tools = {"tools": [{"functionDeclarations": [{"name": "bash", "parametersJsonSchema": PARAMETERS}]}]} if self.tools else {}
        return {"systemInstruction": {"parts": [{"text": self.system}]}, "contents": self.items, **tools}

    def forget(self) -> None:
        for item in self.items:
            item["parts"] = [part for part in item["parts"] if not part.get("thought")]

    def say(self, text: str) -> None:
        self.items.append({"role": "user", "parts": [{"text": text}]})

    def result(self, call: Call, text: str) -> None:
        response = {"name": call[1], "response": {"output": text}}
        self.items.append({"role": "user", "parts": [{"functionResponse": response}]})

    def echo(self, reply: dict[str, Any]) -> None:
        self.items.append(copy.deepcopy(reply["candidates"][0]["content"]))

    @staticmethod
    def read(reply: dict[str, Any]) -> tuple[str, list[Call]]:
        parts = reply["candidates"][0]["content"]["parts"]
        calls = [part["functionCall"] for part in parts if "functionCall" in part]
        text = "".join(part.get("text", "") for part in parts if not part.get("thought"))
        return text, [(call["id"], call["name"], call["args"]) for call in calls]

    def respell(self, rng: Random) -> None:
        for item in self.items:
            for part in item["parts"]:
                if "functionCall" in part and rng.random() < 0.5:
                    part["functionCall"].pop("id", None)


WIRES = (Chat, Anthropic, Responses, Gemini)
