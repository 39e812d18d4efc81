import math

import pytest

from stepserve.cli.bench_plan import (
    DEFAULT_RATE,
    BenchConfig,
    base_fields,
    deadlines_s,
    make_plan,
    request_fields,
)
from stepserve.cli.jobs import Job
from stepserve.cli.options import merged
from stepserve.core.errors import FieldError

JOB = Job("?", max_tokens=32, expected_tokens=20)


def config(**options):
    return BenchConfig(**{"url": "http://test", "rate": 10.0, "requests": 5, **options})


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    rows = "".join(f"{i},{10 * i},{i}\n" for i in range(1, 11))
    path.write_text("arrival_s,input_tokens,output_tokens\n" + rows)
    return path


def test_all_variants_of_a_seed_share_arrivals_and_problems():
    one, other = (make_plan(config(seed=3, warmup=w)) for w in (0, 4))
    assert one.arrivals == other.arrivals
    assert one.jobs == other.jobs
    assert make_plan(config(seed=4)).jobs != one.jobs


def test_unloaded_requests_are_planned_only_where_they_are_needed():
    plan = make_plan(config(warmup=3, base_requests=2, slo_multiple=2.0))
    assert (len(plan.warmup), len(plan.base), len(plan.jobs)) == (3, 2, 5)
    assert not make_plan(config(deadline_ms=1.0)).base


def test_arrivals_that_are_drawn_have_a_default_rate_and_traces_their_own(trace):
    assert config(rate=None).rate == DEFAULT_RATE
    assert config(rate=None, arrivals=f"trace:{trace}").rate is None


def test_default_number_of_requests():
    assert len(make_plan(config(requests=None)).jobs) == 100
    assert len(make_plan(config(requests=None, duration_s=1.0)).jobs) < 50


def test_a_trace_is_cut_limited_and_rescaled(trace, monkeypatch):
    def times(**options):
        chosen = {"arrivals": f"trace:{trace}", "rate": None, "requests": None, **options}
        return [a.at_s for a in make_plan(config(**chosen)).arrivals]

    assert times() == list(range(1, 11))
    assert times(requests=2) == [1, 2]
    assert times(duration_s=3.5) == [1, 2, 3]
    assert times(max_total_tokens=22) == [1, 2]
    assert times(rate=2.0, rescale="stretch")[:2] == [0.5, 1.0]
    assert len(times(rate=3.0)) == 30
    monkeypatch.setenv("STEPSERVE_DATA", str(trace.parent))
    assert times(arrivals="trace:trace.csv") == list(range(1, 11))


def test_dropped_requests_are_counted_and_lengths_reach_the_jobs(trace):
    chosen = {"arrivals": f"trace:{trace}", "rate": None, "requests": None, "dataset": "random"}
    plan = make_plan(config(**chosen, max_total_tokens=22))
    assert plan.dropped == 8
    assert [(len(j.prompt.split()), j.max_tokens) for j in plan.jobs] == [(10, 1), (20, 2)]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"rate": -1.0}, "--rate"),
        ({"rate": math.inf}, "--rate"),
        ({"duration_s": math.nan}, "--duration-s"),
        ({"seed": -1}, "--seed"),
        ({"warmup": -1}, "--warmup"),
        ({"deadline_ms": 0.0}, "--deadline-ms"),
        ({"threshold": 1.5}, "--threshold"),
        ({"burst": (0.0, -1.0, 2.0)}, "--burst"),
        ({"arrivals": "uniform"}, "--arrivals"),
        ({"arrivals": "poisson:2"}, "--arrivals"),
        ({"arrivals": "gamma:wild"}, "--arrivals"),
        ({"arrivals": "gamma:nan"}, "--arrivals"),
        ({"arrivals": "trace:nowhere.csv"}, "--arrivals"),
        ({"requests": 0}, "--requests"),
        ({"requests": -1}, "--requests"),
        ({"compare": ("fixed", "magic")}, "--compare"),
        ({"dataset": "random"}, "--prompt-tokens"),
    ],
)
def test_what_cannot_be_done_names_its_option(options, field):
    with pytest.raises(FieldError) as error:
        make_plan(config(**options))
    assert error.value.field == field


def test_a_burst_belongs_to_drawn_arrivals(trace):
    with pytest.raises(FieldError, match="--burst"):
        make_plan(config(arrivals=f"trace:{trace}", burst=(0.0, 1.0, 2.0)))
    calm, busy = (
        make_plan(config(burst=b, requests=None, duration_s=2.0)) for b in (None, (0.0, 2.0, 5.0))
    )
    assert len(busy.arrivals) > 2 * len(calm.arrivals)


def test_policies_are_expressed_by_the_request():
    def bounds(**options):
        plan = make_plan(config(compare=("fixed", "deadline_fit"), **options))
        return [tuple(body["dlm"].values()) for body in plan.variants.values()]

    assert bounds() == [(0.9, 0.9), (0.9, 0.5)]
    assert bounds(threshold=0.8, min_threshold=0.6) == [(0.8, 0.8), (0.8, 0.6)]


def test_own_variants_join_the_compared_ones():
    own = ("strict", {"slo": {"on_miss": "reject"}})
    assert list(make_plan(config(compare=("fixed",), variant=[own])).variants) == [
        "fixed",
        "strict",
    ]
    assert make_plan(config()).variants == {"run": {}}


def test_only_what_was_asked_for_is_sent():
    assert request_fields(config(), JOB, None) == {"max_tokens": 32, "temperature": 0.0}
    assert "slo" not in request_fields(config(slo_mode="none"), JOB, 0.5)
    full = config(threshold=0.9, min_threshold=0.6, on_miss="reject", ignore_eos=True)
    assert request_fields(full, JOB, 0.5) == {
        "max_tokens": 32,
        "temperature": 0.0,
        "ignore_eos": True,
        "slo": {"e2e_ms": 500.0, "on_miss": "reject"},
        "dlm": {"confidence_threshold": 0.9, "min_confidence_threshold": 0.6},
    }


def test_unloaded_requests_have_no_deadline_and_pin_the_preferred_threshold():
    fields = base_fields(config(threshold=0.8, min_threshold=0.6, on_miss="reject"), JOB)
    assert "slo" not in fields
    assert fields["dlm"] == {"confidence_threshold": 0.8, "min_confidence_threshold": 0.8}
    assert "dlm" not in base_fields(config(min_threshold=0.6), JOB)


def test_extra_body_reaches_nested_objects_and_wins_over_plain_fields():
    chosen = config(body={"temperature": 0.5, "dlm": {"cache": "exact"}}, threshold=0.9)
    fields = request_fields(chosen, JOB, None)
    assert fields["temperature"] == 0.5
    assert fields["dlm"] == {"cache": "exact", "confidence_threshold": 0.9}


def test_merging_leaves_its_arguments_alone():
    body = {"a": {"b": 1}, "c": 2}
    assert merged(body, {"a": {"d": 3}, "c": {"e": 4}}) == {"a": {"b": 1, "d": 3}, "c": {"e": 4}}
    assert body == {"a": {"b": 1}, "c": 2}


def test_deadlines():
    jobs = [JOB, Job("?", 32, 10)]
    assert deadlines_s(config(), jobs, None) == [None, None]
    assert deadlines_s(config(deadline_ms=250.0), jobs, None) == [0.25, 0.25]
    assert deadlines_s(config(slo_multiple=3.0), jobs, 0.5) == [1.5, 1.5]
    assert deadlines_s(config(slo_per_token_ms=50.0), jobs, None) == [1.0, 0.5]
