"""What must not get out: keys, and requests to anywhere but the engine. What must not get in: whoever has no key, and other sessions."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import json
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from fake_engine import FakeEngine
from proxy_helpers import ADMIN_KEY, BASH, USER, Agent, Served, process
from wires import WIRES, Anthropic, Chat, Gemini, Responses, Wire
from yarl import URL

from capture_proxy.auth import key_hash, same_key
from capture_proxy.client import ProxyClient, ProxyError, handoff_listener

ASK: dict[str, Any] = {"model": "m", "messages": USER, "tools": [BASH]}
FOREIGN_KEY = "sk-proj-abcdefghijklmnopqrstuvwxyz0123456789"
"""What an agent may send although it is none of the proxy's business."""


# -- secrets ------------------------------------------------------------------


def places(key: str) -> list[tuple[str, str, dict[str, str]]]:
    """(path prefix, query, headers) for each place where clients put a key."""
    return [
        ("", "", {"Authorization": f"Bearer {key}"}),
        ("", "", {"x-api-key": key}),
        ("", "", {"x-goog-api-key": key}),
        ("", f"?key={key}", {}),
        (f"/s/{key}", "", {"Authorization": f"Bearer {FOREIGN_KEY}", "x-api-key": FOREIGN_KEY}),
    ]


def bodies_of(wire: type[Wire]) -> list[tuple[str, Any]]:
    """(path, body): a call, a stream, a body that is refused, one that is no JSON, a path that does not exist."""
    talk = wire("You are an agent.", True)
    talk.say("List the files.")
    stream = (talk.path.replace(":generate", ":streamGenerate") + "?alt=sse", talk.body())
    return [
        (talk.path, talk.body()),
        stream if wire is Gemini else (talk.path, {**talk.body(), "stream": True}),
        (talk.path, {"messages": 7, "input": 7, "contents": 7}),
        (talk.path, b"{"),
        (talk.path + "/nowhere", talk.body()),
    ]


async def test_i12_no_key_is_in_store_logs_metrics_traces_or_errors(engine: FakeEngine, tmp_path: Path) -> None:
    """Every dialect, every place for a key, every way to fail; then everything that was written or answered is searched."""
    handoff = tmp_path / "handoff.sock"
    seen: list[bytes] = []
    secrets = {ADMIN_KEY, FOREIGN_KEY}
    flags = ("--handoff-socket", str(handoff))
    async with process(engine, tmp_path, *flags) as (_, url), aiohttp.ClientSession() as http, ProxyClient(url, ADMIN_KEY) as admin:
        sessions = []
        for wire in WIRES:
            created = await admin.create_session(limits={"max_calls_per_minute": 40})
            sessions.append(created.session_id)
            secrets.add(created.api_key)
            wrong = created.api_key[:-1] + ("0" if created.api_key[-1] != "0" else "1")
            secrets.add(wrong)
            assert created.api_key not in repr(created)
            for key in (created.api_key, wrong, ADMIN_KEY):
                for prefix, query, headers in places(key):
                    for path, body in bodies_of(wire):
                        engine.statuses.extend([400] if body == {"messages": 7} else [])
                        full = url + prefix + path + (query.replace("?", "&") if "?" in path else query)
                        data = body if isinstance(body, bytes) else json.dumps(body).encode()
                        async with http.post(full, data=data, headers=headers) as response:
                            seen += [await response.read(), repr(response.headers).encode()]
                        expected = (200, 400, 404, 405, 429) if key == created.api_key else (404, 405)
                        assert response.status in expected, (full, response.status)
            engine.statuses.extend([500, 500, 500])  # the engine fails, which is logged
            await Agent(url + "/v1", created.api_key, http).post(ASK)
            for method, path in (("GET", "/metrics"), ("GET", "/health"), ("POST", f"/sessions/{created.session_id}/seal")):
                for key in (created.api_key, FOREIGN_KEY, ADMIN_KEY):
                    async with http.request(method, url + path, headers={"Authorization": f"Bearer {key}"}) as response:
                        seen += [await response.read(), repr(response.headers).encode()]
            with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(ProxyError) as refused:
                await handoff_listener(handoff, wrong, created.session_id, listener)
            seen.append(str(refused.value).encode())
        for session_id in sessions:
            seen += [json.dumps(await admin.status(session_id)).encode()]
            for accept in ("application/json", "application/x-harness-trace"):
                headers = {"Authorization": f"Bearer {ADMIN_KEY}", "Accept": accept}
                async with http.get(f"{url}/sessions/{session_id}/trace", headers=headers) as response:
                    seen.append(await response.read())
            assert len((await admin.trace(session_id)).turns) >= 5
    logged = (tmp_path / "log").read_bytes()
    assert b"WARNING" in logged, "nothing was logged: this test would see nothing"
    written = [path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert len(written) > len(WIRES)
    for secret in secrets:
        for text in (logged, *written, *seen):
            assert secret.encode() not in text


def test_keys_are_compared_as_hashes_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr("hmac.compare_digest", lambda a, b: compared.append((a, b)) or a == b)
    assert same_key("right", key_hash("right")) and not same_key("wrong", key_hash("right"))
    assert compared == [(key_hash("right"), key_hash("right")), (key_hash("wrong"), key_hash("right"))]


# -- nothing is fetched -------------------------------------------------------


@pytest.fixture
async def canary() -> AsyncIterator[tuple[str, list[str]]]:
    """A server that nobody may ask, and what it was asked."""
    asked: list[str] = []

    async def note(request: web.Request) -> web.Response:
        asked.append(str(request.rel_url))
        return web.json_response({})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", note)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}", asked
    await runner.cleanup()


def with_urls(url: str) -> list[tuple[str, dict[str, Any], int]]:
    """(path, body, status): everything in a request that some server somewhere would fetch."""
    chat, responses, anthropic, gemini = Chat.path, Responses.path, Anthropic.path, Gemini.path
    out: list[tuple[str, dict[str, Any], int]] = []
    for part in (
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": url},
        {"type": "image_url", "image_url": {"url": f" data:image/png;base64,{url}"}},
        {"type": "image_url", "image_url": {"url": f"data:text/html;base64,{url}"}},
        {"type": "video_url", "video_url": {"url": url}},
        {"type": "audio_url", "audio_url": {"url": url}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "file", "file": {"file_id": url, "file_data": url}},
    ):
        out.append((chat, {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "see"}, part]}]}, 400))
        call = {"id": "a", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
        shown = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "a", "content": [part]}]
        out.append((chat, {"model": "m", "messages": [*USER, *shown]}, 400))
    for part in (
        {"type": "input_image", "image_url": url},
        {"type": "input_image", "file_id": url},
        {"type": "input_file", "file_url": url},
        {"type": "input_audio", "input_audio": {"data": url}},
    ):
        out.append((responses, {"model": "m", "input": [{"role": "user", "content": [part]}]}, 400))
        call = {"type": "function_call", "call_id": "a", "name": "bash", "arguments": "{}"}
        shown = [call, {"type": "function_call_output", "call_id": "a", "output": [part]}]
        out.append((responses, {"model": "m", "input": [{"role": "user", "content": "x"}, *shown]}, 400))
    screen = {"type": "computer_call_output", "call_id": "a", "output": {"type": "computer_screenshot", "image_url": url}}
    out.append((responses, {"model": "m", "input": [screen]}, 400))
    mcp = {"type": "mcp", "server_label": "x", "server_url": url, "require_approval": "never"}
    out.append((responses, {"model": "m", "input": "hello", "tools": [mcp]}, 200))
    for part in (
        {"type": "image", "source": {"type": "url", "url": url}},
        {"type": "image", "source": {"type": "base64", "media_type": f"image/png;{url}", "data": "iVBORw0KGgo="}},
        {"type": "document", "source": {"type": "url", "url": url}},
        {"type": "document", "source": {"type": "file", "file_id": url}},
    ):
        ask = {"model": "m", "max_tokens": 9}
        out.append((anthropic, {**ask, "messages": [{"role": "user", "content": [part]}]}, 400))
        use = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "bash", "input": {}}]}
        result = {"type": "tool_result", "tool_use_id": "a", "content": [part]}
        out.append((anthropic, {**ask, "messages": [{"role": "user", "content": "x"}, use, {"role": "user", "content": [result]}]}, 400))
    server = {"type": "url", "url": url, "name": "x"}
    out.append((anthropic, {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}], "mcp_servers": [server]}, 200))
    for part in (
        {"fileData": {"fileUri": url, "mimeType": "image/png"}},
        {"file_data": {"file_uri": url}},
        {"inlineData": {"mimeType": "text/html", "data": url}},
    ):
        out.append((gemini, {"contents": [{"role": "user", "parts": [part]}]}, 400))
    context = {"contents": [{"role": "user", "parts": [{"text": "x"}]}], "tools": [{"urlContext": {}}, {"googleMaps": {"uri": url}}]}
    out.append((gemini, context, 200))
    # A schema is compiled by the engine: it may refer to nothing outside.
    schema = {"type": "object", "properties": {"a": {"$ref": url + "/schema.json"}}}
    tool = {"type": "function", "function": {"name": "bash", "parameters": schema}}
    out.append((chat, {**ASK, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}, 400))
    out.append((chat, {**ASK, "tools": [tool], "tool_choice": "required"}, 400))
    out.append((responses, {"model": "m", "input": "x", "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}}, 400))
    generation = {"responseMimeType": "application/json", "responseJsonSchema": schema}
    out.append((gemini, {"contents": [{"role": "user", "parts": [{"text": "x"}]}], "generationConfig": generation}, 400))
    forced = {"tools": [{"name": "bash", "input_schema": schema}], "tool_choice": {"type": "any"}}
    out.append((anthropic, {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}], **forced}, 400))
    return out


async def test_no_url_in_a_request_is_fetched_or_reaches_the_engine(
    served: Served, engine: FakeEngine, canary: tuple[str, list[str]]
) -> None:
    url, asked = canary
    created = await served.session()
    headers = {"Authorization": f"Bearer {created.api_key}"}
    for path, body, expected in with_urls(url + "/secret"):
        async with served.http.post(served.url + path, json=body, headers=headers) as response:
            answer = await response.text()
            assert response.status == expected, (path, body, answer)
    assert engine.requests
    for path, body in engine.requests:
        sent = json.dumps(body)
        assert url not in sent and "base64" not in sent, path
    assert asked == []


MODELS = (
    "http://HOST/v1",
    "//HOST/",
    "file:///etc/passwd",
    "../../pause",
    "policy/../../../metrics",
    "policy?x=http://HOST",
    "\\\\HOST\\x",
)


@pytest.mark.parametrize("wire", WIRES)
async def test_a_model_name_is_only_a_name(served: Served, engine: FakeEngine, canary: tuple[str, list[str]], wire: type[Wire]) -> None:
    url, asked = canary
    created = await served.session()
    headers = {"Authorization": f"Bearer {created.api_key}"}
    talk = wire("You are an agent.", True)
    talk.say("List the files.")
    for model in MODELS:
        name = model.replace("HOST", url.removeprefix("http://"))
        path = talk.path
        if wire is Gemini:
            quoted = name.replace("%", "%25").replace("/", "%2F").replace("?", "%3F").replace("\\", "%5C")
            path = f"/v1beta/models/{quoted}:generateContent"
        where = URL(served.url + path, encoded=True)
        async with served.http.post(where, json={**talk.body(), "model": name}, headers=headers) as response:
            assert response.status == 200, (name, await response.text())
    assert {body["model"] for _, body in engine.requests} == {"policy"}
    paths = {path for path, _ in engine.requests}
    assert paths <= {"/v1/chat/completions/render", "/inference/v1/generate", "/v1/chat/completions/derender"}
    assert asked == []


async def raw_get(url: str, target: str, key: str, method: str = "GET") -> int:
    """The status of a request whose target goes out as it stands."""
    reader, writer = await asyncio.open_connection("127.0.0.1", URL(url).port)
    head = f"{method} {target} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{{}}"
    writer.write(head.encode())
    answer = await reader.read()
    writer.close()
    return int(answer.split()[1])


@pytest.mark.parametrize(
    "target",
    ["/s/KEY/../../metrics", "/s/KEY/v1/../../../metrics", "//metrics", "/%2e%2e/metrics", "/v1/models/../../metrics",
     "/s/KEY/v1/models/..%2f..%2fsessions", "/s/KEY/sessions", "/s/KEY/metrics", "/sessions/../metrics", "http://127.0.0.1/metrics",
     "/s/KEY%2f..%2f../sessions", "/metrics?key=KEY", "/metrics;/v1/models"],
)  # fmt: skip
async def test_no_path_leads_a_session_key_to_an_admin_route(served: Served, engine: FakeEngine, target: str) -> None:
    created = await served.session()
    for method in ("GET", "POST", "DELETE"):
        status = await raw_get(served.url, target.replace("KEY", created.api_key), created.api_key, method)
        # A name of a model may look like a path; the answer is then that name.
        assert status in (400, 401, 404, 405) or (status == 200 and "/models/" in target and method == "GET")
    assert (await served.admin.status(created.session_id))["state"] == "open"
    assert engine.requests == []


async def test_a_request_for_another_host_is_answered_here(served: Served, engine: FakeEngine, canary: tuple[str, list[str]]) -> None:
    url, asked = canary
    created = await served.session()
    assert await raw_get(served.url, url + "/v1/models", created.api_key) == 200
    assert await raw_get(served.url, "127.0.0.1:80", created.api_key, "CONNECT") in (400, 404, 405)
    assert asked == []


async def test_one_session_does_not_see_another(served: Served, engine: FakeEngine) -> None:
    """The same question under two keys is two calls of two sessions, and neither knows the other's ids."""
    first, one = await served.agent()
    second, two = await served.agent()
    engine.say("odd spelling", style="chars")
    await first.ask()
    second.messages = list(first.messages)
    await second.ask({"role": "user", "content": "go on"})
    trace = await served.admin.trace(two.session_id)
    assert len(trace.turns) == 1 and trace.turns[0].metadata["parent"] is None and trace.turns[0].metadata["continues"] is None
    assert len((await served.admin.trace(one.session_id)).turns) == 1


# -- who may listen where -----------------------------------------------------


def certificate(root: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that vouches for itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "capture-proxy test")])
    now = datetime.datetime.now(datetime.UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file = root / "cert.pem", root / "key.pem"
    cert_file.write_bytes(built.public_bytes(serialization.Encoding.PEM))
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    key_file.write_bytes(key.private_bytes(*form))
    return cert_file, key_file


async def test_beyond_loopback_it_speaks_tls(engine: FakeEngine, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    async with process(engine, tmp_path, "--host", "0.0.0.0", "--tls-cert", str(cert), "--tls-key", str(key)) as (_, url):
        assert url.startswith("https://0.0.0.0:")
        here = url.replace("0.0.0.0", "127.0.0.1")
        async with ProxyClient(here, ADMIN_KEY, ca_file=cert) as admin:
            created = await admin.create_session()
            assert created.base_urls["openai"] == here + "/v1"
            connector = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=cert))
            async with aiohttp.ClientSession(connector=connector) as http:
                assert (await Agent(here + "/v1", created.api_key, http).ask())["message"]["content"] == "ok"
        async with aiohttp.ClientSession() as http:
            with pytest.raises(aiohttp.ClientError):
                await http.get(here.replace("https", "http") + "/health")
        async with ProxyClient(here, ADMIN_KEY) as stranger:
            with pytest.raises(ProxyError):
                await stranger.health()


async def test_beyond_loopback_in_plain_only_where_it_is_asked_for(engine: FakeEngine, tmp_path: Path) -> None:
    async with process(engine, tmp_path, "--host", "0.0.0.0", "--insecure-remote") as (_, url):
        admin = ProxyClient(url.replace("0.0.0.0", "127.0.0.1"), ADMIN_KEY)
        assert (await admin.health())["status"] == "ok"
        await admin.close()
