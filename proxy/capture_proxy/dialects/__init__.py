"""One module per wire dialect: pure functions between the wire and the internal form of `capture_proxy.messages`.

A dialect module offers `parse(body, headers) -> AgentCall`, `reply(...)`, `stream_head/stream_body/noop`, `error(...)`. It does no I/O and
keeps no state, so that each can be read and tested alone.
"""

import re
from types import ModuleType

from capture_proxy.dialects import anthropic, chat, gemini, responses

BY_NAME: dict[str, ModuleType] = {dialect.NAME: dialect for dialect in (chat, responses, anthropic, gemini)}


def of_path(path: str) -> ModuleType:
    """The dialect in which a client of this route reads errors."""
    if "/v1/messages" in path:
        return anthropic
    return gemini if "/v1beta/" in path or re.search(r"/models/.+:(generateContent|streamGenerateContent|countTokens)$", path) else chat
