"""OpenAI Chat Completions, streaming and not: pure functions, wire <-> internal.

Invariant: fields we do not know are ignored, content we cannot pass on is refused with the dialect's own error, and the streamed and the
plain form of an answer carry the same text, calls, finish reason and usage.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from capture_proxy.dialects import images
from capture_proxy.dialects.wire import BadRequest, content_of, event, pieces, retried, stop_strings, whole_number
from capture_proxy.messages import AgentCall, Message, Reply

NAME = "chat"

_SAMPLING_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "max_tokens",
    "max_completion_tokens", "stop", "logit_bias", "tool_choice", "response_format", "reasoning_effort", "parallel_tool_calls",
)  # fmt: skip


def parse(body: Any, headers: Mapping[str, str]) -> AgentCall:
    """The wire request as an internal call. Raises `BadRequest`."""
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages: a non-empty list is required")
    if body.get("n") not in (None, 1):
        raise BadRequest(f"n: only 1 answer per call is served, got {body['n']!r}")
    options = body.get("stream_options")
    max_completion, max_tokens = (whole_number(body.get(field), field) for field in ("max_completion_tokens", "max_tokens"))
    return AgentCall(
        dialect=NAME,
        model=str(body.get("model") or "policy"),
        messages=[_message(message, i) for i, message in enumerate(messages)],
        tools=_tools(body.get("tools")),
        stream=body.get("stream") is True,
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        max_tokens=max_completion or max_tokens,
        stop=stop_strings(body.get("stop"), "stop"),
        tool_choice=_tool_choice(body.get("tool_choice")),
        response_format=_response_format(body.get("response_format")),
        requested_sampling={key: body[key] for key in _SAMPLING_FIELDS if body.get(key) is not None},
        retry_mark=retried(headers),
        agent_id=headers.get("x-session-id"),
    )


def _message(message: Any, index: int) -> Message:
    where = f"messages[{index}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadRequest(f"{where}: an object with a role is required")
    out: Message = {"role": message["role"], "content": content_of(message.get("content"), f"{where}.content", ("text",), _image)}
    if isinstance(message.get("name"), str):
        out["name"] = message["name"]
    reasoning = message.get("reasoning_content", message.get("reasoning"))
    if isinstance(reasoning, str):
        out["reasoning"] = reasoning
    if message.get("tool_calls") and not isinstance(message["tool_calls"], list):
        raise BadRequest(f"{where}.tool_calls: must be a list")
    if message.get("tool_calls"):
        out["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message["tool_calls"])]
    if isinstance(message.get("tool_call_id"), str):
        out["tool_call_id"] = message["tool_call_id"]
    return out


def _image(part: Any, where: str) -> dict[str, Any] | None:
    if not isinstance(part, dict) or part.get("type") != "image_url":
        return None
    given = part.get("image_url")
    url, detail = (given.get("url"), given.get("detail")) if isinstance(given, dict) else (given, None)
    return images.from_url(url, detail, where)


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"{where}: only function calls are supported")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments if arguments is not None else {})
    return {"id": str(call.get("id") or ""), "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _tools(tools: Any) -> list[dict[str, Any]]:
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise BadRequest("tools: must be a list")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type") != "function" or not isinstance(function.get("name"), str):
            kind = tool.get("type") if isinstance(tool, dict) else tool
            raise BadRequest(f"tools[{i}]: only function tools are served here, got {kind!r}")
    return tools


def _tool_choice(choice: Any) -> Any:
    named = isinstance(choice, dict) and isinstance(choice.get("function"), dict)
    if choice is not None and not named and choice not in ("auto", "none", "required"):
        raise BadRequest(f"tool_choice: {choice!r} is not one of auto, none, required or a named function")
    return choice


def _response_format(value: Any) -> Any:
    if value is None or (isinstance(value, dict) and value.get("type") in ("text", "json_object", "json_schema")):
        return value
    raise BadRequest("response_format: its type must be text, json_object or json_schema")


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
    }


def reply(answer: Reply, call: AgentCall, response_id: str, created: int) -> dict[str, Any]:
    """The complete answer as one JSON object."""
    message = answer.message()
    if "reasoning" in message:
        message["reasoning_content"] = message.pop("reasoning")
    return {
        "id": response_id,
        "object": "chat.completion",
        "created": created,
        "model": call.model,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": answer.finish_reason}],
        "usage": _usage(answer),
    }


def _chunk(call: AgentCall, response_id: str, created: int, delta: dict[str, Any] | None, **extra: Any) -> bytes:
    finish = extra.pop("finish_reason", None)
    choices = [] if delta is None else [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]
    body = {"id": response_id, "object": "chat.completion.chunk", "created": created, "model": call.model, "choices": choices, **extra}
    return event(body)


def stream_head(call: AgentCall, response_id: str, created: int) -> bytes:
    """The first event: the role, sent as soon as the engine works on the call."""
    return _chunk(call, response_id, created, {"role": "assistant", "content": ""})


def noop(call: AgentCall, response_id: str, created: int) -> bytes:
    """A chunk with an empty delta: it counts as activity for every client measured, and changes nothing."""
    return _chunk(call, response_id, created, {})


def stream_body(answer: Reply, call: AgentCall, response_id: str, created: int) -> Iterator[bytes]:
    """All events after the head, terminal marker included."""
    for name, text in (("reasoning_content", answer.reasoning), ("content", answer.content)):
        for piece in pieces(text or ""):
            yield _chunk(call, response_id, created, {name: piece})
    for index, tool in enumerate(answer.tool_calls):
        head = {"index": index, "id": tool.id, "type": "function", "function": {"name": tool.name, "arguments": ""}}
        yield _chunk(call, response_id, created, {"tool_calls": [head]})
        for piece in pieces(tool.arguments):
            yield _chunk(call, response_id, created, {"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    yield _chunk(call, response_id, created, {}, finish_reason=answer.finish_reason)
    if call.include_usage:
        yield _chunk(call, response_id, created, None, usage=_usage(answer))
    yield b"data: [DONE]\n\n"


def error(message: str, status: int, code: str | None) -> dict[str, Any]:
    """The dialect's error object. Clients retry a 4xx that says `server_error`, so none does."""
    kind = "invalid_request_error" if status < 429 else "rate_limit_error" if status == 429 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def stream_error(message: str) -> bytes:
    """Nothing: clients of this dialect ask again when the connection breaks off, and some give up at an error event (pi, qwen-code)."""
    return b""
