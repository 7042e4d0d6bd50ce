"""OpenEnv's side of the capture bench; runs in the OpenEnv environment.

`python -m harness_rl.bench.capture.peer serve ENGINE_URL PORT` is its capture server as its own runner starts it;
`... trace URL SESSION` fetches a session's entries and loads them into its `TrainingTrace`; `... ingest TURNS TOKENS` adds turns with
rewritten histories to its graph. The last two print JSON.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request

from harness_rl.bench.capture.conversation import Plan, logprob


def serve(engine: str, port: int) -> None:
    import uvicorn
    from openenv.core.harness.capture.server import create_app

    app = create_app(llm_url=engine, model="policy", capture_level="tokens", max_output_tokens=8192)
    # The loop that uvicorn takes where only OpenEnv's dependencies are installed: uvloop is here through ours.
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", loop="asyncio")


def trace(url: str, session: str) -> dict[str, float]:
    from openenv.core.harness.training import TrainingTrace

    began, spent = time.perf_counter(), time.process_time()
    with urllib.request.urlopen(f"{url}/sessions/{session}/trace_entries", timeout=600) as answer:
        raw = answer.read()
    loaded = TrainingTrace.from_entries(json.loads(raw)["entries"])
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - spent
    return {"bytes": len(raw), "seconds": seconds, "cpu_s": cpu_s, "turns": len(loaded.turns)}


def ingest(turns: int, tokens: int) -> dict[str, float]:
    """CPU seconds of what its server does with an answer: check the turn, then add it to the graph."""
    from openenv.core.harness.capture.graph import RolloutGraph, TurnNode
    from openenv.core.harness.capture.validate import check_turn

    graph, spent = RolloutGraph(), 0.0
    for turn in range(turns):
        plan = Plan(tokens, head=turn)
        prompt, answer = plan.prompt(0).tolist(), plan.answer(0).tolist()
        logprobs = [logprob(token) for token in answer]
        messages = plan.opening()
        began = time.process_time()
        index = graph.stats()["n_turns"]
        assert check_turn(prompt, answer, logprobs, finish_reason="stop", index=index).ok
        node = TurnNode(
            node_id=f"{turn:x}",
            prompt_ids=list(prompt),
            sampled_ids=list(answer),
            sampled_logprobs=list(logprobs),
            request_messages=messages,
        )
        graph.add_turn(node)
        spent += time.process_time() - began
    return {"seconds": spent}


def main() -> None:
    verb, *rest = sys.argv[1:]
    if verb == "serve":
        serve(rest[0], int(rest[1]))
    elif verb == "trace":
        print(json.dumps(trace(rest[0], rest[1])))
    else:
        print(json.dumps(ingest(int(rest[0]), int(rest[1]))))


if __name__ == "__main__":
    main()
