"""Stands for an Open Reward server: the standard's routes and events, around sums that are told in parts.

Faults, by the task's index: 7 loses the answer's connection once the call has an id; 8 forgets its session after the first call; 9 fails.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Header, HTTPException
from fastapi.responses import StreamingResponse

app = FastAPI()
sessions: dict[str, dict[str, Any]] = {}
answers: dict[str, str] = {}
"""Task id -> the JSON of its call's outcome; a call that is resumed is not made again."""
counts = {"calls": 0, "pings": 0, "deleted": 0}
TASKS = 10
TOOLS = [
    {
        "name": "part",
        "description": "One of the numbers.",
        "input_schema": {"type": "object", "properties": {"which": {"type": "integer"}}, "required": ["which"]},
    },
    {
        "name": "submit",
        "description": "The sum.\nIt ends the task.",
        "input_schema": {
            "type": "object",
            "properties": {
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "title": "Note"},
                "total": {"type": "integer", "description": "All of them."},
                "unit": {"type": "string", "enum": ["one", "dozen"], "default": "one"},
            },
            "required": ["total"],
        },
    },
]


def numbers(index: int) -> list[int]:
    return [index + 1, 2 * index + 3]


def session(sid: str | None) -> dict[str, Any]:
    if sid not in sessions or "index" not in sessions[sid]:
        raise HTTPException(404, "Active environment not found")
    return sessions[sid]


@app.get("/health")
def health() -> Any:
    return {"status": "ok"}


@app.get("/counts")
def counted() -> Any:
    return {**counts, "open": len(sessions)}


@app.get("/list_environments")
def environments() -> Any:
    return ["sums", "said"]


@app.get("/{name}/tools")
def tools(name: str) -> Any:
    if name == "said":
        return {"tools": TOOLS[:1], "terminal_tool": {"name": "submit", "arg": "total", "description": ""}}
    return {"tools": TOOLS}


@app.post("/{name}/num_tasks")
def num_tasks(name: str, body: dict[str, Any]) -> Any:
    if body != {"split": "train"}:
        raise HTTPException(400, "Invalid split")
    return {"num_tasks": TASKS}


@app.post("/create_session")
def create_session() -> Any:
    sid = str(uuid.uuid4())
    sessions[sid] = {}
    return StreamingResponse(iter([f"event: task_id\ndata: {sid}\n\n", "event: end\ndata: \n\n"]), media_type="text/event-stream")


@app.post("/create")
def create(body: dict[str, Any], x_session_id: str = Header()) -> Any:
    if body.keys() != {"env_name", "split", "index"} or not 0 <= body["index"] < TASKS:
        raise HTTPException(400, "Invalid index")
    sessions[x_session_id] = {"index": body["index"], "over": False}
    return {"sid": x_session_id}


@app.post("/ping")
def ping(x_session_id: str = Header()) -> Any:
    counts["pings"] += 1
    session(x_session_id)
    return {"status": "ok"}


@app.post("/delete")
def delete(x_session_id: str = Header()) -> Any:
    counts["deleted"] += sessions.pop(x_session_id, None) is not None
    return {"sid": x_session_id}


@app.post("/delete_session")
def delete_session(x_session_id: str = Header()) -> Any:
    return {"sid": x_session_id}


@app.get("/{name}/task_tools")
def task_tools(name: str, x_session_id: str = Header()) -> Any:
    session(x_session_id)
    return tools(name)


@app.get("/{name}/prompt")
def prompt(name: str, x_session_id: str = Header()) -> Any:
    index = session(x_session_id)["index"]
    return [
        {"text": f"Play {index}: add up.", "detail": None, "type": "text"},
        {"text": "There are 2 parts.", "detail": None, "type": "text"},
    ]


@app.post("/{name}/call")
async def call(name: str, body: dict[str, Any], x_session_id: str = Header()) -> Any:
    about = session(x_session_id)
    task, first = body.get("task_id"), body.get("task_id") is None
    if first:
        task = uuid.uuid4().hex
        counts["calls"] += 1
        answers[task] = json.dumps(outcome(about, body["name"], body["input"]))
        if about["index"] == 8:
            del sessions[x_session_id]

    async def stream() -> AsyncIterator[str]:
        yield f"event: task_id\ndata: {task}\n\n"
        await asyncio.sleep(0)
        if about["index"] == 7 and first:
            raise ConnectionError("lost on purpose")
        if about["index"] == 9:
            yield "event: error\ndata: division by zero\n\n"
            return
        yield ": a sign of life\n\n"
        text = answers[str(task)]
        yield f"event: chunk\ndata: {text[:20]}\n\nevent: end\ndata: {text[20:]}\n\n"

    return StreamingResponse(stream(), media_type="text/event-stream")


def outcome(about: dict[str, Any], tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
    if about["over"]:
        return {"ok": False, "error": "The episode has finished.", "reason": "episode_finished"}
    given = numbers(about["index"])
    if tool == "part":
        which = arguments.get("which")
        if which not in (0, 1):
            return {"ok": False, "error": "Tool input validation error: which", "reason": "input_validation"}
        return done([str(given[which])], 0.125, False)
    about["over"] = True
    return done(
        ["Right." if str(arguments["total"]) == str(sum(given)) else "Wrong."], float(str(arguments["total"]) == str(sum(given))), True
    )


def done(texts: list[str], reward: float | None, finished: bool) -> dict[str, Any]:
    blocks = [{"text": text, "detail": None, "type": "text"} for text in texts]
    return {"ok": True, "output": {"blocks": blocks, "metadata": None, "reward": reward, "finished": finished}}
