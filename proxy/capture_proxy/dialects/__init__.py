"""One module per wire dialect: pure functions between the wire and the internal form of `capture_proxy.messages`.

A dialect module offers `parse(body, headers) -> AgentCall`, `reply(...)`, `stream_head/stream_body/noop`, `error(...)`. It does no I/O and
keeps no state, so that each can be read and tested alone.
"""

from types import ModuleType

from capture_proxy.dialects import chat

BY_NAME: dict[str, ModuleType] = {chat.NAME: chat}
