"""Routes, error shape, limits, ids."""

import asyncio
import json
from pathlib import Path

import pytest

from gateway.scripted import TOKENIZER, Gateway, RawCall, byte_ids, stream_events, until
from stepserve.core.config import ServeConfig
from stepserve.core.frontend import RequestRejected
from stepserve.gateway.app import MAX_BODY_BYTES
from stepserve.gateway.operator import add_operator
from stepserve.gateway.schemas import (
    ChatRequest,
    CompletionRequest,
    DLMFields,
    GenerationRequest,
    SLOFields,
)

HELLO = [byte_ids("hello")]
REFUSED = [RequestRejected(None, "no room")]
USER = {"role": "user", "content": "ab"}
PARTS, IN_PARTS = [{"type": "text", "text": "\ud800"}], "messages.0.content.0.text"
JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
    ],
)
async def test_error_shape_of_routes(method, path, status, code):
    async with Gateway().http() as client:
        response = await client.request(method, path)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, code)
    assert error.keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "content", [b"{", b"", b"[1]", b"\xff\xfe", b'{"prompt": "a"', b"[" * 100_000]
)
async def test_bad_json_is_400(content):
    """Never FastAPI's 422."""
    async with Gateway().http() as client:
        response = await client.post("/v1/completions", content=content, headers=JSON)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_form_is_told_to_be_json():
    async with Gateway().http() as client:
        response = await client.post("/v1/completions", data={"prompt": "a"})
    assert response.status_code == 400
    assert "application/json" in response.json()["error"]["message"]


@pytest.mark.parametrize("announced", [True, False])
async def test_body_limit(announced):
    async def pieces():
        for _ in range(MAX_BODY_BYTES // 2**16 + 1):
            yield b" " * 2**16

    content = b" " * (MAX_BODY_BYTES + 1) if announced else pieces()
    async with Gateway().http() as client:
        response = await client.post("/v1/completions", content=content, headers=JSON)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"


async def test_unknown_model_is_404():
    response = await Gateway().complete(model="other")
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (
        404,
        "model",
        "model_not_found",
    )


@pytest.mark.parametrize("given", ["abc-1", None, "x" * 200])
async def test_request_id_is_echoed(given):
    headers = {"x-request-id": given} if given else {}
    async with Gateway(HELLO).http() as client:
        for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/completions", {})):
            response = await client.post(path, json=body, headers=headers)
            echoed = response.headers["x-request-id"]
            assert echoed == given if given == "abc-1" else 0 < len(echoed) <= 128


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a\ud800b"}, "prompt"),
        ("/v1/completions", {"prompt": ["a", "\udfff"]}, "prompt.1"),
        ("/v1/completions", {"prompt": "a", "stop": ["b", "\ud800"]}, "stop.1"),
        ("/v1/completions", {"prompt": "a", "model": "\ud800"}, "model"),
        ("/v1/completions", {"prompt": "a", "user": "\ud800"}, "user"),
        ("/v1/completions", {"prompt": "a", "metadata": {"k": "\ud800"}}, "metadata.k"),
        ("/v1/completions", {"prompt": "a", "metadata": {"\ud800": "v"}}, "metadata"),
        ("/v1/completions", {"prompt": "a", "slo": {"class": "\ud800"}}, "slo.class"),
        ("/v1/completions", {"prompt": "a", "slo": {"\ud800": 1}}, "slo"),
        ("/v1/completions", {"prompt": "a", "\ud800": 1}, "body"),
        ("/v1/completions", {"prompt": "a", "foo": [1, [{"x": "\ud800"}]]}, "foo.1.0.x"),
        ("/v1/chat/completions", {"messages": [USER | {"role": "\ud800"}]}, "messages.0.role"),
        ("/v1/chat/completions", {"messages": [USER | {"name": "\ud800"}]}, "messages.0.name"),
        ("/v1/chat/completions", {"messages": [USER | {"content": PARTS}]}, IN_PARTS),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/tokenize", {"prompt": "\ud800", "add_special_tokens": False}, "prompt"),
        ("/detokenize", {"tokens": [1], "model": "\ud800"}, "model"),
        ("/cluster/layout", {"layout": [1], "\ud800": 1}, "body"),
    ],
)
@pytest.mark.parametrize("raw", [False, True])
async def test_text_that_cannot_be_encoded_is_named(path, body, param, raw):
    """Half a surrogate pair, as an escape or as bytes: Python reads both."""
    gateway = Gateway(HELLO)
    add_operator(gateway.app, None)
    text = json.dumps(body, ensure_ascii=not raw)
    method = "PUT" if path == "/cluster/layout" else "POST"
    async with gateway.http() as client:
        content = text.encode("utf-8", "surrogatepass")
        response = await client.request(method, path, content=content, headers=JSON)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert "no Unicode text" in error["message"]


async def test_whole_surrogate_pairs_are_text():
    async with Gateway(HELLO).http() as client:
        body = b'{"prompt": "\\ud83d\\ude42", "metadata": {"k": "\\u0000"}, "foo": [[[{}]]]}'
        response = await client.post("/v1/completions", content=body, headers=JSON)
    assert response.status_code == 200


@pytest.mark.parametrize(
    "path", ["/health", "/live", "/ready", "/metrics", "/version", "/v1/models", "/v1/models/tiny"]
)
async def test_head_is_get_without_a_body(path):
    async with Gateway().http() as client:
        get, head = await client.get(path), await client.head(path)
        refused = await client.head("/v1/completions")
    assert (head.status_code, head.content) == (get.status_code, b"") == (200, b"")
    for name in ("content-type", "content-length"):
        assert head.headers.get(name) == get.headers.get(name)
    assert (refused.status_code, refused.content) == (405, b"")


async def test_head_of_a_server_that_is_not_ready():
    gateway = Gateway()
    gateway.frontend.is_ready = False
    async with gateway.http() as client:
        assert (await client.head("/ready")).status_code == 503
        assert (await client.head("/health")).status_code == 200


async def test_scripts_of_other_origins_only_as_configured():
    ask = {"origin": "https://a.example", "access-control-request-method": "POST"}
    ask |= {"access-control-request-headers": "authorization,content-type,x-slo-e2e-ms"}
    for origins, origin, allowed in (
        ((), "https://a.example", None),
        (("https://a.example",), "https://a.example", "https://a.example"),
        (("https://a.example",), "https://b.example", None),
        (("*",), "https://b.example", "*"),
    ):
        gateway = Gateway(REFUSED, config=ServeConfig(cors_origins=origins))
        async with gateway.http() as client:
            before = await client.options("/v1/completions", headers=ask | {"origin": origin})
            headers = {"origin": origin}
            answer = await client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
        assert before.headers.get("access-control-allow-origin") == allowed
        assert answer.headers.get("access-control-allow-origin") == allowed, "errors, too"
        assert answer.status_code == 429
        if allowed:
            exposed = answer.headers["access-control-expose-headers"]
            assert {"x-should-retry", "x-slo-status", "x-request-id"} <= set(exposed.split(", "))


def ends(caplog):
    return [r.fields for r in caplog.records if r.name == "stepserve.requests"]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_clients_id_is_the_requests_and_in_the_log(caplog, stream):
    caplog.set_level("INFO")
    gateway = Gateway(HELLO)
    body = {"prompt": ["a", "b"], "stream": stream, "slo": {"e2e_ms": 5000}}
    async with gateway.http() as client:
        headers = {"x-request-id": "abc-1"}
        response = await client.post("/v1/completions", json=body, headers=headers)
    assert {request.client_id for request, _ in gateway.frontend.submitted} == {"abc-1"}
    await until(lambda: ends(caplog))
    (line,) = ends(caplog)
    reply = stream_events(response)[-1] if stream else response.json()
    assert line["id"] == reply["id"]
    assert (line["request_id"], line["model"], line["slo"]) == ("abc-1", "tiny", "degraded")
    assert (line["prompt_tokens"], line["completion_tokens"]) == (6, 10)
    assert (line["status"], line["end"]) == (200, "stop")
    assert line["e2e_ms"] == pytest.approx(1e3 * (gateway.frontend.clock_s - 100.0), abs=0.1)
    assert "abc-1" in caplog.text


async def test_refused_failed_and_abandoned_requests_have_their_line(caplog):
    caplog.set_level("INFO", "stepserve.requests")
    gateway = Gateway(REFUSED)
    response = await gateway.complete()
    gateway.frontend.script = lambda request, payload: [RuntimeError("boom")]
    await gateway.complete()
    gateway.frontend.script = lambda request, payload: [asyncio.Event()]
    call = RawCall(gateway.app, "/v1/completions", {"prompt": "ab"})
    await until(lambda: gateway.frontend.running)
    call.hang_up()
    await call.task
    await until(lambda: len(ends(caplog)) == 3)
    assert [line["status"] for line in ends(caplog)] == [429, 500, 499]
    assert ends(caplog)[0]["request_id"] == response.headers["x-request-id"]
    assert "no room" in ends(caplog)[0]["end"]


async def test_a_bug_is_500_in_the_same_shape():
    gateway = Gateway()
    gateway.observer.render = lambda: 1 / 0
    async with gateway.http() as client:
        response = await client.get("/metrics", headers={"x-request-id": "abc"})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert response.headers["x-request-id"] == "abc"


async def test_metrics_and_version():
    async with Gateway().http() as client:
        metrics = await client.get("/metrics")
        version = await client.get("/version")
    assert metrics.text == "in_flight 0\n"
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert version.json()["version"]


async def test_tokenize_shows_what_generation_sees():
    gateway = Gateway(HELLO)
    async with gateway.http() as client:
        prompt = (await client.post("/tokenize", json={"prompt": "ab"})).json()
        messages = [{"role": "user", "content": "ab"}]
        chat = (await client.post("/tokenize", json={"messages": messages})).json()
        bare = {"prompt": "ab", "add_special_tokens": False}
        plain = (await client.post("/tokenize", json=bare)).json()
        both = await client.post("/tokenize", json={"prompt": "ab", "messages": messages})
        text = (await client.post("/detokenize", json={"tokens": plain["tokens"]})).json()
    await gateway.complete()
    await gateway.chat()
    seen = [list(payload.prompt_ids) for _, payload in gateway.frontend.submitted]
    assert seen == [prompt["tokens"], chat["tokens"]]
    assert plain["tokens"] == list(TOKENIZER.encode("ab"))
    assert text == {"prompt": "ab"}
    assert both.status_code == 400


async def test_identity_fields_are_accepted():
    body = {"user": "u", "metadata": {"a": "b"}, "store": False, "safety_identifier": "s"}
    response = await Gateway(HELLO).complete(**body)
    assert response.status_code == 200
    assert "x-stepserve-ignored-fields" not in response.headers


@pytest.mark.parametrize(
    "schema", [GenerationRequest, CompletionRequest, ChatRequest, SLOFields, DLMFields]
)
def test_every_field_is_documented(schema):
    text = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    names = [field.validation_alias or name for name, field in schema.model_fields.items()]
    assert [name for name in names if f"`{name}`" not in text] == []


async def test_openapi_document_lists_the_fields():
    async with Gateway().http() as client:
        document = (await client.get("/openapi.json")).json()
    assert "slo" in json.dumps(document["components"]["schemas"]["CompletionRequest"])
