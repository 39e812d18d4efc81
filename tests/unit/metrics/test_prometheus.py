"""Every metric moves, and says what its name says."""

from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from stepserve.core.frontend import RequestReport
from stepserve.core.ids import RequestId
from stepserve.core.request import SLO, Family, FinishReason, Request
from stepserve.metrics.control import ControlReading
from stepserve.metrics.prometheus import LoadGauges, PrometheusMetrics
from stepserve.metrics.tenants import MOST_NAMED

REPORT = RequestReport(
    forwards=12,
    blocks=3,
    forced=2,
    threshold_min=0.6,
    threshold_mean=0.75,
    migrations=1,
    queue_s=0.5,
    ttft_s=1.0,
    e2e_s=3.5,
    slack_s=-0.5,
    slo_met=False,
    degraded=True,
)


def request(slo_class="interactive", family=Family.DIFFUSION, e2e_s=3.0):
    return Request(RequestId("r"), family, "tiny", 10, 64, 0.0, SLO(slo_class, e2e_s))


@pytest.fixture
def load():
    return {"running": 2, "waiting": 3, "kv": 0.25}


@pytest.fixture
def metrics(load):
    gauges = LoadGauges(lambda: load["running"], lambda: load["waiting"], lambda: load["kv"])
    return PrometheusMetrics("tiny", gauges, page_tokens=16, pages=100)


def scrape(metrics):
    """{(sample name, labels without the model): value}, bucket samples left out."""
    values = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "tiny"
            if "le" not in labels and not sample.name.endswith("_created"):
                values[sample.name, tuple(sorted(labels.items()))] = sample.value
    return values


def by_class(**labels):
    return tuple(sorted({"slo_class": "interactive", **labels}.items()))


def test_load_is_asked_at_each_scrape(metrics, load):
    assert scrape(metrics)["vllm:num_requests_running", ()] == 2
    load.update(running=0, waiting=1, kv=0.5)
    values = scrape(metrics)
    assert values["vllm:num_requests_running", ()] == 0
    assert values["vllm:num_requests_waiting", ()] == 1
    assert values["vllm:kv_cache_usage_perc", ()] == 0.5
    labels = (("block_size", "16"), ("num_gpu_blocks", "100"))
    assert values["vllm:cache_config_info", labels] == 1


def test_decisions_of_the_control_plane_are_read_at_each_scrape():
    reading = ControlReading(
        cap_lowest=0.5,
        cap_mean=0.7,
        caps_updates=1,
        migrations_asked=3,
        migrations_done=2,
        forecasts_refreshed=40,
        plans_solved=5,
        layout_changes=4,
        instances={1: 2, 2: 1},
        scheduler_seconds={"global": 0.5, "local": 1.5},
        scheduler_events={"global": 6, "local": 7},
    )
    readings = [ControlReading(), reading]
    gauges = LoadGauges(lambda: 0, lambda: 0, lambda: 0, lambda: readings[-1])
    metrics = PrometheusMetrics("tiny", gauges, page_tokens=16, pages=100)
    values = scrape(metrics)
    expected = {
        ("stepserve:cap_lowest", ()): 0.5,
        ("stepserve:cap_mean", ()): 0.7,
        ("stepserve:caps_updates_total", ()): 1,
        ("stepserve:migrations_asked_total", ()): 3,
        ("stepserve:migrations_done_total", ()): 2,
        ("stepserve:forecasts_refreshed_total", ()): 40,
        ("stepserve:plans_solved_total", ()): 5,
        ("stepserve:layout_changes_total", ()): 4,
        ("stepserve:instances", (("tp_degree", "1"),)): 2,
        ("stepserve:instances", (("tp_degree", "2"),)): 1,
        ("stepserve:scheduler_seconds_total", (("scheduler", "global"),)): 0.5,
        ("stepserve:scheduler_seconds_total", (("scheduler", "local"),)): 1.5,
        ("stepserve:scheduler_events_total", (("scheduler", "global"),)): 6,
        ("stepserve:scheduler_events_total", (("scheduler", "local"),)): 7,
    }
    assert {key: values[key] for key in expected} == expected
    readings.pop()
    assert scrape(metrics)["stepserve:cap_lowest", ()] == 1.0


def test_one_answer(metrics):
    """Faults 65, 67, 76."""
    asked = request()
    metrics.started(asked)
    assert scrape(metrics)["stepserve:requests_in_flight", by_class()] == 1
    metrics.emitted(asked, 8, None)
    metrics.emitted(asked, 4, 2.0)
    metrics.finished(asked, FinishReason.STOP, 12, REPORT)
    expected = {
        ("vllm:prompt_tokens_total", ()): 10,
        ("vllm:generation_tokens_total", ()): 12,
        ("vllm:request_success_total", (("finished_reason", "stop"),)): 1,
        ("vllm:time_to_first_token_seconds_sum", ()): 1.0,
        ("vllm:inter_token_latency_seconds_sum", ()): 2.0,
        ("vllm:inter_token_latency_seconds_count", ()): 4,
        ("vllm:request_time_per_output_token_seconds_sum", ()): 0.25,
        ("vllm:e2e_request_latency_seconds_sum", ()): 3.5,
        ("vllm:request_queue_time_seconds_sum", ()): 0.5,
        ("vllm:request_inference_time_seconds_sum", ()): 3.0,
        ("vllm:request_prompt_tokens_sum", ()): 10,
        ("vllm:request_generation_tokens_sum", ()): 12,
        ("vllm:request_params_max_tokens_sum", ()): 64,
        ("stepserve:requests_total", by_class(outcome="stop")): 1,
        ("stepserve:requests_in_flight", by_class()): 0,
        ("stepserve:slo_requests_total", by_class(status="missed")): 1,
        ("stepserve:slack_seconds_count", by_class(at="admission")): 1,
        ("stepserve:slack_seconds_count", by_class(at="completion")): 1,
        ("stepserve:e2e_seconds_sum", by_class()): 3.5,
        ("stepserve:ttft_seconds_sum", by_class()): 1.0,
        ("stepserve:text_event_gap_seconds_sum", by_class()): 2.0,
        ("stepserve:text_event_tokens_sum", by_class()): 12,
        ("stepserve:steps_per_block_sum", by_class()): 4,
        ("stepserve:tokens_per_forward_sum", by_class()): 1,
        ("stepserve:block_seconds_sum", by_class()): 1.0,
        ("stepserve:effective_threshold_sum", by_class()): 0.75,
        ("stepserve:forced_commits_total", by_class()): 2,
        ("stepserve:migrations_total", by_class()): 1,
        ("stepserve:requests_by_cache_total", by_class(cache="dual")): 1,
    }
    values = scrape(metrics)
    assert {key: values[key] for key in expected} == expected


def test_slack_has_negative_buckets(metrics):
    """Fault 67: an autoscaler sees by how much deadlines are missed."""
    metrics.started(request())
    metrics.finished(request(), FinishReason.STOP, 12, REPORT)
    text = metrics.render().decode()
    line = next(
        line
        for line in text.splitlines()
        if line.startswith("stepserve:slack_seconds_bucket")
        and 'at="completion"' in line
        and 'le="-0.5"' in line
    )
    assert line.endswith(" 1.0")


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.ERROR])
def test_broken_answers_are_counted_but_not_timed(metrics, reason):
    metrics.started(request())
    metrics.finished(request(), reason, 3, REPORT)
    values = scrape(metrics)
    assert values["stepserve:requests_total", by_class(outcome=reason.value)] == 1
    assert values["stepserve:requests_in_flight", by_class()] == 0
    assert ("vllm:e2e_request_latency_seconds_count", ()) not in values


def test_refusals_and_headers(metrics):
    metrics.started(request())
    metrics.rejected(request())
    metrics.header_ignored("x-slo-e2e-ms")
    values = scrape(metrics)
    assert values["stepserve:requests_total", by_class(outcome="rejected")] == 1
    assert values["stepserve:requests_in_flight", by_class()] == 0
    assert values["stepserve:ignored_headers_total", (("header", "x-slo-e2e-ms"),)] == 1


def test_tenants_have_series_of_their_own_up_to_a_number(metrics):
    for n in range(MOST_NAMED + 20):
        asked = replace(request(), tenant=f"t{n}")
        metrics.started(asked)
        metrics.emitted(asked, 12, None)
        kept = replace(REPORT, slo_met=True if n % 2 else None)
        metrics.finished(asked, FinishReason.STOP, 12, kept)
        metrics.limited(f"t{n}", "requests_in_flight")
    metrics.started(replace(request(), tenant="t1"))
    metrics.finished(replace(request(), tenant="t1"), FinishReason.STOP, 12, REPORT)
    values = scrape(metrics)
    named = {dict(labels).get("tenant") for _, labels in values} - {None, "other"}
    assert named == {f"t{n}" for n in range(MOST_NAMED)}
    one = (("tenant", "t1"),)
    assert values["stepserve:tenant_requests_total", (("outcome", "stop"), *one)] == 2
    assert values["stepserve:tenant_met_total", one] == 1, "one of two"
    assert values["stepserve:tenant_met_total", (("tenant", "other"),)] == 20
    assert values["stepserve:tenant_generation_tokens_total", one] == 12
    assert values["stepserve:tenant_prompt_tokens_total", one] == 20
    assert values["stepserve:tenant_requests_in_flight", one] == 0
    limited = (("limit", "requests_in_flight"), ("tenant", "t0"))
    assert values["stepserve:tenant_limited_total", limited] == 1


def test_autoregressive_requests_have_no_denoising(metrics):
    asked = request(family=Family.AUTOREGRESSIVE)
    metrics.started(asked)
    metrics.finished(asked, FinishReason.LENGTH, 12, REPORT)
    assert not any(name.startswith("stepserve:steps_per_block") for name, _ in scrape(metrics))


def test_every_metric_is_documented(metrics):
    text = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    families = text_string_to_metric_families(metrics.render().decode())
    assert [family.name for family in families if f"`{family.name}" not in text] == []


def test_two_servers_in_one_process_do_not_share(metrics):
    other = PrometheusMetrics("tiny", LoadGauges(*[lambda: 0.0] * 3), 16, 100)
    metrics.started(request())
    assert ("stepserve:requests_in_flight", by_class()) not in scrape(other)
