"""Images in a conversation: opaque parts in the engine's own form, and where the engine's tokens for them stand in a prompt.

Invariant: an image reaches the engine as the bytes that the agent sent, or the call is refused; nothing is ever fetched from an address. In
the ids that are sent, every image stands exactly where the engine's own render has it among its neighbours, or the render is sent as it is.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from capture_proxy.codec import Ids
from capture_proxy.messages import Message


def shown(messages: list[Message]) -> bool:
    """Whether any message holds an image."""
    contents = (message.get("content") for message in messages)
    return any(part.get("type") == "image_url" for content in contents if isinstance(content, list) for part in content)


def moved(features: dict[str, Any], rendered: Ids, sent: Ids) -> dict[str, Any] | None:
    """The engine's `features` of the prompt `rendered` (vLLM's MultiModalFeatures) for the prompt `sent`.

    The two may differ in what lies between the images. None where the ids that stand for images are not the same ones in both.
    """
    ranges = [place for places in features["mm_placeholders"].values() for place in places]
    pads = np.unique(np.concatenate([rendered[place["offset"] : place["offset"] + place["length"]] for place in ranges]))
    before, after = (np.flatnonzero(np.isin(ids, pads)) for ids in (rendered, sent))
    if not np.array_equal(rendered[before], sent[after]):
        return None
    out: dict[str, list[dict[str, Any]]] = {}
    for kind, places in features["mm_placeholders"].items():
        out[kind] = []
        for place in places:
            first = int(np.searchsorted(before, place["offset"]))
            start, length = int(after[first]), place["length"]
            if not np.array_equal(sent[start : start + length], rendered[place["offset"] : place["offset"] + length]):
                return None
            out[kind].append({**place, "offset": start})
    return {**features, "mm_placeholders": out}
