"""Our side of the capture bench, where no process is measured from outside: the trace as a client loads it, and the ingest of turns."""

from __future__ import annotations

import asyncio
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np

from capture_proxy import delta
from capture_proxy.graph import Turn
from capture_proxy.ids import PrefixHash
from capture_proxy.messages import chain_keys, context_key, extend_key, message_key
from capture_proxy.session import Session
from capture_proxy.spec import SessionSpec
from capture_proxy.store import Store
from capture_proxy.trace import MEDIA_TYPE, TrainingTrace, hash_ids
from harness_rl.bench.capture.conversation import TOOLS, Plan, answer_message, logprob


def trace(url: str, admin_key: str, session: str) -> dict[str, float]:
    """Fetches and loads a session's trace in the binary form, every check of it included."""
    request = urllib.request.Request(
        f"{url}/sessions/{session}/trace", headers={"Authorization": f"Bearer {admin_key}", "Accept": MEDIA_TYPE}
    )
    began, spent = time.perf_counter(), time.process_time()
    with urllib.request.urlopen(request, timeout=600) as answer:
        raw = answer.read()
    loaded = TrainingTrace.from_bytes(raw)
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - spent
    return {"bytes": len(raw), "seconds": seconds, "cpu_s": cpu_s, "turns": len(loaded.turns)}


async def _ingest(turns: int, tokens: int, folder: Path) -> dict[str, float]:
    store, spent = Store(folder), 0.0
    session = Session.create("bench", "", SessionSpec(), store.create("bench"))
    for number in range(turns):
        plan = Plan(tokens, head=number)
        prompt, answer, messages = plan.prompt(0), plan.answer(0), plan.opening()
        logps = np.array([logprob(token) for token in answer.tolist()], dtype=np.float32)
        body = {"model": "policy", "messages": messages, "tools": TOOLS, "max_tokens": 4096}
        reply = answer_message(plan.sampled)
        running = session.begin()
        began = time.process_time()
        keys = chain_keys(messages, context_key(TOOLS, {}))
        digest = PrefixHash(prompt)
        parent = session.graph.parent_of(prompt, None, digest)
        base, keep, before = session.graph.place(parent, prompt)
        request = delta.encode(before, body)
        turn = Turn(
            node_id=running.key, seq=running.seq, parent=parent, base=base, keep=keep, prompt_len=len(prompt),
            total=np.concatenate([prompt, answer]), logps=logps, reason=None, request=request, response={"message": reply},
            meta={"origin": "sampled", "prompt_hash": digest.whole().hex(), "completion_hash": hash_ids(answer)},
            chain=keys[-1], reply_key=extend_key(keys[-1], reply), system_key=message_key(messages[0]),
            rendered_len=len(prompt), rendered_hash=digest.whole().hex(), total_hash=digest.followed_by(answer),
        )  # fmt: skip
        await (await session.record(running, turn))
        spent += time.process_time() - began
        session.leave(running)
    session.log.close()
    await store.close()
    return {"seconds": spent}


def ingest(turns: int, tokens: int) -> dict[str, float]:
    """CPU seconds of what the proxy does with an answer, the write to the store included; every turn has another history."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_ingest(turns, tokens, Path(folder)))
