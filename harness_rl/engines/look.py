"""A look at an engine that somebody else runs: whether it answers, and whether it lost what it was given because it was started again."""

from __future__ import annotations

from dataclasses import dataclass

import httpx

UNNAMED = "default"
"""What vLLM calls the weights that it started with."""
TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Look:
    up: bool
    version: str | None = None
    """Of its weights; None where it does not say."""
    adapters: frozenset[str] = frozenset()

    def lost(self, version: str | None, adapter: str | None) -> bool:
        """Whether it is up without the policy that it was brought to: its own model's `version`, or an adapter. None: to nothing yet."""
        if not self.up or version is None:
            return False
        return self.version == UNNAMED if adapter is None else adapter not in self.adapters


async def look(url: str) -> Look:
    """Never raises: what does not answer is not up."""
    try:
        async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
            if (await client.get("/health")).status_code != 200:
                return Look(False)
            weights, models = await client.get("/weight_info"), await client.get("/v1/models")
            version = weights.json().get("weight_version") if weights.status_code == 200 else None
            cards = models.json()["data"] if models.status_code == 200 else []
            return Look(True, None if version is None else str(version), frozenset(str(card["id"]) for card in cards))
    except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError):
        return Look(False)
