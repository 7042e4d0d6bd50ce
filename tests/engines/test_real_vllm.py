"""The real vLLM on the real model: what the rest relies on, and that nothing survives its owner."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from harness_rl.engines.probe import probe
from harness_rl.models import resolve_model
from tests.engines.conftest import group_members

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

OWNER = """
import asyncio, pathlib, sys
from harness_rl.config import EngineSection
from harness_rl.engines.vllm import launch

async def main():
    section = EngineSection(max_model_len=1024, max_num_seqs=4, kv_cache_gib=0.5)
    engine = await launch(section, pathlib.Path(sys.argv[1]), run_dir=pathlib.Path(sys.argv[2]), served_model="policy")
    print(engine.url, engine.pid, flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Execute a bash command",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


@dataclass
class Owned:
    url: str
    group: int
    owner: subprocess.Popen[str]


@pytest.fixture(scope="module")
def owned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owned]:
    folder = tmp_path_factory.mktemp("engine")
    command = [sys.executable, "-c", OWNER, resolve_model("smollm2-135m"), str(folder)]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    url, group = owner.stdout.readline().split()
    yield Owned(url, int(group), owner)
    owner.kill()
    owner.wait()


def post(url: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(url, json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_many_seeded_prompts_at_once_are_answered(owned: Owned) -> None:
    """More prompt tokens than one engine step takes; with chunked prompts vLLM's CPU engine died of this."""

    def ask(n: int) -> int:
        ids = [100 + (n * 37 + i) % 900 for i in range(900)]
        body = {"model": "policy", "prompt": ids, "max_tokens": 2, "temperature": 1.0, "seed": n}
        return int(post(f"{owned.url}/v1/completions", body)["usage"]["completion_tokens"])

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, range(6))) == [2] * 6


async def test_everything_is_there(owned: Owned) -> None:
    info = await probe(owned.url)
    assert info.missing() == [] and info.processed_logprobs and info.has_weight_backend
    assert info.model == "policy" and info.max_model_len == 1024 and info.weight_version == "default"


def test_a_canonical_tool_call_is_parsed_and_renders_as_it_was_sampled(owned: Owned) -> None:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "List the files."}]
    canonical = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls -la"}}\n</tool_call>'
    body = {
        "model": "policy",
        "messages": messages,
        "tools": [BASH],
        "max_tokens": 64,
        "return_token_ids": True,
        "structured_outputs": {"regex": re.escape(canonical).replace(r"\ ", " ").replace("\\\n", "\n")},
    }
    answer = post(f"{owned.url}/v1/chat/completions", body)
    choice = answer["choices"][0]
    call = choice["message"]["tool_calls"][0]["function"]
    assert call == {"name": "bash", "arguments": '{"command": "ls -la"}'}
    assert not choice["message"]["content"]
    sampled = answer["prompt_token_ids"] + choice["token_ids"]
    turn = {"role": "assistant", "content": choice["message"]["content"], "tool_calls": choice["message"]["tool_calls"]}
    after = [*messages, turn, {"role": "tool", "tool_call_id": turn["tool_calls"][0]["id"], "content": "a\n"}]
    rendered = post(f"{owned.url}/v1/chat/completions/render", {"model": "policy", "messages": after, "tools": [BASH]})["token_ids"]
    # Sampling may split text otherwise than the tokenizer does: what must agree is the text, up to and with the end of the turn.
    text = [post(f"{owned.url}/detokenize", {"model": "policy", "tokens": ids})["prompt"] for ids in (sampled, rendered)]
    assert text[1].startswith(text[0]) and text[0].endswith(canonical + "<|im_end|>")


def test_killed_owner_leaves_no_process(owned: Owned) -> None:
    assert len(group_members(owned.group)) >= 4
    owned.owner.send_signal(signal.SIGKILL)
    owned.owner.wait()
    deadline = time.monotonic() + 10
    while group_members(owned.group) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = group_members(owned.group)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []
