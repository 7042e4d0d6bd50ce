"""The capture bench measures what it says: its conversations are continued, spliced nowhere, and read back whole."""

from __future__ import annotations

import pytest
from aiohttp import web
from proxy_helpers import Serve, assert_chain

from capture_proxy.onecall import TRIALS
from harness_rl.bench.capture import ours
from harness_rl.bench.capture.conversation import Plan
from harness_rl.bench.capture.engine import BenchEngine
from harness_rl.bench.capture.load import Load, run


@pytest.mark.parametrize("one_call", [False, True])
async def test_a_bench_conversation_is_one_chain_of_exact_turns(serve: Serve, one_call: bool) -> None:
    engine = BenchEngine(one_call)
    runner = web.AppRunner(engine.app(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    served = await serve(f"http://127.0.0.1:{runner.addresses[0][1]}")
    first, created = await served.session(), await served.session()
    await run(Load(first.base_urls["openai"], [first.api_key], {"base": 2_000}, turns=TRIALS))
    tried = engine.derendered
    plan = Plan(2_000)
    done = await run(Load(created.base_urls["openai"], [created.api_key], {"base": 2_000}, turns=4))
    trace = await served.admin.trace(created.session_id)
    await runner.cleanup()
    assert len(done["latencies"]) == 4 and not done["unanswered"]
    assert engine.derendered - tried == (0 if one_call else 4)
    assert_chain(trace)
    for number, turn in enumerate(trace.turns):
        assert turn.prompt_token_ids.tolist() == plan.prompt(number).tolist()
        assert turn.completion_token_ids.tolist() == plan.answer(number).tolist()
        assert turn.metadata["mask_reason"] is None and not turn.metadata["spliced"]


def test_rewritten_histories_are_ingested() -> None:
    assert ours.ingest(3, 1_000)["seconds"] > 0
