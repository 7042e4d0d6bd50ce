"""How the dialects write an image, and the one form that the engine reads: a data URL.

Invariant: only what stands in the request itself is passed on. An address, or the name of an uploaded file, is refused: nothing here or in
the engine may fetch for an agent.
"""

from __future__ import annotations

import re
from typing import Any

from capture_proxy.dialects.wire import BadRequest

_DATA = re.compile(r"data:image/[\w.+-]{1,64};base64,", re.ASCII)
_TYPE = re.compile(r"image/[\w.+-]{1,64}", re.ASCII)


def from_url(url: Any, detail: Any, where: str) -> dict[str, Any]:
    """The part of an OpenAI image, a data URL. Raises `BadRequest`."""
    if not isinstance(url, str) or not _DATA.match(url):
        raise BadRequest(f"{where}: an image must be sent as a data:image/...;base64 URL; nothing is fetched from an address or a store")
    return {"type": "image_url", "image_url": {"url": url, **({"detail": detail} if isinstance(detail, str) else {})}}


def from_base64(media_type: Any, data: Any, where: str) -> dict[str, Any]:
    """The part of an image whose bytes stand in the request. Raises `BadRequest`."""
    if not isinstance(media_type, str) or not _TYPE.fullmatch(media_type) or not isinstance(data, str):
        raise BadRequest(f"{where}: an image must be sent as base64 data with an image/... media type; nothing is fetched from an address")
    return {"type": "image_url", "image_url": {"url": f"data:{media_type};base64,{data}"}}
