"""The part of the Hugging Face Hub that an upload needs, on a loopback socket: repositories, LFS, commits, and the faults of a real one."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Commit:
    message: str
    files: dict[str, bytes]


@dataclass
class FakeHub:
    token: str
    repositories: dict[str, bool] = field(default_factory=dict)
    """name -> private"""
    commits: list[Commit] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    refuse: list[int] = field(default_factory=list)
    """Statuses of the next commits, before they succeed."""
    may_commit: threading.Event = field(default_factory=threading.Event)
    asked: int = 0
    """Commits asked for, refused ones included."""

    def handle(self, method: str, path: str, body: bytes, token: str, base: str) -> tuple[int, Any]:
        path = path.split("?")[0]
        if method == "PUT" and path.startswith("/lfs/"):
            oid = path.removeprefix("/lfs/")
            assert hashlib.sha256(body).hexdigest() == oid
            self.objects[oid] = body
            return 200, {}
        if token != f"Bearer {self.token}":
            return 401, {"error": "Invalid username or password."}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            if name in self.repositories:
                return 409, {"error": "You already created this model repo", "url": f"{base}/{name}"}
            self.repositories[name] = asked.get("visibility") == "private"
            return 200, {"url": f"{base}/{name}"}
        if path.endswith("/preupload/main"):
            files = json.loads(body)["files"]
            modes = [("lfs" if file["path"].endswith(".safetensors") else "regular") for file in files]
            return 200, {"files": [{"path": f["path"], "uploadMode": m, "shouldIgnore": False} for f, m in zip(files, modes, strict=True)]}
        if path.endswith(".git/info/lfs/objects/batch"):
            found = [
                {**wanted, "actions": {"upload": {"href": f"{base}/lfs/{wanted['oid']}", "header": {}}}}
                for wanted in json.loads(body)["objects"]
            ]
            return 200, {"transfer": "basic", "objects": found}
        if path.endswith("/commit/main"):
            name = path.removeprefix("/api/models/").removesuffix("/commit/main")
            return self._commit([json.loads(line) for line in body.splitlines()], f"{base}/{name}/commit")
        return 404, {"error": f"no {path}"}

    def _commit(self, lines: list[dict[str, Any]], url: str) -> tuple[int, Any]:
        self.asked += 1
        self.may_commit.wait(60)
        if self.refuse:
            return self.refuse.pop(0), {"error": "come again"}
        commit = Commit("", {})
        for line in lines:
            value = line["value"]
            match line["key"]:
                case "header":
                    commit.message = value["summary"]
                case "file":
                    commit.files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    commit.files[value["path"]] = self.objects[value["oid"]]
        self.commits.append(commit)
        oid = f"{len(self.commits):040x}"
        return 200, {"success": True, "commitOid": oid, "commitUrl": f"{url}/{oid}", "hookOutput": ""}


@contextmanager
def serve_hub(hub: FakeHub) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            base = f"http://{self.headers['host']}"
            status, value = hub.handle(self.command, self.path, body, self.headers.get("authorization", ""), base)
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = do_HEAD = answer

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
