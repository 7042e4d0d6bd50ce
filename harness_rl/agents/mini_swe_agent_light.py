"""mini-swe-agent's own OpenRouter model class, pointed at an OpenAI-style endpoint: it speaks HTTP itself and so spares the five CPU
seconds and 150 MB that importing litellm costs every rollout. Same requests, same tool-call format, same trajectory.

This file is not imported here: it is copied into the agent's layer and named by `model.model_class` in the agent's configuration. The
endpoint comes from OPENAI_BASE_URL and OPENAI_API_KEY. Answers that no retry can change end the run at once; the others go through
mini-swe-agent's own retry."""

from __future__ import annotations

import os
import time
from typing import Any

import requests
from minisweagent.models.openrouter_model import OpenRouterModel
from minisweagent.models.utils.actions_toolcall import BASH_TOOL

TIMEOUT_S = (10, 600)
"""To connect, and for the answer."""
_LONGEST_WAIT_S = 60.0
_LITELLM_ONLY = {"drop_params", "api_base", "api_key", "timeout", "custom_llm_provider", "extra_headers"}


class EndpointUnreachable(Exception):
    """No answer: connection refused, reset or timed out."""


class EndpointError(Exception):
    """The endpoint answered that it is busy or broken."""


class RequestRefused(Exception):
    """The endpoint will not take this request, now or later (4xx): a closed session, a bad key, an invalid request."""


class ContextWindowExceeded(RequestRefused):
    """The conversation is longer than the model's context."""


class LightModel(OpenRouterModel):
    abort_exceptions = [RequestRefused, KeyboardInterrupt]  # noqa: RUF012 - overrides a class attribute of mini-swe-agent's

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._api_url = os.environ["OPENAI_BASE_URL"].rstrip("/") + "/chat/completions"
        self._api_key = os.environ.get("OPENAI_API_KEY", "")

    def _query(self, messages: list[dict[str, Any]], **kwargs: Any) -> dict[str, Any]:
        options = {key: value for key, value in (self.config.model_kwargs | kwargs).items() if key not in _LITELLM_ONLY}
        payload = {"model": self.config.model_name, "messages": messages, "tools": [BASH_TOOL], **options}
        try:
            response = requests.post(self._api_url, headers={"Authorization": f"Bearer {self._api_key}"}, json=payload, timeout=TIMEOUT_S)
            if response.status_code < 400:
                return response.json()
        except requests.exceptions.RequestException as error:
            raise EndpointUnreachable(f"{type(error).__name__}: {error}") from error
        text = f"HTTP {response.status_code}: {response.text[:500]}"
        if response.status_code in (408, 409, 429) or response.status_code >= 500:
            _wait(response.headers.get("Retry-After", ""))
            raise EndpointError(text)
        if "context_length_exceeded" in response.text:
            raise ContextWindowExceeded(text)
        raise RequestRefused(text)


def _wait(retry_after: str) -> None:
    """Honour Retry-After in seconds; mini-swe-agent's own back-off comes on top."""
    if retry_after.isdigit():
        time.sleep(min(float(retry_after), _LONGEST_WAIT_S))
