"""A name becomes one folder, or one line that says what to do. The hub is a local server that speaks the hub's protocol."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from harness_rl.errors import UserError
from harness_rl.models import resolve_model

FILES = {"config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"{}", "README.md": b"not wanted"}
COMMIT = "a" * 40


def folder_with(path: Path, *names: str) -> Path:
    path.mkdir()
    for name in names:
        (path / name).write_text("{}")
    return path


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m", "config.json", "model.safetensors", "tokenizer.json")
    assert resolve_model(str(folder)) == str(folder)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((), "has no config.json"),
        (("config.json", "tokenizer.json"), "has no weights"),
        (("config.json", "model.safetensors"), "has no tokenizer"),
    ],
)
def test_a_folder_that_lacks_a_part(tmp_path: Path, names: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve_model(str(folder_with(tmp_path / "m", *names)))


def test_a_name_that_is_not_fetched_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARNESS_RL_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="run `harness-rl models fetch smollm2-135m`"):
        resolve_model("smollm2-135m")


@pytest.mark.parametrize("name", ["smollm3", "./missing", "/no/such/folder", "a/b/c", ""])
def test_what_is_no_model(name: str) -> None:
    with pytest.raises(UserError, match="is no folder, no hub id"):
        resolve_model(name) if name else resolve_model("nothing at all")


class FakeHub(BaseHTTPRequestHandler):
    """`acme/tiny` at one commit."""

    def do_HEAD(self) -> None:
        self.do_GET(body=False)

    def do_GET(self, body: bool = True) -> None:
        path = self.path.split("?")[0]
        if path.startswith("/api/models/acme/tiny/tree/"):
            return self._send(
                json.dumps([{"type": "file", "path": n, "size": len(b), "oid": _etag(b)} for n, b in FILES.items()]).encode(), body
            )
        if path.startswith("/api/models/acme/tiny"):
            revision = path.rpartition("/revision/")[2] if "/revision/" in path else "main"
            if revision not in ("main", COMMIT):
                return self._refuse("RevisionNotFound")
            info = {"id": "acme/tiny", "modelId": "acme/tiny", "sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]}
            return self._send(json.dumps(info).encode(), body)
        if path.startswith("/acme/tiny/resolve/"):
            return self._send(FILES[path.rsplit("/", 1)[1]], body)
        return self._refuse("RepoNotFound")

    def _send(self, content: bytes, body: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{_etag(content)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def _refuse(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        return None


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def resolve_elsewhere(name: str, endpoint: str, home: Path) -> str:
    """In a process of its own: the hub's client reads its endpoint when it is imported."""
    code = (
        "import sys\nfrom harness_rl.models import resolve_model\nfrom harness_rl.errors import UserError\n"
        "try: print(resolve_model(sys.argv[1]))\nexcept UserError as error: print('error:', error)"
    )
    env = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    env.pop("HF_HUB_OFFLINE", None)
    done = subprocess.run([sys.executable, "-c", code, name], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_hub_id_is_downloaded_to_one_folder_and_found_again(hub: str, tmp_path: Path) -> None:
    folder = Path(resolve_elsewhere("acme/tiny", hub, tmp_path))
    assert (folder / "model.safetensors").read_bytes() == b"weights" and folder.name == COMMIT
    assert not (folder / "README.md").exists()
    assert resolve_elsewhere(f"acme/tiny@{COMMIT}", hub, tmp_path) == str(folder)


def test_hub_errors_are_one_line(hub: str, tmp_path: Path) -> None:
    assert "the hub has no acme/none that you may read" in resolve_elsewhere("acme/none", hub, tmp_path)
    assert "acme/tiny has no revision 'v9'" in resolve_elsewhere("acme/tiny@v9", hub, tmp_path)
    assert "cannot be downloaded" in resolve_elsewhere("acme/tiny", "http://127.0.0.1:9", tmp_path)
