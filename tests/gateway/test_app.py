"""Routes, error shape, limits, ids."""

import json
from pathlib import Path

import pytest

from gateway.scripted import TOKENIZER, Gateway, byte_ids
from stepserve.gateway.app import MAX_BODY_BYTES
from stepserve.gateway.schemas import (
    ChatRequest,
    CompletionRequest,
    DLMFields,
    GenerationRequest,
    SLOFields,
)

HELLO = [byte_ids("hello")]
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
