"""The systems that experiments with autoregressive models compare, by name (DynaServe 3.10.4).

The baselines are those of the paper: ``colocated-N`` runs chunked prefill with a static chunk of
N beside all decodes, ``disaggregated-XpYd`` prefills on X instances and decodes on Y others.
``colocated`` and ``disaggregated`` are the best of theirs for each workload and model. Two of our
own isolate one part each: ``colocated-budget`` has the local scheduler of ``dynaserve`` alone,
``disaggregated-bypass`` computes short prompts where they are decoded.

``dynaserve`` is the published system as far as it is known, with our fill-ins where it is not
(docs/papers.md); the others of its name change one thing. ``stepserve`` is ours: the budget of a
batch is what is left since each request's last token, TTFT targets count, prefills go by deadline.
"""

from dataclasses import replace
from math import inf

from stepserve.core.config import Choice, ControlConfig

from .token_config import TokenSystem

CHUNKS = (256, 512, 1024, 2048)
"""Static chunks that the baseline is tuned over (DynaServe 1.7)."""

MOST_INSTANCES = 8
"""Up to which every ratio of prefill to decode instances has a name."""

SHORT_PROMPT_TOKENS = 512
"""Prefill backlog up to which ``disaggregated-bypass`` prefills where it decodes."""

GB = 1e9

_PLAIN = TokenSystem(
    ControlConfig(
        placement=Choice("least_loaded"),
        batching=Choice("static_chunk", {"ignore_ttft": True}),
        queue="fcfs",
        queue_limit=10**6,
        predict_every_tokens=8,
        report_every_s=0.05,
    )
)
"""Reports every 50 ms (DynaServe 3.4)."""


def _variant(system: TokenSystem, **control: object) -> TokenSystem:
    return replace(system, control=replace(system.control, **control))  # type: ignore[arg-type]


def _placed(system: TokenSystem, use: str = "", **options: object) -> TokenSystem:
    return _variant(system, placement=Choice(use, options).over(system.control.placement))


_PUBLISHED = {"gain": 0.05, "ignore_ttft": True}
_BUDGETED = _variant(_PLAIN, batching=Choice("tbt_budget", {"ignore_ttft": True}))
_DYNASERVE = _placed(_BUDGETED, "tandem_split", **_PUBLISHED)
_STATIC = _variant(
    _DYNASERVE, batching=_PLAIN.control.batching, segment_cost=Choice("occupancy", {"tbt_s": inf})
)
_STEPSERVE = _variant(
    _DYNASERVE,
    placement=Choice("tandem_split"),
    batching=Choice("age_budget", {"order": "deadline"}),
)

TOKEN_SYSTEMS: dict[str, TokenSystem] = {
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
    "dynaserve-cut-prompt": _placed(_DYNASERVE, "prompt_split", **_PUBLISHED),
    "dynaserve-cut-none": _placed(_DYNASERVE, "no_split", **_PUBLISHED),
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
        f"dynaserve-sigma{tokens}": replace(_DYNASERVE, sigma_tokens=float(tokens))
        for tokens in (25, 50, 100, 200)
    },
    "dynaserve-class-mean": replace(_DYNASERVE, predictor="class_mean"),
    "dynaserve-longest": replace(_DYNASERVE, predictor="longest"),
    "stepserve": _STEPSERVE,
}
"""Name -> system. Pairs: 56 are all ordered ones of eight instances."""


def candidates(name: str, instances: int) -> tuple[str, ...]:
    """The systems that a name is to be chosen from on so many instances; none of most names."""
    if name == "colocated":
        return tuple(f"colocated-{chunk}" for chunk in CHUNKS)
    if name == "disaggregated":
        return tuple(f"disaggregated-{p}p{instances - p}d" for p in range(1, instances))
    return ()
