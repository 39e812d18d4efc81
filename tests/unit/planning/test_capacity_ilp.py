"""Stage 1 against an oracle that tries every layout and every choice of batch sizes."""

import itertools
from collections import Counter

import pytest

from stepserve.core.request import CacheMode
from stepserve.planning.capacity_ilp import CapacityIlp, StepSplit
from stepserve.planning.highs_ilp import Model, value
from support.planning import H100, gsm8k, problem, sharegpt

PARTITIONS = ((4,), (2, 2), (2, 1, 1), (1, 1, 1, 1))
SIZES = (1536, 8192)


def layouts(nodes):
    """Counts of instances by degree; 4 nodes of 4 GPUs have 35 splits."""
    splits = list(itertools.combinations_with_replacement(PARTITIONS, nodes))
    assert nodes != 4 or len(splits) == 35
    return {tuple(sorted(Counter(g for p in split for g in p).items())) for split in splits}


class FixedLayout:
    """DiLaServe B8 with layout and batch sizes given: linear as it stands there."""

    def __init__(self, asked, layout, heavy_size, light_size, split):
        self.model = Model(0.0, 20.0)
        self.threshold, self.slack = {}, {}
        degrees, cached = dict(layout), asked.cache_mode is not CacheMode.NONE
        load = {g: {} for g in degrees}
        total = sum(c.rate_per_s for c in asked.classes)
        for c in asked.classes:
            share, blocks = c.rate_per_s / total, c.output_tokens // asked.block_tokens
            light_tokens = asked.block_tokens
            if asked.cache_mode is CacheMode.PREFIX:
                light_tokens = c.output_tokens / 2
            settled, latency = {}, {}
            for kind in ("heavy", "light") if cached else ("heavy",):
                steps = {}
                for threshold, tokens in zip(asked.thresholds, asked.tokens_per_step, strict=True):
                    column = self.model.column()
                    steps[column] = 1.0
                    settled[column] = tokens
                    self.threshold[column] = share * threshold * tokens / c.output_tokens
                counted = "heavy" if split is StepSplit.CORRECTED else "light"
                if cached and kind == counted:
                    self.model.row(steps, blocks, blocks)
                for g in degrees:
                    size = heavy_size[g] if kind == "heavy" else light_size[g]
                    tokens = c.full_tokens if kind == "heavy" else light_tokens
                    seconds = dict(asked.step_s[g])[size]
                    column = self.model.column()
                    steps[column] = -1.0
                    latency[column] = seconds
                    load[g][column] = c.rate_per_s * tokens * seconds / size
                    self.slack[column] = -share * seconds / c.slo_s
                self.model.row(steps, 0.0, 0.0)
            self.model.row(settled, c.output_tokens, c.output_tokens)
            self.model.row(latency, upper=c.slo_s)
        for g, count in degrees.items():
            self.model.row(load[g], upper=count)

    def best_threshold(self):
        values = self.model.maximise(self.threshold)
        return -1.0 if values is None else value(self.threshold, values)

    def best_slack(self, threshold):
        self.model.row(self.threshold, lower=threshold - 1e-6)
        return 1.0 + value(self.slack, self.model.maximise(self.slack))


def oracle(asked, sizes, split):
    """(threshold, slack, instances) of the best; ``None`` if nothing fits."""
    largest = max(c.full_tokens for c in asked.classes)
    heavy_sizes = [size for size in sizes if size >= largest]
    programs = []
    for layout in layouts(len(asked.gpus_per_node)):
        degrees = [g for g, _ in layout]
        for heavy in itertools.product(heavy_sizes, repeat=len(degrees)):
            lights = itertools.product(sizes, repeat=len(degrees))
            if asked.cache_mode is CacheMode.NONE:
                lights = [heavy]
            for light in lights:
                chosen = (dict(zip(degrees, some, strict=True)) for some in (heavy, light))
                program = FixedLayout(asked, layout, *chosen, split)
                programs.append((program.best_threshold(), layout, program))
    best = max(threshold for threshold, _, _ in programs)
    if best < 0.0:
        return None
    tied = [(p.best_slack(best), layout) for t, layout, p in programs if t >= best - 1e-6]
    slack = max(s for s, _ in tied)
    return best, slack, min(sum(dict(lay).values()) for s, lay in tied if s >= slack - 1e-6), tied


@pytest.mark.parametrize(
    ("classes", "cache", "split", "nodes", "sizes"),
    [
        # All 35 layouts, with light and heavy load, a tight SLO, and both readings of constraint 8.
        ((gsm8k(3.0),), CacheMode.DUAL, StepSplit.CORRECTED, 4, (160, 4096)),
        ((gsm8k(27.0, slo_s=6.0),), CacheMode.DUAL, StepSplit.CORRECTED, 4, SIZES),
        (sharegpt(2.0)[:2], CacheMode.DUAL, StepSplit.AS_PUBLISHED, 4, (1024, 4096)),
        (sharegpt(4.0), CacheMode.PREFIX, StepSplit.CORRECTED, 2, (512, 2048, 8192)),
        ((gsm8k(1.5, slo_s=3.0),), CacheMode.NONE, StepSplit.CORRECTED, 2, SIZES),
        ((gsm8k(40.0),), CacheMode.DUAL, StepSplit.CORRECTED, 2, SIZES),  # too much
    ],
)
def test_the_optimum_is_that_of_exhaustive_search(classes, cache, split, nodes, sizes):
    table = {g: tuple((n, s) for n, s in row if n in sizes) for g, row in H100.items()}
    asked = problem(*classes, nodes=(4,) * nodes, cache=cache, step_s=table)
    found = CapacityIlp(split, batch_tokens=sizes, gap=0.0).solve(asked)
    expected = oracle(asked, sizes, split)
    if expected is None:
        assert found is None
        return
    threshold, slack, fewest, tied = expected
    assert found.mean_threshold == pytest.approx(threshold, abs=1e-5)
    assert found.slack == pytest.approx(slack, abs=1e-4)
    assert found.instances.total() == fewest
    layout = tuple(sorted(found.instances.items()))
    assert any(lay == layout and s >= slack - 1e-4 for s, lay in tied)


def test_a_given_layout_is_used_at_its_best_and_never_beats_the_free_choice():
    asked = problem(*sharegpt(4.0, slo_s=4.0))
    free = CapacityIlp(gap=0.0).solve(asked)
    given = CapacityIlp(gap=0.0).solve(asked, {1: 16})
    assert given.instances == {1: 16}
    assert free.mean_threshold >= given.mean_threshold - 1e-5
    assert free.slack > given.slack


def test_latency_and_use_by_hand():
    """One class, one batch size, one threshold: nothing is left to choose."""
    asked = problem(
        (1280, 256, 10.0, 2.0),
        nodes=(1, 1),
        degrees=(1,),
        thresholds=(0.9,),
        yields=(4.0,),
        step_s={1: ((2048, 0.05),)},
    )
    found = CapacityIlp().solve(asked)
    assert found.latency_s == pytest.approx((64 * 0.05,))  # 8 heavy and 56 light steps
    assert found.slack == pytest.approx(1.0 - 0.32)
    work_s = 8 * 0.05 * 1536 / 2048 + 56 * 0.05 * 32 / 2048
    assert found.use == pytest.approx(2.0 * work_s / 2)


def test_an_slo_that_nothing_meets_is_infeasible_unless_lateness_is_allowed():
    asked = problem(gsm8k(1.0, slo_s=0.3))
    assert CapacityIlp().solve(asked) is None
    late = CapacityIlp(gap=0.0).solve(asked, late=True)
    assert late.slack < 0.0
    assert late.mean_threshold == pytest.approx(0.5, abs=1e-3)  # as fast as it can be
    assert 4 in late.instances
    assert CapacityIlp().solve(problem(gsm8k(100.0)), late=True) is None


def test_more_load_never_raises_the_threshold():
    found = [CapacityIlp(gap=0.0).solve(problem(gsm8k(rate))) for rate in (10, 28, 30, 31)]
    thresholds = [capacity.mean_threshold for capacity in found if capacity is not None]
    assert len(thresholds) >= 3
    assert all(a >= b - 1e-5 for a, b in itertools.pairwise(thresholds))
    assert thresholds[-1] < thresholds[0]


def test_an_output_below_a_block_is_planned_for():
    found = CapacityIlp().solve(problem((20, 5, 1.0, 1.0)))
    assert found.mean_threshold == pytest.approx(0.9, rel=0.011)
