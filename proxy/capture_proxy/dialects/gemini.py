"""Google Gemini (`generateContent`), streaming and not: pure functions, wire <-> internal.

Invariant: as in `dialects.chat`. Model and stream stand in the route, which writes them into the body. A function's response without an id
belongs to the first call of that name that has none yet; a call whose arguments are no JSON object cannot be written on this wire and ends
the answer with the dialect's own `MALFORMED_FUNCTION_CALL`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from capture_proxy.dialects import images
from capture_proxy.dialects.wire import BadRequest, arguments_object, event, folded, pieces, retried, stop_strings, whole_number
from capture_proxy.messages import AgentCall, Message, Reply

NAME = "gemini"

_STATUS = {400: "INVALID_ARGUMENT", 404: "NOT_FOUND", 413: "INVALID_ARGUMENT", 429: "RESOURCE_EXHAUSTED", 503: "UNAVAILABLE"}
_MODES = {None: None, "MODE_UNSPECIFIED": None, "AUTO": "auto", "VALIDATED": "auto", "ANY": "required", "NONE": "none"}
_THEIRS = ("args", "response", "parameters", "parametersJsonSchema", "responseSchema", "responseJsonSchema")
_PAYLOADS = ("text", "functionCall", "functionResponse", "inlineData", "fileData", "executableCode", "codeExecutionResult")
_HOSTED = ("googleSearch", "googleSearchRetrieval", "codeExecution", "urlContext", "googleMaps", "fileSearch", "computerUse")


def parse(body: Any, headers: Mapping[str, str]) -> AgentCall:
    """The wire request as an internal call. Raises `BadRequest`."""
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    body = _camel(body.get("generateContentRequest") or body)
    if body.get("cachedContent") is not None:
        raise BadRequest("cachedContent: nothing is kept for later calls; send the whole conversation as contents")
    contents = body.get("contents")
    if isinstance(contents, dict):
        contents = [contents]
    if not isinstance(contents, list) or not contents:
        raise BadRequest("contents: a non-empty list is required")
    config = _object(body.get("generationConfig"), "generationConfig")
    if config.get("candidateCount") not in (None, 1):
        raise BadRequest(f"generationConfig.candidateCount: only 1 answer per call is served, got {config['candidateCount']!r}")
    tools, left_out = _tools(body.get("tools"))
    return AgentCall(
        dialect=NAME,
        model=str(body.get("model") or "policy"),
        messages=_system(body.get("systemInstruction")) + _Conversation().read(contents),
        tools=tools,
        stream=body.get("stream") is True,
        include_usage=True,
        max_tokens=whole_number(config.get("maxOutputTokens"), "generationConfig.maxOutputTokens"),
        stop=stop_strings(config.get("stopSequences"), "generationConfig.stopSequences"),
        tool_choice=_tool_choice(body.get("toolConfig")),
        response_format=_response_format(config),
        requested_sampling=dict(config),
        retry_mark=retried(headers),
        left_out=left_out,
    )


def _camel(value: Any) -> Any:
    """Both spellings of a field are one; what is the model's or the tool's own (arguments, results, schemas) stays as it is."""
    if isinstance(value, list):
        return [_camel(item) for item in value]
    if not isinstance(value, dict):
        return value
    named = {re.sub("_([a-z])", lambda match: match[1].upper(), key): item for key, item in value.items()}
    return {key: item if key in _THEIRS else _camel(item) for key, item in named.items()}


def _object(value: Any, where: str) -> dict[str, Any]:
    if value is None or isinstance(value, dict):
        return value or {}
    raise BadRequest(f"{where}: must be an object")


def _system(value: Any) -> list[Message]:
    if value is None:
        return []
    parts = [{"type": "text", "text": value}] if isinstance(value, str) else _texts(_parts(value, "systemInstruction"), "systemInstruction")
    return [{"role": "system", "content": folded(parts)}] if parts else []


def _parts(content: Any, where: str) -> list[dict[str, Any]]:
    parts = content.get("parts") if isinstance(content, dict) else None
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise BadRequest(f"{where}: an object with a list of parts is required")
    for i, part in enumerate(parts):
        if len(found := [key for key in _PAYLOADS if part.get(key) is not None]) > 1:
            raise BadRequest(f"{where}.parts[{i}]: a part holds one thing, this one {' and '.join(found)}")
    return parts


def _texts(parts: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    for i, part in enumerate(parts):
        if not isinstance(part.get("text"), str):
            raise BadRequest(f"{where}.parts[{i}]: a part with {_kind(part)!r} is not served here")
    return [{"type": "text", "text": part["text"]} for part in parts]


def _shown(parts: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """Text and image parts in the engine's form. Raises `BadRequest` for any other part."""
    out: list[dict[str, Any]] = []
    for part in parts:
        data = part.get("inlineData")
        out += [images.from_base64(data.get("mimeType"), data.get("data"), where)] if isinstance(data, dict) else _texts([part], where)
    return out


def _kind(part: dict[str, Any]) -> str:
    return next((key for key in part if key not in ("thought", "thoughtSignature", "videoMetadata")), "nothing")


class _Conversation:
    """Contents in order; it remembers the calls that no response has answered yet."""

    def __init__(self) -> None:
        self._open: list[tuple[str, str]] = []
        """(name, id)."""
        self._calls = 0

    def read(self, contents: list[Any]) -> list[Message]:
        messages: list[Message] = []
        for i, content in enumerate(contents):
            where = f"contents[{i}]"
            parts = _parts(content, where)
            role = content.get("role") or "user"
            if role not in ("user", "model", "function"):
                raise BadRequest(f"{where}.role: must be user or model, got {role!r}")
            messages += [self._answer(parts, where)] if role == "model" else self._given(parts, where)
        return messages

    def _answer(self, parts: list[dict[str, Any]], where: str) -> Message:
        texts: list[dict[str, Any]] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for i, part in enumerate(parts):
            at, call = f"{where}.parts[{i}]", part.get("functionCall")
            if isinstance(call, dict) and isinstance(call.get("name"), str):
                call_id = str(call.get("id") or f"call{self._calls}")
                self._calls += 1
                self._open.append((call["name"], call_id))
                function = {"name": call["name"], "arguments": json.dumps(call.get("args") or {}, ensure_ascii=False)}
                calls.append({"id": call_id, "type": "function", "function": function})
            elif part.get("thought") is True and isinstance(part.get("text"), str):
                if texts or calls:
                    raise BadRequest(f"{at}: a thought after text or a call cannot be shown to this model in its place")
                thoughts.append(part["text"])
            elif part.get("text") == "":
                continue  # carries a signature only
            elif calls:
                raise BadRequest(f"{at}: text after a function call cannot be shown to this model in its place")
            else:
                texts += _texts([part], at)
        message: Message = {"role": "assistant", "content": "".join(part["text"] for part in texts) if texts else None}
        if thoughts:
            message["reasoning"] = "".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        return message

    def _given(self, parts: list[dict[str, Any]], where: str) -> list[Message]:
        out: list[Message] = []
        said: list[dict[str, Any]] = []
        for i, part in enumerate(parts):
            at, response = f"{where}.parts[{i}]", part.get("functionResponse")
            if response is None:
                said += _shown([part], at)
                continue
            if not isinstance(response, dict) or not isinstance(response.get("name"), str):
                raise BadRequest(f"{at}.functionResponse: a name is required")
            result: Any = _result(response.get("response"))
            if response.get("parts"):
                result = [{"type": "text", "text": result}, *_shown(_parts(response, f"{at}.functionResponse"), f"{at}.functionResponse")]
            if said:
                out.append({"role": "user", "content": folded(said)})
                said = []
            out.append({"role": "tool", "tool_call_id": self._answered(response), "content": result})
        if said:
            out.append({"role": "user", "content": folded(said)})
        return out or [{"role": "user", "content": ""}]

    def _answered(self, response: dict[str, Any]) -> str:
        given = response.get("id")
        for name, call_id in self._open:
            if call_id == given or (given is None and name == response["name"]):
                self._open.remove((name, call_id))
                return call_id
        return str(given or "")


def _result(value: Any) -> str:
    """A tool's output as text: the one string of `{"output": ...}`, or the whole object."""
    if isinstance(value, dict) and set(value) == {"output"} and isinstance(value["output"], str):
        return value["output"]
    return json.dumps(value if value is not None else {}, ensure_ascii=False)


def _tools(tools: Any) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    out: list[dict[str, Any]] = []
    left_out: list[str] = []
    if tools is not None and not isinstance(tools, list):
        raise BadRequest("tools: must be a list")
    for i, tool in enumerate(tools or ()):
        if not isinstance(tool, dict):
            raise BadRequest(f"tools[{i}]: must be an object")
        for key, value in tool.items():
            if key in _HOSTED:
                left_out.append(f"tool {key}")
            elif key == "functionDeclarations" and isinstance(value, list):
                out += [_function(declared, f"tools[{i}].functionDeclarations[{n}]") for n, declared in enumerate(value)]
            else:
                raise BadRequest(f"tools[{i}]: a tool of kind {key!r} is not served here")
    return out, tuple(left_out)


def _function(declared: Any, where: str) -> dict[str, Any]:
    if not isinstance(declared, dict) or not isinstance(declared.get("name"), str):
        raise BadRequest(f"{where}: a name is required")
    parameters = declared.get("parametersJsonSchema", _lower_types(declared.get("parameters")))
    function = {"name": declared["name"], "description": declared.get("description"), "parameters": parameters}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _lower_types(schema: Any) -> Any:
    """Gemini writes the types of its own schema form in capitals; JSON Schema does not."""
    if isinstance(schema, list):
        return [_lower_types(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: value.lower() if key == "type" and isinstance(value, str) else _lower_types(value) for key, value in schema.items()}


def _tool_choice(config: Any) -> Any:
    calling = _object(_object(config, "toolConfig").get("functionCallingConfig"), "toolConfig.functionCallingConfig")
    mode, names = calling.get("mode"), calling.get("allowedFunctionNames") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise BadRequest("toolConfig.functionCallingConfig.allowedFunctionNames: must be a list of names")
    if mode is not None and (not isinstance(mode, str) or mode not in _MODES):
        raise BadRequest(f"toolConfig.functionCallingConfig.mode: {mode!r} is not one of AUTO, ANY, NONE, VALIDATED")
    if mode == "ANY" and len(names) == 1:
        return {"type": "function", "function": {"name": names[0]}}
    if names:
        raise BadRequest("toolConfig.functionCallingConfig.allowedFunctionNames: only one name, with mode ANY, is served")
    return _MODES[mode]


def _response_format(config: dict[str, Any]) -> Any:
    kind = config.get("responseMimeType")
    if kind in (None, "text/plain"):
        return None
    if kind != "application/json":
        raise BadRequest(f"generationConfig.responseMimeType: {kind!r} is not text/plain or application/json")
    schema = config.get("responseJsonSchema", _lower_types(config.get("responseSchema")))
    return {"type": "json_object"} if schema is None else {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def _body(call: AgentCall, response_id: str, parts: list[dict[str, Any]], finish: str | None, **fields: Any) -> dict[str, Any]:
    candidate: dict[str, Any] = {"content": {"role": "model", "parts": parts}, "index": 0}
    if finish is not None:
        candidate["finishReason"] = finish
    return {"candidates": [candidate], "modelVersion": call.model, "responseId": response_id, **fields}


def _finish(answer: Reply) -> str:
    if any(arguments_object(tool.arguments) is None for tool in answer.tool_calls):
        return "MALFORMED_FUNCTION_CALL"
    return "MAX_TOKENS" if answer.finish_reason == "length" else "STOP"


def _usage(answer: Reply) -> dict[str, int]:
    total = answer.prompt_tokens + answer.completion_tokens
    counts = {"promptTokenCount": answer.prompt_tokens, "candidatesTokenCount": answer.completion_tokens, "totalTokenCount": total}
    return counts | ({"cachedContentTokenCount": answer.cached_tokens} if answer.cached_tokens else {})


def _calls(answer: Reply) -> list[dict[str, Any]]:
    read = [(tool, arguments_object(tool.arguments)) for tool in answer.tool_calls]
    return [{"functionCall": {"id": tool.id, "name": tool.name, "args": args}} for tool, args in read if args is not None]


def reply(answer: Reply, call: AgentCall, response_id: str, created: int) -> dict[str, Any]:
    """The complete answer as one JSON object."""
    parts: list[dict[str, Any]] = []
    if answer.reasoning:
        parts.append({"text": answer.reasoning, "thought": True})
    if answer.content:
        parts.append({"text": answer.content})
    return _body(call, response_id, parts + _calls(answer), _finish(answer), usageMetadata=_usage(answer))


def stream_head(call: AgentCall, response_id: str, created: int) -> bytes:
    """The first event, sent as soon as the engine works on the call."""
    return noop(call, response_id, created)


def noop(call: AgentCall, response_id: str, created: int) -> bytes:
    """An empty text part: a sign of life; a comment line would break the client."""
    return event(_body(call, response_id, [{"text": ""}], None))


def stream_body(answer: Reply, call: AgentCall, response_id: str, created: int) -> Iterator[bytes]:
    """All events after the head; the last one has the finish reason and the usage."""
    for piece in pieces(answer.reasoning or ""):
        yield event(_body(call, response_id, [{"text": piece, "thought": True}], None))
    for piece in pieces(answer.content or ""):
        yield event(_body(call, response_id, [{"text": piece}], None))
    yield event(_body(call, response_id, _calls(answer) or [{"text": ""}], _finish(answer), usageMetadata=_usage(answer)))


def counted(tokens: int) -> dict[str, Any]:
    """The answer of `countTokens`."""
    return {"totalTokens": tokens}


def error(message: str, status: int, code: str | None) -> dict[str, Any]:
    """The dialect's error object."""
    return {
        "error": {"code": status, "message": message, "status": _STATUS.get(status, "INVALID_ARGUMENT" if status < 500 else "INTERNAL")}
    }


def stream_error(message: str) -> bytes:
    """An error after the headers are out; the connection is aborted right after it."""
    return event(error(message, 500, None))
