"""The systems that experiments compare, by family and name.

Diffusion. The published ones are as their artifact runs them (DiLaServe B1, DiLaServe B6,
DiLaServe B7, DiLaServe B9): all running requests in every batch, at most 8,192 full-length tokens
of them on an instance, at most 100 admitted requests on 16 GPUs, first come first served. (Their
rule that drops those whose deadline passed in the queue, ``fcfs_drop``, acts in the published
2-hour run, but not in the ablations, whose mean latencies reach 29 s at a deadline of 10 s.)

The ``stepserve`` ones bound running requests by places and KV pages, batch by deadline, and, where
there is no slack, refresh the keys and values of the output alone, every second block. What that
costs in quality was measured on the bundled model (docs/bundled-model.md): the mean of the
points lost at thresholds 0.9 and 0.7, in proportion to the refreshes left out, is taken off
their accuracy proxy. ``stepserve-cheap-refresh`` leaves out all it may, whatever the load.

Autoregressive (DynaServe 3.10.4). The baselines are those of the paper: ``colocated-N`` runs
chunked prefill with a static chunk of N beside all decodes, ``disaggregated-XpYd`` prefills on X
instances and decodes on Y others. ``colocated`` and ``disaggregated`` are the best of theirs for
each workload and model. Two of our own isolate one part each: ``colocated-budget`` has the local
scheduler of ``dynaserve`` alone, ``disaggregated-bypass`` computes short prompts where they are
decoded. ``dynaserve`` is the published system as far as it is known, with the fill-ins of
DynaServe Part 3; the others of its name change one thing. ``stepserve`` is ours: the budget of a
batch is what is left since each request's last token, TTFT targets count, prefills go by deadline.

``dilaserve-two-settings`` is the published system with two settings of ``stepserve``: its refresh
of the output alone, every second block, and its bound of 20 running requests.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import inf

from stepserve.core.config import Choice, ControlConfig
from stepserve.core.request import Family

from .config import RequestOptions, System

NEVER = 10**9
"""More tokens than any request settles: the first forecast is the only one."""

_PUBLISHED = System(
    control=ControlConfig(
        placement=Choice("step_completion"),
        batching=Choice("all_running"),
        threshold=Choice("deadline_fit"),
        load_control=Choice("load_caps", {"utilisation": 1.0}),
        migration=Choice("recompute_step", {"gain": 0.0}),
        queue="fcfs",
        queue_limit=10**6,
        running_tokens=8192,
        margin=0.9,
        predict_every_tokens=8,
        report_every_s=0.1,
    ),
    learn_steps=False,
    max_running_requests=256,
    admitted_per_gpu=100 / 16,
)


_FIVE = _PUBLISHED
_PUBLISHED = replace(
    _FIVE,
    control=replace(_FIVE.control, thresholds=(0.9, 0.8, 0.7)),
    request=RequestOptions(floor=0.7),
)


def _variant(system: System, **control: object) -> System:
    return replace(system, control=replace(system.control, **control))  # type: ignore[arg-type]


_FIXED = replace(
    _variant(
        _PUBLISHED,
        threshold=Choice("fixed"),
        load_control=Choice("none"),
        migration=Choice("none"),
        predict_every_tokens=NEVER,
    ),
    predictor=Choice("mean"),
)

_STEPSERVE = System(
    control=ControlConfig(
        threshold=Choice("early_fit", {"early_margin": 0.6}),
        load_control=Choice("horizon_caps"),
        margin=0.95,
        infeasible="preempt",
        refresh=Choice("when_slack", {"margin": 0.75}),
        queue_limit=10**6,
    ),
    request=RequestOptions(refresh_blocks=2, refresh_scope="output"),
    max_running_requests=20,
    accuracy_points_lost=0.9,
)

DIFFUSION: Mapping[str, System] = {
    "infaas": _FIXED,
    "llumnix": _variant(_FIXED, migration=Choice("recompute_step", {"gain": 0.0})),
    "dilaserve": _PUBLISHED,
    "dilaserve-two-settings": replace(
        _variant(_PUBLISHED, running_tokens=0),
        request=replace(_PUBLISHED.request, refresh_blocks=2, refresh_scope="output"),
        max_running_requests=20,
        admitted_per_gpu=0.0,
        accuracy_points_lost=0.9,
    ),
    "dilaserve-five-thresholds": _FIVE,
    "dilaserve-reconfigured": _variant(_FIVE, planner=Choice("capacity_ilp")),
    "dilaserve-no-load-control": _variant(_PUBLISHED, load_control=Choice("none")),
    "dilaserve-no-slo-aware": _variant(_PUBLISHED, threshold=Choice("at_cap")),
    "dilaserve-one-shot": _variant(_PUBLISHED, predict_every_tokens=NEVER),
    "dilaserve-oracle": replace(_PUBLISHED, predictor=Choice("oracle")),
    "dilaserve-no-migration": _variant(_PUBLISHED, migration=Choice("none")),
    "dilaserve-any-step-migration": _variant(
        _PUBLISHED, migration=Choice("any_step", {"gain": 0.0})
    ),
    "stepserve": _STEPSERVE,
    "stepserve-fixed": _variant(
        _STEPSERVE,
        threshold=Choice("fixed"),
        load_control=Choice("none"),
        refresh=Choice("as_asked"),
        infeasible="lowest_threshold",
    ),
    "stepserve-all-running": _variant(_STEPSERVE, batching=Choice("all_running")),
    "stepserve-marginal-caps": _variant(_STEPSERVE, load_control=Choice("marginal_caps")),
    "stepserve-load-caps": _variant(_STEPSERVE, load_control=Choice("load_caps")),
    "stepserve-no-caps": _variant(_STEPSERVE, load_control=Choice("none")),
    "stepserve-deadline-fit": _variant(_STEPSERVE, threshold=Choice("deadline_fit")),
    "stepserve-schedules": _variant(_STEPSERVE, threshold=Choice("schedule_fit")),
    "stepserve-hurry": _variant(_STEPSERVE, infeasible="lowest_threshold"),
    "stepserve-cheap-refresh": _variant(_STEPSERVE, refresh=Choice("as_asked")),
    "stepserve-full-refresh": replace(
        _STEPSERVE, request=RequestOptions(), accuracy_points_lost=0.0
    ),
    "stepserve-every-second": replace(
        _variant(_STEPSERVE, refresh=Choice("as_asked")),
        request=RequestOptions(refresh_blocks=2),
        accuracy_points_lost=0.75,
    ),
    "stepserve-output-only": replace(
        _variant(_STEPSERVE, refresh=Choice("as_asked")),
        request=RequestOptions(refresh_scope="output"),
        accuracy_points_lost=1.6,
    ),
}
"""Name -> system. The published load sweeps are re-run with the three candidate thresholds of
the artifact's benchmark configs, the 2-hour run with its five (DiLaServe B1)."""

CHUNKS = (256, 512, 1024, 2048)
"""Static chunks that the baseline is tuned over (DynaServe 1.7)."""

MOST_INSTANCES = 8
"""Up to which every ratio of prefill to decode instances has a name."""

SHORT_PROMPT_TOKENS = 512
"""Prefill backlog up to which ``disaggregated-bypass`` prefills where it decodes."""

GB = 1e9

_PLAIN = System(
    ControlConfig(
        placement=Choice("least_loaded"),
        batching=Choice("static_chunk", {"ignore_ttft": True}),
        queue="fcfs",
        queue_limit=10**6,
        predict_every_tokens=8,
        report_every_s=0.05,
    ),
    predictor=Choice("known"),
    max_running_requests=256,
)
"""Reports every 50 ms (DynaServe 3.4)."""


def _placed(system: System, use: str = "", **options: object) -> System:
    return _variant(system, placement=Choice(use, options).over(system.control.placement))


_AS_PUBLISHED = {"gain": 0.05, "ignore_ttft": True}
_BUDGETED = _variant(_PLAIN, batching=Choice("tbt_budget", {"ignore_ttft": True}))
_DYNASERVE = _placed(_BUDGETED, "tandem_split", **_AS_PUBLISHED)
_STATIC = _variant(
    _DYNASERVE, batching=_PLAIN.control.batching, segment_cost=Choice("occupancy", {"tbt_s": inf})
)
_AGE_BUDGET = _variant(
    _DYNASERVE,
    placement=Choice("tandem_split"),
    batching=Choice("age_budget", {"order": "deadline"}),
)

AUTOREGRESSIVE: Mapping[str, System] = {
    **{f"colocated-{chunk}": _variant(_PLAIN, chunk_tokens=chunk) for chunk in CHUNKS},
    "colocated-4096": _variant(_PLAIN, chunk_tokens=4096),
    **{
        f"disaggregated-{p}p{d}d": _placed(_PLAIN, "disaggregated", prefill_instances=p)
        for p in range(1, MOST_INSTANCES)
        for d in range(1, MOST_INSTANCES - p + 1)
    },
    "colocated-budget": _BUDGETED,
    "disaggregated-bypass": _placed(_BUDGETED, "disaggregated", bypass_tokens=SHORT_PROMPT_TOKENS),
    "dynaserve": _DYNASERVE,
    "dynaserve-static-512": _variant(_STATIC, chunk_tokens=512),
    "dynaserve-static-2048": _STATIC,
    "dynaserve-serial-push": _variant(_DYNASERVE, push_pages=0),
    "dynaserve-cut-prompt": _placed(_DYNASERVE, "prompt_split", **_AS_PUBLISHED),
    "dynaserve-cut-none": _placed(_DYNASERVE, "no_split", ignore_ttft=True),
    **{f"dynaserve-K{k}": _placed(_DYNASERVE, probes=k) for k in (1, 2, 4, 10)},
    **{f"dynaserve-margin{m}": _placed(_DYNASERVE, margin_tokens=m) for m in (0, 100)},
    "dynaserve-elapsed": _variant(_DYNASERVE, segment_cost=Choice("elapsed")),
    "dynaserve-pairs-1": _placed(_DYNASERVE, pairs=1),
    "dynaserve-pairs-all": _placed(_DYNASERVE, pairs=56),
    "dynaserve-no-gain-rule": _placed(_DYNASERVE, gain=0.0),
    **{
        f"dynaserve-link{gb}": replace(_DYNASERVE, link_bytes_per_s=gb * GB)
        for gb in (1, 3, 10, 100)
    },
    **{
        f"dynaserve-sigma{tokens}": replace(
            _DYNASERVE, predictor=Choice("known", {"sigma_tokens": float(tokens)})
        )
        for tokens in (25, 50, 100, 200)
    },
    "dynaserve-class-mean": replace(_DYNASERVE, predictor=Choice("class_mean")),
    "dynaserve-longest": replace(_DYNASERVE, predictor=Choice("longest")),
    "stepserve": _AGE_BUDGET,
}
"""Name -> system. Pairs: 56 are all ordered ones of eight instances."""

SYSTEMS: Mapping[Family, Mapping[str, System]] = {
    Family.DIFFUSION: DIFFUSION,
    Family.AUTOREGRESSIVE: AUTOREGRESSIVE,
}

FRESH: Mapping[Family, System] = {
    Family.DIFFUSION: System(),
    Family.AUTOREGRESSIVE: System(predictor=Choice("known"), max_running_requests=256),
}
"""What a system without a base starts from."""


def candidates(family: Family, name: str, instances: int) -> tuple[str, ...]:
    """The systems that a name is to be chosen from on so many instances; none of most names."""
    if family is Family.AUTOREGRESSIVE and name == "colocated":
        return tuple(f"colocated-{chunk}" for chunk in CHUNKS)
    if family is Family.AUTOREGRESSIVE and name == "disaggregated":
        return tuple(f"disaggregated-{p}p{instances - p}d" for p in range(1, instances))
    return ()
