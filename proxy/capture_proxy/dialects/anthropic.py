"""Anthropic Messages, streaming and not: pure functions, wire <-> internal.

Invariant: as in `dialects.chat`. A `user` message that carries tool results becomes one `tool` message for each, in place; `system` becomes
the leading message, and a `system` role in the middle stays there. `cache_control` and other fields that reach no model are not read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from capture_proxy.dialects import images
from capture_proxy.dialects.wire import BadRequest, arguments_object, event, folded, pieces, retried, stop_strings, whole_number
from capture_proxy.messages import AgentCall, Message, Reply, ToolCall

NAME = "anthropic"

_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "max_tokens", "stop_sequences", "tool_choice", "thinking", "output_config")
_HOSTED = ("web_search", "web_fetch", "code_execution", "tool_search", "mcp_toolset", "advisor")
_ERRORS = {400: "invalid_request_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}
UNPARSED = "__unparsedToolInput"
"""Under this key claude-code itself keeps tool input that is no JSON object; ours goes out and comes back the same way."""


def parse(body: Any, headers: Mapping[str, str]) -> AgentCall:
    """The wire request as an internal call. Raises `BadRequest`."""
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise BadRequest("messages: a non-empty list is required")
    messages = _system(body.get("system"))
    tools, hosted = _tools(body.get("tools"))
    for i, message in enumerate(given):
        messages += _messages(message, f"messages[{i}]")
    choice = body.get("tool_choice")
    return AgentCall(
        dialect=NAME,
        model=str(body.get("model") or "policy"),
        messages=messages,
        tools=tools,
        stream=body.get("stream") is True,
        include_usage=True,
        max_tokens=whole_number(body.get("max_tokens"), "max_tokens"),
        stop=stop_strings(body.get("stop_sequences"), "stop_sequences"),
        tool_choice=_tool_choice(choice),
        response_format=_response_format(body.get("output_config")),
        requested_sampling={key: body[key] for key in _SAMPLING_FIELDS if body.get(key) is not None},
        retry_mark=retried(headers),
        left_out=(*hosted, *(["mcp_servers"] if body.get("mcp_servers") else [])),
        agent_id=headers.get("x-claude-code-agent-id"),
    )


def _system(value: Any) -> list[Message]:
    """The leading message, if any."""
    texts = [{"type": "text", "text": value}] if isinstance(value, str) else _texts(value or [], "system")
    return [{"role": "system", "content": folded(texts)}] if texts else []


def _messages(message: Any, where: str) -> list[Message]:
    """One wire message as the internal ones that it holds, in order."""
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
        raise BadRequest(f"{where}: an object whose role is user, assistant or system is required")
    role, content = message["role"], message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise BadRequest(f"{where}.content: must be a string or a list of blocks")
    return [_assistant(content, where)] if role == "assistant" else _blocks(role, content, where)


def _blocks(role: str, content: list[Any], where: str) -> list[Message]:
    out: list[Message] = []
    parts: list[dict[str, Any]] = []

    def flush() -> None:
        if parts:
            out.append({"role": role, "content": folded(list(parts))})
            parts.clear()

    for i, block in enumerate(content):
        at = f"{where}.content[{i}]"
        kind = block.get("type") if isinstance(block, dict) else type(block).__name__
        if kind in ("text", "image"):
            parts += _parts([block], at)
        elif kind == "tool_result" and role == "user" and isinstance(block.get("tool_use_id"), str):
            flush()
            out.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": _result(block.get("content"), at)})
        else:
            raise BadRequest(f"{at}: a block of type {kind!r} is not served here in a {role} message")
    flush()
    return out or [{"role": role, "content": ""}]


def _assistant(content: list[Any], where: str) -> Message:
    texts: list[dict[str, Any]] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(content):
        at = f"{where}.content[{i}]"
        kind = block.get("type") if isinstance(block, dict) else type(block).__name__
        if kind == "text":
            if calls:
                raise BadRequest(f"{at}: text after a tool call cannot be shown to this model in its place")
            texts += _texts([block], at)
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            if texts or calls:
                raise BadRequest(f"{at}: thinking after text or a tool call cannot be shown to this model in its place")
            thoughts.append(block["thinking"])
        elif kind == "tool_use" and isinstance(block.get("name"), str):
            function = {"name": block["name"], "arguments": _arguments(block.get("input"))}
            calls.append({"id": str(block.get("id") or ""), "type": "function", "function": function})
        else:
            raise BadRequest(f"{at}: a block of type {kind!r} is not served here in an assistant message")
    message: Message = {"role": "assistant", "content": folded(texts) if texts else None}
    if thoughts:
        message["reasoning"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _arguments(value: Any) -> str:
    if isinstance(value, dict) and set(value) == {UNPARSED} and isinstance(value[UNPARSED], dict):
        raw = value[UNPARSED].get("raw")
        if isinstance(raw, str):
            return raw
    return json.dumps(value if value is not None else {}, ensure_ascii=False)


def _result(content: Any, where: str) -> Any:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        # Of a client that finds its tools by a search: the tool itself is among the request's tools from now on.
        content = [{"type": "text", "text": block["tool_name"]} if _names_a_tool(block) else block for block in content]
    parts = _parts(content, where + ".content")
    return folded(parts) if parts else ""


def _names_a_tool(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "tool_reference" and isinstance(block.get("tool_name"), str)


def _parts(blocks: Any, where: str) -> list[dict[str, Any]]:
    """Text and image blocks as parts. Raises `BadRequest` for any other block."""
    if not isinstance(blocks, list):
        raise BadRequest(f"{where}: must be a string or a list of blocks")
    out: list[dict[str, Any]] = []
    for block in blocks:
        if isinstance(block, dict) and block.get("type") == "image":
            source = block["source"] if isinstance(block.get("source"), dict) else {}
            out.append(images.from_base64(source.get("media_type"), source.get("data"), where))
        else:
            out += _texts([block], where)
    return out


def _texts(blocks: Any, where: str) -> list[dict[str, Any]]:
    """Text blocks as text parts. Raises `BadRequest` for any other block."""
    if not isinstance(blocks, list):
        raise BadRequest(f"{where}: must be a string or a list of blocks")
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else type(block).__name__
        if kind != "text" or not isinstance(block.get("text"), str):
            raise BadRequest(f"{where}: a block of type {kind!r} is not served here")
    return [{"type": "text", "text": block["text"]} for block in blocks]


def _tools(tools: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """The client's tools as functions, and those that a server would run, which are left out."""
    left_out: list[str] = []
    if tools is None:
        return [], left_out
    if not isinstance(tools, list):
        raise BadRequest("tools: must be a list")
    out = []
    for i, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else tool
        if isinstance(kind, str) and kind.startswith(_HOSTED):
            left_out.append(f"tool {kind}")
            continue
        if not isinstance(tool, dict) or kind not in (None, "custom") or not isinstance(tool.get("name"), str):
            raise BadRequest(f"tools[{i}]: only tools that the client runs by a schema are served here, got {kind!r}")
        function = {"name": tool["name"], "description": tool.get("description"), "parameters": tool.get("input_schema")}
        out.append({"type": "function", "function": {key: value for key, value in function.items() if value is not None}})
    return out, left_out


def _response_format(config: Any) -> Any:
    wanted = config.get("format") if isinstance(config, dict) else None
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
        return None
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted.get("schema")}}


def _tool_choice(choice: Any) -> Any:
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind == "tool" and isinstance(choice.get("name"), str):
        return {"type": "function", "function": {"name": choice["name"]}}
    known = {None: None, "auto": "auto", "any": "required", "none": "none"}
    if kind is not None and (not isinstance(kind, str) or kind not in known):
        raise BadRequest(f"tool_choice: {choice!r} is not one of auto, any, none or a named tool")
    return known[kind]


def _input(call: ToolCall) -> dict[str, Any]:
    value = arguments_object(call.arguments)
    return value if value is not None else {UNPARSED: {"raw": call.arguments, "len": len(call.arguments)}}


def _stop(answer: Reply) -> dict[str, Any]:
    reason = {"length": "max_tokens", "tool_calls": "tool_use"}.get(answer.finish_reason, "end_turn")
    if answer.stop is not None and reason == "end_turn":
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": answer.stop}


def _usage(answer: Reply) -> dict[str, int]:
    fresh = answer.prompt_tokens - answer.cached_tokens
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": answer.cached_tokens}
    return {"input_tokens": fresh, **cached, "output_tokens": answer.completion_tokens}


def reply(answer: Reply, call: AgentCall, response_id: str, created: int) -> dict[str, Any]:
    """The complete answer as one JSON object."""
    content: list[dict[str, Any]] = []
    if answer.reasoning:
        content.append({"type": "thinking", "thinking": answer.reasoning, "signature": response_id})
    if answer.content:
        content.append({"type": "text", "text": answer.content})
    content += [{"type": "tool_use", "id": tool.id, "name": tool.name, "input": _input(tool)} for tool in answer.tool_calls]
    head = {"id": response_id, "type": "message", "role": "assistant", "model": call.model}
    return {**head, "content": content, **_stop(answer), "usage": _usage(answer)}


def stream_head(call: AgentCall, response_id: str, created: int) -> bytes:
    """The first event, sent as soon as the engine works on the call; the usage follows with the end."""
    head = {"id": response_id, "type": "message", "role": "assistant", "model": call.model}
    usage = {"input_tokens": 0, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 0}
    message: dict[str, Any] = {**head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    return event({"type": "message_start", "message": message}, "message_start")


def noop(call: AgentCall, response_id: str, created: int) -> bytes:
    """The dialect's own sign of life."""
    return event({"type": "ping"}, "ping")


def stream_body(answer: Reply, call: AgentCall, response_id: str, created: int) -> Iterator[bytes]:
    """All events after the head, the terminal one included."""
    blocks: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    if answer.reasoning:
        deltas: list[dict[str, Any]] = [{"type": "thinking_delta", "thinking": piece} for piece in pieces(answer.reasoning)]
        signed = {"type": "signature_delta", "signature": response_id}
        blocks.append(({"type": "thinking", "thinking": "", "signature": ""}, [*deltas, signed]))
    if answer.content:
        blocks.append(({"type": "text", "text": ""}, [{"type": "text_delta", "text": piece} for piece in pieces(answer.content)]))
    for tool in answer.tool_calls:
        head = {"type": "tool_use", "id": tool.id, "name": tool.name, "input": {}}
        text = tool.arguments if arguments_object(tool.arguments) is not None else json.dumps(_input(tool), ensure_ascii=False)
        blocks.append((head, [{"type": "input_json_delta", "partial_json": piece} for piece in pieces(text)]))
    for index, (head, deltas) in enumerate(blocks):
        yield event({"type": "content_block_start", "index": index, "content_block": head}, "content_block_start")
        for delta in deltas:
            yield event({"type": "content_block_delta", "index": index, "delta": delta}, "content_block_delta")
        yield event({"type": "content_block_stop", "index": index}, "content_block_stop")
    yield event({"type": "message_delta", "delta": _stop(answer), "usage": _usage(answer)}, "message_delta")
    yield event({"type": "message_stop"}, "message_stop")


def counted(tokens: int) -> dict[str, Any]:
    """The answer of `count_tokens`."""
    return {"input_tokens": tokens}


def error(message: str, status: int, code: str | None) -> dict[str, Any]:
    """The dialect's error object. A full context is told in the words at which clients compact."""
    if code == "context_length_exceeded":
        message = f"prompt is too long: {message}"
    kind = _ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def stream_error(message: str) -> bytes:
    """An error after the headers are out; the connection is aborted right after it."""
    return event(error(message, 500, None), "error")
