"""The ``slo`` and ``dlm`` objects, the headers, and what the reply says of them."""

import pytest

from gateway.scripted import AUTOREGRESSIVE, Gateway, byte_ids, card
from stepserve.core.config import ServeConfig, SLOClass
from stepserve.core.request import CacheMode, OnMiss, RefreshScope, ThresholdBounds

HELLO = [byte_ids("hel"), byte_ids("lo")]
CLASSES = {
    "interactive": SLOClass(e2e_s=4.0, ttft_s=1.0),
    "standard": SLOClass(e2e_s=60.0),
    "batch": SLOClass(),
}


async def submitted(headers=None, trust=True, **body):
    """The core request that a body and headers become, and the observer."""
    config = ServeConfig(trust_slo_headers=trust, slo_classes=CLASSES)
    gateway = Gateway(HELLO, config=config)
    async with gateway.http() as client:
        response = await client.post(
            "/v1/completions", json={"prompt": "ab", **body}, headers=headers
        )
    assert response.status_code == 200, response.text
    return gateway.frontend.submitted[0][0], gateway.observer


async def test_body_targets_in_seconds():
    slo = {"class": "interactive", "e2e_ms": 2500, "tpot_ms": 20, "on_miss": "reject", "weight": 1}
    request, _ = await submitted(slo=slo | {"tbt_ms": 150})
    assert (request.slo.e2e_s, request.slo.tpot_s, request.slo.tbt_s) == (2.5, 0.02, 0.15)
    assert request.slo.ttft_s == 1.0, "the class fills what is missing"
    assert request.slo.on_miss is OnMiss.REJECT
    assert request.deadline_s == 102.5, "on the frontend's clock"


@pytest.mark.parametrize(
    ("slo", "weight"), [({}, 3.0), ({"weight": 0.5}, 0.5), ({"weight": 9}, 3.0), (None, 1.0)]
)
async def test_a_class_gives_its_weight_and_is_the_most_that_can_be_asked_for(slo, weight):
    config = ServeConfig(slo_classes={"standard": SLOClass(), "gold": SLOClass(weight=3.0)})
    gateway = Gateway(HELLO, model=card(weighs=True), config=config)
    body = {} if slo is None else {"slo": {"class": "gold", **slo}}
    async with gateway.http() as client:
        await client.post("/v1/completions", json={"prompt": "ab", **body})
    assert gateway.frontend.submitted[0][0].slo.weight == weight


@pytest.mark.parametrize(
    ("body", "slo_class"),
    [
        ({}, "standard"),
        ({"service_tier": "auto"}, "standard"),
        ({"service_tier": "flex"}, "batch"),
        ({"service_tier": "flex", "slo": {"class": "interactive"}}, "interactive"),
    ],
)
async def test_class(body, slo_class):
    request, _ = await submitted(**body)
    assert request.slo.slo_class == slo_class


@pytest.mark.parametrize(
    ("slo", "e2e_s"),
    [
        ({"deadline_unix_ms": 1_003_000}, 3.0),
        ({"deadline_unix_ms": 1_003_000, "e2e_ms": 2000}, 2.0),
        ({"deadline_unix_ms": 1_001_000, "e2e_ms": 2000}, 1.0),
        ({"deadline_unix_ms": 999_000}, -1.0),
        ({"ttlt_ms": 500}, 0.5),
        ({"e2e_ms": 0}, 0.0),
        ({"e2e_ms": -5, "deadline_unix_ms": 1_003_000}, -0.005),
        ({"deadline_unix_ms": 0}, -1000.0),
    ],
)
async def test_deadline_is_converted_and_the_earlier_one_holds(slo, e2e_s):
    """The wall clock says 1000 s. A deadline in the past is not an error."""
    request, _ = await submitted(slo=slo)
    assert request.slo.e2e_s == pytest.approx(e2e_s)


@pytest.mark.parametrize(
    ("slo", "fixed"),
    [
        ({"deadline_unix_ms": 1_003_000}, True),
        ({"deadline_unix_ms": 1_003_000, "e2e_ms": 2000}, False),
        ({"deadline_unix_ms": 1_001_000, "e2e_ms": 2000}, True),
        ({"e2e_ms": 2000}, False),
        ({}, False),
    ],
)
async def test_whether_the_deadline_is_a_moment_of_the_wall_clock(slo, fixed):
    request, _ = await submitted(slo=slo)
    assert request.slo.fixed_deadline is fixed


@pytest.mark.parametrize(
    ("slo", "scheduled_s"), [({"tbt_ms": 1}, 0.1), ({"tbt_ms": 150}, 0.15), ({}, None)]
)
async def test_a_gap_is_judged_as_asked_and_worked_for_as_all_can_bear(slo, scheduled_s):
    """A batch keeps the tightest target of its requests; the reply has both."""
    gateway = Gateway(HELLO, model=card(**AUTOREGRESSIVE))
    reply = (await gateway.complete(slo=slo)).json()
    asked = gateway.frontend.submitted[0][0].slo
    assert asked.tbt_s == (slo["tbt_ms"] / 1e3 if slo else None)
    assert asked.scheduled_tbt_s == scheduled_s
    assert reply["slo"]["tbt_ms"] == slo.get("tbt_ms")
    assert reply["slo"]["scheduled_tbt_ms"] == (scheduled_s and 1e3 * scheduled_s)


async def test_a_target_that_has_passed_is_missed_and_said_to_be():
    response = await Gateway(HELLO).complete(slo={"e2e_ms": 0})
    assert response.headers["x-slo-status"] == "missed"
    assert response.json()["slo"]["slack_ms"] == -200


@pytest.mark.parametrize(
    ("trust", "body_ms", "header_ms", "e2e_s"),
    [
        (True, 2000, 1000, 1.0),
        (True, 2000, 3000, 3.0),
        (False, 2000, 1000, 2.0),
        (False, 2000, 3000, 3.0),
        (True, None, 1000, 1.0),
        (False, None, 1000, 60.0),
    ],
)
async def test_header_precedence(trust, body_ms, header_ms, e2e_s):
    """Fault 69: an untrusted header can only loosen."""
    slo = {"e2e_ms": body_ms} if body_ms else None
    request, _ = await submitted({"x-slo-e2e-ms": str(header_ms)}, trust, slo=slo)
    assert request.slo.e2e_s == e2e_s


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("x-slo-ttft-ms", "300", lambda slo: slo.ttft_s == 0.3),
        ("x-llm-d-slo-ttft-ms", "300", lambda slo: slo.ttft_s == 0.3),
        ("x-llm-d-slo-tpot-ms", "30", lambda slo: slo.tpot_s == 0.03),
        ("x-slo-tbt-ms", "180", lambda slo: slo.tbt_s == 0.18),
        ("x-slo-tbt-ms", "8", lambda slo: slo.tbt_s == 0.008),
        ("x-slo-e2e-ms", "0", lambda slo: slo.e2e_s == 0.0),
        ("x-slo-e2e-ms", "-5", lambda slo: slo.e2e_s == -0.005),
        ("x-slo-ttft-ms", "-5", lambda slo: slo.ttft_s == -0.005),
        ("x-request-deadline-unix-ms", "0", lambda slo: slo.e2e_s == -1000.0),
        ("x-request-deadline-unix-ms", "1002000", lambda slo: slo.e2e_s == 2.0),
        ("x-slo-class", "batch", lambda slo: slo.slo_class == "batch"),
        ("x-llm-d-inference-objective", "interactive", lambda slo: slo.e2e_s == 4.0),
    ],
)
async def test_headers(name, value, read):
    request, observer = await submitted({name: value})
    assert read(request.slo)
    assert observer.ignored == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-slo-e2e-ms", "soon"),
        ("x-slo-e2e-ms", "nan"),
        ("x-slo-e2e-ms", "-inf"),
        ("x-slo-tbt-ms", "0"),
        ("x-slo-tpot-ms", "-5"),
        ("x-slo-class", "gold"),
        ("x-dynamo-request-priority", "5"),
        ("x-llm-d-inference-fairness-id", "tenant"),
    ],
)
async def test_bad_headers_are_ignored_and_counted(name, value):
    request, observer = await submitted({name: value})
    assert request.slo.e2e_s == 60.0
    assert observer.ignored == [name]


async def test_untrusted_class_can_only_loosen():
    """Fault 69."""
    for asked, got in (("interactive", "standard"), ("batch", "batch")):
        request, _ = await submitted({"x-slo-class": asked}, trust=False)
        assert request.slo.slo_class == got


@pytest.mark.parametrize(
    ("body", "bounds"),
    [
        ({}, (0.9, 0.5)),
        ({"dlm": {"confidence_threshold": 0.8}}, (0.8, 0.5)),
        ({"dlm": {"confidence_threshold": 0.4}}, (0.4, 0.4)),
        ({"confidence_threshold": 0.7, "threshold": 0.7}, (0.7, 0.5)),
        ({"dlm": {"confidence_threshold": 1, "min_confidence_threshold": 1}}, (1, 1)),
        ({"reasoning_effort": "high"}, (0.9, 0.9)),
        ({"reasoning_effort": "instant"}, (0.6, 0.5)),
    ],
)
async def test_thresholds(body, bounds):
    request, _ = await submitted(**body)
    assert request.diffusion.thresholds == ThresholdBounds(*bounds)


@pytest.mark.parametrize(
    ("cache", "mode"),
    [
        ("exact", CacheMode.NONE),
        ("approximate", CacheMode.DUAL),
        ("auto", CacheMode.PREFIX),
        ("prefix", CacheMode.PREFIX),
        ("dual", CacheMode.DUAL),
        ("none", CacheMode.NONE),
        (None, CacheMode.PREFIX),
    ],
)
async def test_cache(cache, mode):
    """The test server's default is prefix."""
    request, _ = await submitted(dlm={"cache": cache})
    assert request.diffusion.cache_mode is mode


@pytest.mark.parametrize("cache", ["exact", "auto", None])
async def test_a_block_causal_model_is_exact_whatever_is_left_open(cache):
    gateway = Gateway(HELLO, model=card(default_cache=CacheMode.BLOCK))
    reply = (await gateway.complete(dlm={"cache": cache})).json()
    options = gateway.frontend.submitted[0][0].diffusion
    assert (options.cache_mode, options.refresh_scope) == (CacheMode.BLOCK, RefreshScope.FULL)
    assert reply["dlm"]["cache"] == "exact"


@pytest.mark.parametrize(
    ("dlm", "scope"),
    [
        ({"refresh_scope": "output"}, RefreshScope.OUTPUT),
        ({"refresh_scope": "full", "cache": "exact"}, RefreshScope.FULL),
        ({"refresh_scope": "auto"}, RefreshScope.OUTPUT),
        ({"refresh_scope": "auto", "cache": "exact"}, RefreshScope.FULL),
        ({}, RefreshScope.OUTPUT),
    ],
)
async def test_refresh_scope(dlm, scope):
    request, _ = await submitted(dlm=dlm)
    assert request.diffusion.refresh_scope is scope


async def test_other_denoising_options():
    dlm = {"cache_refresh_interval": 3, "block_length": 8, "max_nfe": 9}
    request, _ = await submitted(dlm=dlm | {"expected_output_tokens": 7}, denoising_steps=4)
    options = request.diffusion
    assert (options.refresh_blocks, options.block_tokens) == (3, 8)
    assert (options.max_forwards, options.max_steps_per_block) == (9, 4)
    assert options.expected_output_tokens == 7
    request, _ = await submitted(expected_output_tokens=9)
    assert (request.expected_output_tokens, request.diffusion.expected_output_tokens) == (9, 9)


@pytest.mark.parametrize(
    ("e2e_ms", "status"), [(None, "none"), (1000, "degraded"), (100, "missed")]
)
async def test_reply_says_how_the_slo_went(e2e_ms, status):
    """The answer takes 0.2 s of the frontend's clock."""
    response = await Gateway(HELLO).complete(slo={"e2e_ms": e2e_ms})
    assert response.headers["x-slo-status"] == status
    assert response.json()["slo"] == {
        "class": "standard",
        "e2e_ms": e2e_ms,
        "ttft_ms": None,
        "tpot_ms": None,
        "tbt_ms": None,
        "scheduled_tbt_ms": None,
        "weight": 1.0,
        "status": status,
        "met": {"none": None, "degraded": True, "missed": False}[status],
        "missed": ["e2e"] if status == "missed" else [],
        "slack_ms": None if e2e_ms is None else e2e_ms - 200,
    }


async def test_metrics_of_a_known_trace():
    """Fault 76: three events at 100, 200, 300 ms with 1, 2 and 3 tokens; 50 ms queued."""
    script = [byte_ids("a"), byte_ids("ab"), byte_ids("abc")]
    metrics = (await Gateway(script).complete()).json()["metrics"]
    assert metrics == {
        "time_to_first_token_ms": 100,
        "queue_time_ms": 50,
        "generation_time_ms": 250,
        "e2e_ms": 300,
        "mean_itl_ms": 100,
        "time_per_output_token_ms": 40,
        "tokens_per_second": 24,
        "forwards": 3,
        "max_tokens": 48,
        "migrations": 0,
        "handovers": 0,
        "paused_ms": 0,
    }


async def test_metrics_of_an_answer_within_one_block():
    """Fault 21: one event of 5 tokens after 50 ms of work."""
    metrics = (await Gateway([byte_ids("hello")]).complete()).json()["metrics"]
    assert metrics["mean_itl_ms"] is None
    assert metrics["time_per_output_token_ms"] == 10
    assert metrics["tokens_per_second"] == 100


async def test_dlm_object():
    dlm = (await Gateway(HELLO).complete()).json()["dlm"]
    assert dlm == {
        "forwards": 2,
        "tokens_per_forward": 2.5,
        "blocks": 2,
        "block_length": 16,
        "threshold_min": 0.7,
        "threshold_mean": 0.8,
        "forced_commits": 1,
        "refreshes": 2,
        "cache": "prefix",
    }
