"""Plan problems with the published step times: LLaDA-8B on H100, milliseconds (DiLaServe B2)."""

from stepserve.core.plan import PlanProblem, Slot, WorkloadClass
from stepserve.core.request import CacheMode

TOKENS = (32, 160, 256, 512, 1024, 1536, 2048, 3072, 4096, 5120, 6144, 7680, 8192)
H100_MS = {
    1: (12.2, 12.6, 13.2, 16.5, 29.0, 43.7, 58.3, 92.7, 125.9, 140.8, 183.8, 226.6, 250.7),
    2: (11.9, 12.2, 12.4, 16.3, 27.3, 38.6, 49.7, 74.6, 99.4, 124.1, 147.4, 181.5, 193.4),
    4: (12.6, 12.5, 12.6, 13.4, 19.0, 25.7, 31.2, 46.3, 60.5, 76.4, 89.8, 110.5, 117.8),
}
H100 = {
    degree: tuple((tokens, ms / 1e3) for tokens, ms in zip(TOKENS, row, strict=True))
    for degree, row in H100_MS.items()
}
THRESHOLDS = (0.9, 0.8, 0.7, 0.6, 0.5)
TOKENS_PER_STEP = (3.02, 3.89, 4.77, 5.65, 6.58)  # the published planner's, with dual cache


def all_tp1(nodes, gpus=4):
    return tuple(Slot(node, (gpu,)) for node in range(nodes) for gpu in range(gpus))


def problem(
    *classes,
    nodes=(4, 4, 4, 4),
    degrees=(1, 2, 4),
    cache=CacheMode.DUAL,
    thresholds=THRESHOLDS,
    yields=TOKENS_PER_STEP,
    step_s=None,
    present=(),
):
    """Classes are (prompt, output, SLO, rate)."""
    return PlanProblem(
        gpus_per_node=nodes,
        tp_degrees=degrees,
        classes=tuple(WorkloadClass(*values) for values in classes),
        thresholds=thresholds,
        tokens_per_step=yields,
        step_s=H100 if step_s is None else step_s,
        block_tokens=32,
        cache_mode=cache,
        present=present,
    )


def gsm8k(rate_per_s, slo_s=9.5, headroom=1.5):
    """5-shot GSM8K: one known request has 1,062 prompt tokens; output 256; SLO 5 x base."""
    return (1062, 256, slo_s, headroom * rate_per_s)


def sharegpt(rate_per_s, slo_s=12.5, headroom=1.5):
    """A stand-in for the published ShareGPT mix (its lengths were not published)."""
    parts = ((200, 256, 0.5), (300, 512, 0.3), (1200, 768, 0.2))
    return tuple((p, o, slo_s, share * headroom * rate_per_s) for p, o, share in parts)
