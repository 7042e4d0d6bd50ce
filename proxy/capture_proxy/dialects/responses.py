"""OpenAI Responses, streaming and not: pure functions, wire <-> internal.

Invariant: as in `dialects.chat`. The items of one answer (reasoning, text, calls) are one assistant message inside; what a request leaves
to the server to remember is in place before it comes here (`recall`). Every kind of tool that the client runs is a function to the model;
what kind it was on the wire is in the call's `tool_forms`, and the answer goes back in that form. Tools that a server would run are left
out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from capture_proxy.dialects import chat, images
from capture_proxy.dialects.wire import BadRequest, arguments_object, content_of, event, pieces, retried, whole_number
from capture_proxy.messages import AgentCall, Message, Reply, ToolCall, ToolForm

NAME = "responses"

_SAMPLING_FIELDS = ("temperature", "top_p", "max_output_tokens", "tool_choice", "parallel_tool_calls", "reasoning", "text")
_HOSTED = ("web_search", "file_search", "code_interpreter", "image_generation", "mcp", "computer_use")
_TEXTS = ("input_text", "output_text", "text")
_FREEFORM = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
_SHELL = {
    "type": "object",
    "properties": {"command": {"type": "array", "items": {"type": "string"}}, "timeout_ms": {"type": "integer"}},
    "required": ["command"],
}

error = chat.error


def parse(body: Any, headers: Mapping[str, str]) -> AgentCall:
    """The wire request as an internal call. Raises `BadRequest`."""
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    for name in ("conversation", "prompt"):
        if body.get(name) is not None:
            raise BadRequest(f"{name}: not served here; send the conversation as input, or a previous_response_id")
    tools = _Tools()
    tools.add(body.get("tools"), "tools", None)
    return AgentCall(
        dialect=NAME,
        model=str(body.get("model") or "policy"),
        messages=_messages(body.get("instructions"), body.get("input"), tools.forms),
        tools=tools.functions,
        stream=body.get("stream") is True,
        include_usage=True,
        max_tokens=whole_number(body.get("max_output_tokens"), "max_output_tokens"),
        tool_choice=_tool_choice(body.get("tool_choice")),
        response_format=_response_format(body.get("text")),
        requested_sampling={key: body[key] for key in _SAMPLING_FIELDS if body.get(key) is not None},
        retry_mark=retried(headers),
        agent_id=headers.get("thread-id"),
        tool_forms=tools.forms,
        left_out=tuple(tools.left_out),
    )


@dataclass
class _Tools:
    """The tools of a request as functions, and how each is written on the wire."""

    functions: list[dict[str, Any]] = field(default_factory=list)
    forms: dict[str, ToolForm] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def add(self, tools: Any, where: str, namespace: str | None) -> None:
        if tools is None:
            return
        if not isinstance(tools, list):
            raise BadRequest(f"{where}: must be a list")
        for i, tool in enumerate(tools):
            self._add(tool, f"{where}[{i}]", namespace)

    def _add(self, tool: Any, where: str, namespace: str | None) -> None:
        kind = tool.get("type") if isinstance(tool, dict) else type(tool).__name__
        name = tool.get("name") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind.startswith(_HOSTED):
            self.left_out.append(f"tool {kind}")
        elif kind == "namespace" and isinstance(name, str) and namespace is None:
            self.add(tool.get("tools"), where + ".tools", name)
        elif kind == "local_shell":
            self._function(ToolForm("local_shell", "local_shell", namespace), "Runs a command.", _SHELL)
        elif kind == "custom" and isinstance(name, str):
            self._function(ToolForm("custom", name, namespace), tool.get("description"), _FREEFORM)
        elif kind == "function" and isinstance(name, str):
            self._function(ToolForm("function", name, namespace), tool.get("description"), tool.get("parameters"))
        else:
            raise BadRequest(f"{where}: a tool of type {kind!r} is not served here")

    def _function(self, form: ToolForm, description: Any, parameters: Any) -> None:
        function = {"name": _inner_name(form.name, form.namespace), "description": description, "parameters": parameters}
        if function["name"] in self.forms:
            raise BadRequest(f"tools: two tools are called {function['name']!r} by the model")
        self.functions.append({"type": "function", "function": {key: value for key, value in function.items() if value is not None}})
        self.forms[function["name"]] = form


def _inner_name(name: str, namespace: str | None) -> str:
    return f"{namespace}__{name}" if namespace else name


def _messages(instructions: Any, given: Any, forms: Mapping[str, ToolForm]) -> list[Message]:
    messages: list[Message] = []
    if instructions is not None:
        if not isinstance(instructions, str):
            raise BadRequest("instructions: must be a string")
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise BadRequest("input: a string or a non-empty list of items is required")
    answer: Message | None = None
    """The assistant message that is being put together."""
    for i, item in enumerate(given):
        where = f"input[{i}]"
        part = _assistant_part(item, where)
        if part is None:
            answer = None
            messages.append(_other(item, where))
            continue
        # A text after a call, or a second text, begins another answer: inside one message it would lose its place.
        if answer is None or (not part.get("tool_calls") and ("tool_calls" in answer or answer["content"] is not None)):
            answer = {"role": "assistant", "content": None}
            messages.append(answer)
        _merge(answer, part)
    return messages


def _merge(answer: Message, part: Message) -> None:
    if part.get("content") is not None:
        answer["content"] = part["content"]
    if "reasoning" in part:
        answer["reasoning"] = "\n".join(filter(None, (answer.get("reasoning"), part["reasoning"])))
    if "tool_calls" in part:
        answer.setdefault("tool_calls", []).extend(part["tool_calls"])


def _assistant_part(item: Any, where: str) -> Message | None:
    """What an item adds to an assistant message; None for any other item. Raises `BadRequest`."""
    if not isinstance(item, dict):
        raise BadRequest(f"{where}: must be an object")
    match item.get("type", "message"):
        case "message" if item.get("role") == "assistant":
            return {"content": content_of(item.get("content"), f"{where}.content", _TEXTS, _image)}
        case "reasoning":
            return {"reasoning": _reasoning(item)}
        case "function_call":
            arguments = item.get("arguments")
            return _call(item, item.get("name"), arguments if isinstance(arguments, str) else json.dumps(arguments or {}), where)
        case "custom_tool_call":
            return _call(item, item.get("name"), json.dumps({"input": item.get("input")}, ensure_ascii=False), where)
        case "local_shell_call":
            action = item.get("action")
            given = action if isinstance(action, dict) else {}
            known = {key: given[key] for key in ("command", "timeout_ms", "working_directory", "user", "env") if given.get(key)}
            return _call(item, "local_shell", json.dumps(known, ensure_ascii=False), where)
        case _:
            return None


def _call(item: dict[str, Any], name: Any, arguments: str, where: str) -> Message:
    if not isinstance(name, str):
        raise BadRequest(f"{where}: a call needs a name")
    namespace = item.get("namespace")
    function = {"name": _inner_name(name, namespace if isinstance(namespace, str) else None), "arguments": arguments}
    return {"tool_calls": [{"id": str(item.get("call_id") or item.get("id") or ""), "type": "function", "function": function}]}


def _other(item: dict[str, Any], where: str) -> Message:
    kind, role = item.get("type", "message"), item.get("role")
    if kind == "message" and role in ("user", "system", "developer"):
        return {"role": role, "content": content_of(item.get("content"), f"{where}.content", _TEXTS, _image)}
    if kind in ("function_call_output", "custom_tool_call_output", "local_shell_call_output"):
        call_id = item.get("call_id") or item.get("id")
        return {
            "role": "tool",
            "tool_call_id": str(call_id or ""),
            "content": content_of(item.get("output"), f"{where}.output", _TEXTS, _image) or "",
        }
    raise BadRequest(f"{where}: an item of type {kind!r}" + (f" and role {role!r}" if kind == "message" else "") + " is not served here")


def _image(part: Any, where: str) -> dict[str, Any] | None:
    if not isinstance(part, dict) or part.get("type") != "input_image":
        return None
    return images.from_url(part.get("image_url"), part.get("detail"), where)


def _reasoning(item: dict[str, Any]) -> str:
    parts = item.get("content") or item.get("summary") or []
    if isinstance(parts, str):
        return parts
    if not isinstance(parts, list):
        raise BadRequest("input: the content of a reasoning item must be a string or a list of parts")
    return "\n".join(part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str))


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") in ("function", "custom") and isinstance(choice.get("name"), str):
        namespace = choice.get("namespace")
        name = _inner_name(choice["name"], namespace if isinstance(namespace, str) else None)
        return {"type": "function", "function": {"name": name}}
    if choice not in (None, "auto", "none", "required"):
        raise BadRequest(f"tool_choice: {choice!r} is not one of auto, none, required or a named tool")
    return choice


def _response_format(text: Any) -> Any:
    wanted = text.get("format") if isinstance(text, dict) else None
    given = wanted if isinstance(wanted, dict) else {}
    kind = given.get("type")
    if kind in (None, "text"):
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if kind == "json_schema":
        return {"type": "json_schema", "json_schema": {key: given[key] for key in ("name", "schema", "strict") if key in given}}
    raise BadRequest("text.format: its type must be text, json_object or json_schema")


def _items(answer: Reply, call: AgentCall, response_id: str) -> list[dict[str, Any]]:
    """The output items of an answer, complete."""
    items: list[dict[str, Any]] = []
    if answer.reasoning:
        thoughts = [{"type": "reasoning_text", "text": answer.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{response_id}", "summary": [], "content": thoughts, "encrypted_content": None})
    status = "incomplete" if answer.finish_reason == "length" else "completed"
    if answer.content:
        content = [{"type": "output_text", "text": answer.content, "annotations": [], "logprobs": []}]
        items.append({"type": "message", "id": f"msg_{response_id}", "role": "assistant", "status": status, "content": content})
    items += [_call_item(tool, call.tool_forms.get(tool.name), status) for tool in answer.tool_calls]
    return items


def _call_item(tool: ToolCall, form: ToolForm | None, status: str) -> dict[str, Any]:
    """A call in the form in which its tool was offered; as a plain function call where the arguments do not fit that form."""
    arguments = arguments_object(tool.arguments) or {}
    name = {"name": tool.name} if form is None else {"name": form.name}
    if form is not None and form.namespace is not None:
        name["namespace"] = form.namespace
    if form is not None and form.kind == "custom" and isinstance(arguments.get("input"), str):
        return {"type": "custom_tool_call", "id": f"ctc_{tool.id}", "call_id": tool.id, **name, "input": arguments["input"]}
    if form is not None and form.kind == "local_shell" and isinstance(arguments.get("command"), list):
        action = {"type": "exec", "command": [str(word) for word in arguments["command"]], "env": {}}
        action |= {key: arguments[key] for key in ("timeout_ms",) if type(arguments.get(key)) is int}
        return {"type": "local_shell_call", "id": f"lsh_{tool.id}", "call_id": tool.id, "status": status, "action": action}
    return {"type": "function_call", "id": f"fc_{tool.id}", "call_id": tool.id, **name, "arguments": tool.arguments, "status": status}


def _response(call: AgentCall, response_id: str, created: int, status: str, **fields: Any) -> dict[str, Any]:
    head = {"id": f"resp_{response_id}", "object": "response", "created_at": created, "status": status, "model": call.model}
    rest: dict[str, Any] = {"error": None, "incomplete_details": None, "instructions": None, "metadata": {}, "output": [], "usage": None}
    echoed = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "temperature": None, "top_p": None}
    return {**head, **rest, **echoed, **fields}


def _finished(answer: Reply, call: AgentCall, response_id: str, created: int) -> dict[str, Any]:
    usage = {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }
    cut = answer.finish_reason == "length"
    details = {"reason": "max_output_tokens"} if cut else None
    status = "incomplete" if cut else "completed"
    output = _items(answer, call, response_id)
    return _response(call, response_id, created, status, incomplete_details=details, output=output, usage=usage)


def reply(answer: Reply, call: AgentCall, response_id: str, created: int) -> dict[str, Any]:
    """The complete answer as one JSON object."""
    return _finished(answer, call, response_id, created)


def _event(kind: str, number: int, **fields: Any) -> bytes:
    return event({"type": kind, "sequence_number": number, **fields}, kind)


def stream_head(call: AgentCall, response_id: str, created: int) -> bytes:
    """The first event, sent as soon as the engine works on the call."""
    return _event("response.created", 0, response=_response(call, response_id, created, "in_progress"))


def noop(call: AgentCall, response_id: str, created: int) -> bytes:
    """The dialect's own sign of life; comment lines do not count for codex."""
    return _event("response.in_progress", 1, response=_response(call, response_id, created, "in_progress"))


def stream_body(answer: Reply, call: AgentCall, response_id: str, created: int) -> Iterator[bytes]:
    """All events after the head, the terminal one included."""
    number = 1
    for index, item in enumerate(_items(answer, call, response_id)):
        for kind, fields in _item_events(item):
            number += 1
            yield _event(kind, number, output_index=index, **fields)
    finished = _finished(answer, call, response_id, created)
    yield _event(f"response.{finished['status']}", number + 1, response=finished)


def _item_events(item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The life cycle of one item."""
    at = {"item_id": item["id"]}
    match item["type"]:
        case "message":
            part = item["content"][0]
            place = {**at, "content_index": 0}
            yield "response.output_item.added", {"item": {**item, "status": "in_progress", "content": []}}
            yield "response.content_part.added", {**place, "part": {**part, "text": ""}}
            for piece in pieces(part["text"]):
                yield "response.output_text.delta", {**place, "delta": piece, "logprobs": []}
            yield "response.output_text.done", {**place, "text": part["text"], "logprobs": []}
            yield "response.content_part.done", {**place, "part": part}
        case "reasoning":
            text, place = item["content"][0]["text"], {**at, "content_index": 0}
            yield "response.output_item.added", {"item": {**item, "content": []}}
            for piece in pieces(text):
                yield "response.reasoning_text.delta", {**place, "delta": piece}
            yield "response.reasoning_text.done", {**place, "text": text}
        case "function_call":
            yield "response.output_item.added", {"item": {**item, "arguments": "", "status": "in_progress"}}
            for piece in pieces(item["arguments"]):
                yield "response.function_call_arguments.delta", {**at, "delta": piece}
            yield "response.function_call_arguments.done", {**at, "name": item["name"], "arguments": item["arguments"]}
        case "custom_tool_call":
            yield "response.output_item.added", {"item": {**item, "input": ""}}
            for piece in pieces(item["input"]):
                yield "response.custom_tool_call_input.delta", {**at, "delta": piece}
            yield "response.custom_tool_call_input.done", {**at, "input": item["input"]}
        case _:
            yield "response.output_item.added", {"item": item}
    yield "response.output_item.done", {"item": item}


def stream_error(message: str) -> bytes:
    """An error after the headers are out; the connection is aborted right after it."""
    failed = {"id": "resp_failed", "object": "response", "status": "failed", "output": []}
    return _event("response.failed", 1, response={**failed, "error": {"code": "server_error", "message": message}})
