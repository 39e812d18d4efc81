"""A field that is accepted changes something, or is refused by name (2F)."""

import pytest

from gateway.scripted import MASK, Gateway, byte_ids, card
from stepserve.core.config import ServeConfig
from stepserve.core.request import CacheMode

HELLO = [byte_ids("hello")]

NEUTRAL = {
    "best_of": 1,
    "chat_template": None,
    "frequency_penalty": 0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "bad_words": [],
    "prompt_logprobs": None,
    "priority": 0,
    "response_format": {"type": "text"},
    "skip_special_tokens": True,
    "structured_outputs": None,
    "suffix": None,
    "tools": [],
    "tool_choice": "none",
    "parallel_tool_calls": True,
    "top_logprobs": None,
}
REFUSED = {
    "allowed_token_ids": [1],
    "bad_words": ["x"],
    "best_of": 2,
    "chat_template": "{{ x }}",
    "frequency_penalty": 0.5,
    "functions": [{"name": "f"}],
    "guided_json": {},
    "logit_bias": {"5": 1},
    "presence_penalty": -0.1,
    "priority": 1,
    "prompt_logprobs": 1,
    "repetition_penalty": 1.1,
    "response_format": {"type": "json_object"},
    "skip_special_tokens": False,
    "structured_outputs": {"regex": "a"},
    "suffix": "x",
    "tool_choice": "required",
    "tools": [{"type": "function"}],
    "top_logprobs": 2,
    "truncate_prompt_tokens": 5,
    "use_beam_search": True,
}
INVALID = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
    ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"seed": 2**63}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 129, "temperature": 1}, "n"),
    ({"n": 2}, "n"),
    ({"stop": ""}, "stop.0"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
    ({"stream": "yes"}, "stream"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": 1, "echo": True}, "logprobs"),
    ({"service_tier": "gold"}, "service_tier"),
    ({"reasoning_effort": "extreme"}, "reasoning_effort"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [300]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [7, MASK]}, "prompt"),
    ({"prompt": "a<mask>b"}, "prompt"),
    ({"slo": {"tbt_ms": 0}}, "slo.tbt_ms"),
    ({"slo": {"tpot_ms": -1}}, "slo.tpot_ms"),
    ({"slo": {"e2e_ms": "0"}}, "slo.e2e_ms"),
    ({"slo": {"e2e_ms": 5, "ttlt_ms": 6}}, "slo.ttlt_ms"),
    ({"slo": {"class": "gold"}}, "slo.class"),
    ({"slo": {"on_miss": "drop"}}, "slo.on_miss"),
    ({"slo": {"weight": 2}}, "slo.weight"),
    ({"slo": {"weight": 0}}, "slo.weight"),
    ({"slo": {"e2e": 5}}, "slo.e2e"),
    ({"dlm": {"steps": 5}}, "dlm.steps"),
    ({"dlm": {"algorithm": "entropy"}}, "dlm.algorithm"),
    ({"dlm": {"block_length": 32}}, "dlm.block_length"),
    ({"dlm": {"cache": "fast"}}, "dlm.cache"),
    ({"dlm": {"cache": "exact", "cache_refresh_interval": 2}}, "dlm.cache_refresh_interval"),
    ({"dlm": {"cache": "exact", "refresh_scope": "output"}}, "dlm.refresh_scope"),
    ({"dlm": {"refresh_scope": "prompt"}}, "dlm.refresh_scope"),
    ({"dlm": {"confidence_threshold": 1.1}}, "dlm.confidence_threshold"),
    ({"dlm": {"min_confidence_threshold": 0.95}}, "dlm.min_confidence_threshold"),
    ({"dlm": {"edit_threshold": 0.5}}, "dlm.edit_threshold"),
    ({"dlm": {"stream_mode": "snapshot"}}, "dlm.stream_mode"),
    ({"dlm": {"max_forwards": 5, "max_nfe": 6}}, "dlm.max_nfe"),
    ({"dlm": {"confidence_threshold": 0.8}, "threshold": 0.9}, "threshold"),
    ({"denoising_steps": 4, "num_denoising_steps": 5}, "denoising_steps"),
    ({"reasoning_effort": "low", "threshold": 0.9}, "reasoning_effort"),
]


@pytest.mark.parametrize("name", sorted(NEUTRAL))
async def test_neutral_values_are_accepted(name):
    response = await Gateway(HELLO).complete(**{name: NEUTRAL[name]})
    assert response.status_code == 200
    assert "x-stepserve-ignored-fields" not in response.headers


@pytest.mark.parametrize("name", sorted(REFUSED))
async def test_unsupported_fields_are_named(name):
    gateway = Gateway(HELLO)
    response = await gateway.complete(**{name: REFUSED[name]})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, name)
    assert error["type"] == "invalid_request_error"
    assert not gateway.frontend.submitted
    assert gateway.observer.in_flight == 0, "2F: nothing leaks when validation refuses"


@pytest.mark.parametrize(("body", "param"), INVALID, ids=lambda value: str(value)[:50])
async def test_bad_values_are_named(body, param):
    gateway = Gateway(HELLO)
    response = await gateway.complete(**body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert not gateway.frontend.submitted


async def test_block_lengths_are_listed():
    response = await Gateway(HELLO).complete(dlm={"block_length": 32})
    assert "8, 16" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"prompt": [7] * 113}, "prompt", ("113", "at least 16", "128")),
        ({"prompt": [7] * 500, "max_tokens": 5}, "prompt", ("500", "128")),
        ({"prompt": [7] * 100, "max_tokens": 17}, "max_tokens", ("17", "100", "at most 16")),
        ({"prompt": [7], "max_completion_tokens": 113}, "max_completion_tokens", ("at most 112",)),
        ({"prompt": [7] * 100, "max_tokens": 17, "min_tokens": 17}, "max_tokens", ("17",)),
    ],
)
async def test_too_long_names_the_real_cause(body, param, words):
    """Fault 43."""
    gateway = Gateway(HELLO, config=ServeConfig(strict_limits=True))
    error = (await gateway.complete(**body)).json()["error"]
    assert error["param"] == param
    assert all(word in error["message"] for word in words)


@pytest.mark.parametrize(
    ("body", "held", "header"),
    [
        ({"prompt": [7] * 100, "max_tokens": 10**9}, [16], "16"),
        ({"prompt": [7], "max_completion_tokens": 113}, [112], "112"),
        ({"prompt": [[7] * 100, [7]], "max_tokens": 40}, [16, 40], "16"),
        ({"prompt": [7] * 100, "max_tokens": 16}, [16], None),
        ({"prompt": [7] * 100}, [16], None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_limit_is_a_cap_and_what_held_is_told(body, held, header, stream):
    """Editors and agents send large ones (vllm#42474)."""
    gateway = Gateway(HELLO)
    response = await gateway.complete(**body, stream=stream)
    assert response.status_code == 200
    limits = [request.max_output_tokens for request, _ in gateway.frontend.submitted]
    assert limits == held
    assert response.headers.get("x-stepserve-max-tokens") == header
    if not stream:
        assert response.json()["metrics"]["max_tokens"] == max(held)


async def test_no_answer_is_shorter_than_asked_because_the_limit_was_lowered():
    body = {"prompt": [7] * 100, "max_tokens": 40, "min_tokens": 17}
    error = (await Gateway(HELLO).complete(**body)).json()["error"]
    assert error["param"] == "min_tokens"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"dlm": {"cache": "dual"}}, "dlm.cache", ("exact",)),
        ({"dlm": {"cache_refresh_interval": 2}}, "dlm.cache_refresh_interval", ("approximate",)),
        ({"dlm": {"refresh_scope": "output"}}, "dlm.refresh_scope", ("approximate",)),
        ({"prompt": [7] * 100, "max_tokens": 29}, "max_tokens", ("29", "100", "at most 28")),
        ({"prompt": [7] * 128}, "prompt", ("128", "at least 16")),
    ],
)
async def test_of_a_block_causal_model(body, param, words):
    """Its blocks begin at position 0, so a prompt of 100 leaves 12 + 16 of 128."""
    config = ServeConfig(strict_limits=True)
    gateway = Gateway(HELLO, model=card(default_cache=CacheMode.BLOCK), config=config)
    error = (await gateway.complete(**body)).json()["error"]
    assert error["param"] == param
    assert all(word in error["message"] for word in words)


async def test_tools_that_may_not_be_called_have_no_effect():
    tool = {"type": "function", "function": {"name": "f"}}
    for body in (
        {"tools": [tool], "tool_choice": "none"},
        {"functions": [tool["function"]], "function_call": "none"},
    ):
        response = await Gateway(HELLO, config=ServeConfig(strict_fields=True)).chat(**body)
        assert response.status_code == 200
        assert response.headers["x-stepserve-ignored-fields"] == next(iter(body))
        crossed = {name: value for name, value in body.items() if value != "none"}
        assert (await Gateway(HELLO).chat(**crossed, tool_choice="auto")).status_code == 400


async def test_unknown_fields_are_reported():
    body = {"foo": 1, "stream_options": {"bar": 1}, "naïve\r\n": 2}
    response = await Gateway(HELLO).complete(**body)
    assert response.status_code == 200
    assert response.headers["x-stepserve-ignored-fields"] == "foo, ?, stream_options.bar"


async def test_strict_mode_refuses_unknown_fields():
    gateway = Gateway(HELLO, config=ServeConfig(strict_fields=True))
    assert (await gateway.complete(suffix=None)).status_code == 200
    response = await gateway.complete(foo=1)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "foo")


async def test_nulls_mean_absent():
    names = ["max_tokens", "temperature", "n", "stop", "stream", "slo", "dlm", "seed", "logprobs"]
    response = await Gateway(HELLO).complete(**dict.fromkeys(names))
    assert response.status_code == 200
