"""Where an autoregressive request is cut, and when it is not."""

from dataclasses import dataclass, field, fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepserve.core.config import ControlConfig
from stepserve.core.errors import FieldError
from stepserve.core.forecast import StepForecast
from stepserve.core.ids import RequestId
from stepserve.core.instance import ClusterView, InstanceLoad, Work
from stepserve.core.protocols import Parts
from stepserve.core.request import SLO, Family, Progress, Request
from stepserve.policies.placement.no_split import NoSplit
from stepserve.policies.placement.prompt_split import PromptSplit
from stepserve.policies.placement.split_search import snap
from stepserve.policies.placement.tandem_split import TandemSplit
from support.toy_world import make_spec

PAPER = TandemSplit.Options(ignore_ttft=True, gain=0.05, margin_tokens=0)


@dataclass
class Additive:
    """A segment's time is the sum of what its tokens cost, whatever runs beside it."""

    prefill_s: float = 1e-4
    decode_s: float = 1e-3  # of machine time
    batch_s: float = 0.0  # of a decode batch, whatever is in it
    row_s: float = 0.0  # and for each row
    byte_s: float = 0.0  # to copy one token
    asked: list = field(default_factory=list)

    def of(self, work):
        return work.prefill_tokens * self.prefill_s + work.decode_tokens * self.decode_s

    def seconds(self, held, added, spec):
        self.asked.append((spec.id, added))
        return sum(map(self.of, held)) + (self.of(added) if added else 0.0)

    def tbt_s(self, held, added, spec):
        rows = sum(work.decode_tokens > 0 for work in (*held, *([added] if added else [])))
        return rows and self.batch_s + rows * self.row_s

    def transfer_s(self, tokens):
        return tokens * self.byte_s


def prefill(seconds):
    """Work that keeps an instance busy so long, by ``Additive``."""
    return Work(round(seconds / 1e-4), 0, 0.0)


def view(*held, at_s=0.0):
    """One instance for each tuple of works: a, b, ..."""
    loads = {}
    for name, works in zip("abcdefghijklmnop", held, strict=False):
        spec = make_spec(name)
        loads[spec.id] = InstanceLoad(spec, len(works), 0, 200, 0.0, tuple(works))
    return ClusterView(at_s, loads)


def request(prompt=2048, limit=4096, arrival_s=0.0, **slo):
    family = Family.AUTOREGRESSIVE
    return Request(RequestId("r"), family, "m", prompt, limit, arrival_s, SLO(**slo))


def place(
    cost,
    cluster,
    prompt=2048,
    output=512,
    options=PAPER,
    emitted=0,
    cls=TandemSplit,
    push=8,
    **facts,
):
    forecast = StepForecast((1.0,), (float(output),), float(output))
    parts = Parts(None, None, ControlConfig(push_pages=push), segment_cost=cost)
    given = {f.name: getattr(options, f.name) for f in fields(cls.Options)}
    policy = cls(cls.Options(**given), parts)
    return policy.place(request(prompt, **facts), Progress(0, emitted), forecast, cluster)


def cut_of(placement):
    return placement.segments[0].stop


def instances(placement):
    return [segment.instance for segment in placement.segments]


@pytest.mark.parametrize(
    ("cut", "used"),
    [
        (0, 0), (63, 0), (64, 64), (200, 192), (983, 976), (984, 1000), (1000, 1000),
        (1016, 1000), (1017, 1017), (1335, 1335), (1336, 1400), (1400, 1400),
    ],
)  # fmt: skip
def test_cuts_are_whole_pages_of_the_prompt_and_never_degenerate(cut, used):
    assert snap(cut, known=1000, total=1400, page=16, least=64) == used


def test_a_short_output_may_be_cut_off_but_not_an_empty_one():
    assert snap(1500, known=1500, total=1513, page=16, least=64) == 1500
    assert snap(1500, known=1500, total=1501, page=16, least=64) == 1501
    assert snap(40, known=40, total=400, page=16, least=64) == 0
    assert snap(100, known=1000, total=1400, page=64, least=64) == 0  # two pages at least


def test_two_idle_instances_share_a_request_evenly():
    # 8192 * 0.1 ms + 31 * 1 ms = 850 ms: half of it is within the prompt.
    long_prompt = place(Additive(), view((), ()), prompt=8192, output=32)
    assert cut_of(long_prompt) == pytest.approx(4250, rel=0.05)
    assert cut_of(long_prompt) % 16 == 0
    assert max(long_prompt.predicted_s) == pytest.approx(0.425, rel=0.06)
    # 22 ms of prompt, 1,466 ms of output: half of it is within the output.
    long_output = place(Additive(), view((), ()), prompt=219, output=1467)
    assert cut_of(long_output) == pytest.approx(219 + 722, rel=0.05)


def test_the_prompts_end_is_the_first_cut_that_is_tried():
    cost = Additive()
    placement = place(cost, view((), ()), prompt=2000, output=201, options=PAPER)
    assert cut_of(placement) == 2000  # 200 ms each
    assert placement.predicted_s == pytest.approx((0.2, 0.2))
    assert "s=2000 of 2201" in placement.why
    assert "T1 0.200 s, T2 0.200 s, TBT" in placement.why
    assert "misses" not in placement.why


def test_the_less_busy_instance_takes_the_larger_part_in_either_order():
    cluster = view([prefill(0.3)], ())
    placement = place(Additive(), cluster, prompt=2000, output=201)
    assert max(placement.predicted_s) == pytest.approx(0.35, rel=0.05)  # (0.3 + 0.4) / 2
    share = {"a": 0.05, "b": 0.35}
    for segment, seconds in zip(placement.segments, placement.predicted_s, strict=True):
        own_s = seconds - (0.3 if segment.instance == "a" else 0.0)
        assert own_s == pytest.approx(share[segment.instance], abs=0.02)


def test_a_cut_that_gains_less_than_five_per_cent_is_not_made():
    # b is free 380 ms after the request of 400 ms would be done on a: at best 390 of 400 ms.
    cluster = view((), [prefill(0.38)])
    stays = place(Additive(), cluster, prompt=2000, output=201)
    assert instances(stays) == ["a"]
    assert cut_of(stays) is None
    assert stays.predicted_s == pytest.approx((0.4,))
    eager = place(Additive(), cluster, 2000, 201, replace(PAPER, gain=0.0, epsilon=0.01))
    assert sorted(instances(eager)) == ["a", "b"]
    assert max(eager.predicted_s) < 0.4


def test_what_instances_hold_does_not_hide_what_a_cut_gains():
    # 5 % of 60 s is far more than the request takes: that must not leave it whole, nor stop the
    # search at the first cut.
    busy = view([prefill(60.0)], [prefill(60.0)])
    placement = place(Additive(), busy, prompt=8192, output=32)
    idle = place(Additive(), view((), ()), prompt=8192, output=32)
    assert cut_of(placement) == cut_of(idle)
    assert cut_of(idle) is not None


def test_a_request_alone_stays_whole():
    placement = place(Additive(), view(()))
    assert [(s.start, s.stop, s.instance) for s in placement.segments] == [(0, None, "a")]
    assert placement.why.startswith("s=2560 of 2560, T1 0.716 s, TBT 0.000 s")


def test_a_request_of_one_token_has_nothing_to_hand_over():
    assert instances(place(Additive(), view((), ()), prompt=50, output=1, limit=1)) == ["a"]
    assert cut_of(place(Additive(), view((), ()), 2048, 1, cls=PromptSplit, limit=1)) is None
    assert cut_of(place(Additive(), view((), ()), 2048, 1, PAPER, limit=1)) == 1024


def test_the_cut_can_be_confined_to_the_prompts_end_or_forbidden():
    confined = place(Additive(), view((), ()), 8192, 2000, cls=PromptSplit)
    assert cut_of(confined) == 8192
    whole = place(Additive(), view((), ()), 8192, 2000, cls=NoSplit)
    assert cut_of(whole) is None


@pytest.mark.parametrize("probes", [1, 2, 4, 6])
def test_probes_and_pairs_bound_the_search(probes):
    cost = Additive()
    options = replace(PAPER, probes=probes, epsilon=0.0, pairs=4)
    place(cost, view(*[()] * 16), prompt=8192, output=97, options=options)
    assert {name for name, _ in cost.asked} == set("abcdefgh")
    # The whole request on each of eight; then two sides a probe.
    asked = [name for name, added in cost.asked if added is not None]
    assert len(asked[8:]) == 2 * 4 * probes
    assert set(asked[8:]) == {"a", "b", "c"}


def test_the_search_ends_where_both_sides_are_level():
    cost = Additive()
    options = replace(PAPER, pairs=1)
    place(cost, view((), ()), prompt=2000, output=201, options=options)
    assert len([added for _, added in cost.asked if added is not None]) == 2 + 2


def test_pairs_are_tried_by_drain_time():
    cluster = view([prefill(0.5)], [prefill(0.1)], [prefill(0.3)], ())
    placement = place(Additive(), cluster, options=replace(PAPER, pairs=2), prompt=9000)
    assert set(instances(placement)) == {"b", "d"}
    assert instances(place(Additive(), cluster, cls=NoSplit)) == ["d"]


def test_only_the_first_eight_of_the_view_are_looked_at():
    busy = [[prefill(1.0)]] * 8
    assert set(instances(place(Additive(), view(*busy, ())))) <= set("abcdefgh")


def test_a_batch_of_decodes_over_the_target_rules_an_instance_out():
    cost = Additive(row_s=0.03)
    decodes = [Work(0, 500, 10.0)] * 3  # 90 ms: no room for a fourth within 100 ms
    crowded = [prefill(0.35)]
    placement = place(cost, view(decodes, crowded), prompt=100, output=200)
    assert instances(placement) == ["b"]  # although a would be done sooner
    assert "misses" not in placement.why
    looser = place(cost, view(decodes, crowded), prompt=100, output=200, tbt_s=0.2)
    assert "a" in instances(looser)
    assert looser.tbt_s == pytest.approx(0.12)


def test_prompts_may_still_be_computed_where_no_decode_fits():
    cost = Additive(row_s=0.03)
    decodes = [Work(0, 500, 10.0)] * 3
    placement = place(cost, view(decodes, ()), prompt=8192, output=32)
    assert instances(placement) == ["a", "b"]
    assert cut_of(placement) <= 8192
    assert placement.tbt_s == pytest.approx(0.09)


def test_without_a_feasible_plan_the_least_bad_is_taken_and_said():
    cost = Additive(row_s=0.03)
    four, six = [Work(0, 500, 10.0)] * 4, [Work(0, 500, 1.0)] * 6
    placement = place(cost, view(six, four), prompt=100, output=200)
    assert instances(placement) == ["b"]
    assert placement.tbt_s == pytest.approx(0.15)
    assert placement.why.endswith("misses a target")


def test_a_long_gap_at_the_hand_over_rules_out_cuts_behind_the_prompt():
    # 219 tokens of prompt: only cuts behind it would level the two.
    slow = Additive(byte_s=0.01, batch_s=0.02)
    pushed = replace(PAPER, gain=0.0)
    assert cut_of(place(slow, view((), ()), 219, 1467, pushed, push=0)) is None
    # Pushed while it is decoded, 16 tokens are left for the end: within 200 ms, not 100.
    assert cut_of(place(slow, view((), ()), 219, 1467, pushed)) is None
    assert cut_of(place(slow, view((), ()), 219, 1467, pushed, tbt_s=0.2)) > 219


def test_the_transfer_counts_for_the_second_side():
    fast = place(Additive(), view((), ()), prompt=8192, output=32)
    slow = place(Additive(byte_s=2e-5), view((), ()), prompt=8192, output=32)
    slowest = place(Additive(byte_s=2e-5), view((), ()), 8192, 32, push=0)
    assert max(fast.predicted_s) < max(slow.predicted_s) < max(slowest.predicted_s)


def test_a_target_for_the_first_token_is_respected_unless_told_otherwise():
    # a: done sooner, but with 0.5 s of prefill before it; b: 0.6 s of decodes, no prefill.
    cluster = view([prefill(0.5)], [Work(0, 100, 600.0)], at_s=10.0)
    whole = TandemSplit.Options(margin_tokens=0)
    facts = {"prompt": 1000, "output": 100, "arrival_s": 9.8, "cls": NoSplit}
    assert instances(place(Additive(), cluster, options=whole, **facts)) == ["a"]
    timed = {**facts, "ttft_s": 0.4}  # waited 0.2 s, and 0.1 s of prefill
    placement = place(Additive(), cluster, options=whole, **timed)
    assert instances(placement) == ["b"]
    assert "misses" not in placement.why
    ignored = replace(whole, ignore_ttft=True)
    assert instances(place(Additive(), cluster, options=ignored, **timed)) == ["a"]
    # Beside decodes that take half of each batch a prefill takes twice as long.
    beside = place(Additive(batch_s=0.05), cluster, options=whole, **timed)
    assert beside.why.endswith("misses a target") or instances(beside) == ["b"]
    late = place(Additive(batch_s=0.07), cluster, options=whole, **timed)
    assert late.why.endswith("misses a target")
    # One that has emitted already has no first token to come.
    again = place(Additive(), cluster, options=whole, emitted=5, **timed)
    assert instances(again) == ["a"]


def test_a_cut_prompt_has_its_first_token_from_the_second_instance():
    # Level cut: 0.41 s on either side; the first token comes after both, 0.82 s.
    tokens = replace(PAPER, ignore_ttft=False)
    free = place(Additive(), view((), ()), 8192, 32, tokens)
    assert cut_of(free) < 8192
    timed = place(Additive(), view((), ()), 8192, 32, tokens, ttft_s=0.83)
    assert cut_of(timed) == cut_of(free)
    slow = place(Additive(byte_s=2e-5), view((), ()), 8192, 32, tokens, ttft_s=0.83)
    assert cut_of(slow) is None  # 41 ms of transfer would be too much


def test_the_rest_of_a_cut_prompt_waits_for_the_prefills_before_it():
    # b has 0.5 s of prefill, which beside its decode takes 1 s; a is idle, 0.82 s for the prompt.
    # A level cut has 0.66 s on a, then waits for b, then takes 0.32 s there.
    cluster = view((), [prefill(0.5), Work(0, 100, 1.0)])
    tokens = replace(PAPER, ignore_ttft=False)
    for ttft_s, names in ((None, ["a", "b"]), (1.4, ["a", "b"]), (1.1, ["a"])):
        facts = {"prompt": 8192, "output": 32, "ttft_s": ttft_s}
        placement = place(Additive(batch_s=0.05), cluster, options=tokens, **facts)
        assert instances(placement) == names
        assert "misses" not in placement.why


def test_a_target_that_is_lost_anyway_does_not_stop_the_cut():
    tokens = replace(PAPER, ignore_ttft=False)
    late = place(Additive(), view((), ()), 2000, 201, tokens, arrival_s=-5.0, ttft_s=1.0)
    assert late.why.endswith("misses a target")
    assert cut_of(late) == 2000  # no sooner and no later than uncut: 200 ms


@pytest.mark.parametrize("ttft_s", [0.0, -1.0])
def test_a_target_that_has_passed_is_no_absent_one(ttft_s):
    """The instance with the sooner first token, as for the most urgent one that can be met."""
    cluster = view([prefill(0.5)], [Work(0, 100, 600.0)])
    facts = {"prompt": 1000, "output": 100, "cls": NoSplit, "options": TandemSplit.Options()}
    assert instances(place(Additive(), cluster, **facts)) == ["a"]
    late = place(Additive(), cluster, ttft_s=ttft_s, **facts)
    assert instances(late) == ["b"]
    assert late.why.endswith("misses a target")


def test_a_target_missed_by_less_is_worth_a_cut_if_the_gain_is_enough():
    # Alone on a 0.80 s, beside a decode that takes half of the time; on b 0.76 s, after others.
    # The first half on a meanwhile, the other then on b: 0.6 s.
    cluster = view([Work(0, 100, 10.0)], [prefill(0.36)])
    tokens = replace(PAPER, ignore_ttft=False)
    facts = {"prompt": 4000, "output": 20, "ttft_s": 0.3}
    cut = place(Additive(batch_s=0.05), cluster, options=tokens, **facts)
    assert instances(cut) == ["a", "b"]
    assert cut.why.endswith("misses a target")
    choosy = replace(tokens, gain=0.5)
    assert cut_of(place(Additive(batch_s=0.05), cluster, options=choosy, **facts)) is None
    facts["ttft_s"] = 0.65  # met if it is cut
    kept = place(Additive(batch_s=0.05), cluster, options=choosy, **facts)
    assert instances(kept) == ["a", "b"]
    assert "misses" not in kept.why


def test_a_resumed_request_computes_again_what_it_emitted():
    cost = Additive()
    placement = place(cost, view((), ()), 1000, 201, PAPER, emitted=1000, limit=4096)
    # The output was longer than foreseen: one more token at least.
    assert "of 2001" in placement.why
    assert max(work.prefill_tokens for _, work in cost.asked if work) == 2000
    more = place(Additive(), view((), ()), 1000, 1501, PAPER, emitted=1000)
    assert cut_of(more) == pytest.approx(2000 + 150, rel=0.05)  # 200 ms and 500 ms


def test_the_margin_is_added_to_the_output_within_its_limit():
    with_margin = replace(PAPER, margin_tokens=20)
    assert "of 2348" in place(Additive(), view(()), 2048, 280, with_margin).why
    assert "of 2338" in place(Additive(), view(()), 2048, 280, with_margin, limit=290).why


def test_ties_go_to_the_first_instance_by_id():
    cluster = view(*[()] * 4)
    turned = ClusterView(0.0, dict(reversed(cluster.loads.items())))
    for cls in (TandemSplit, NoSplit):
        here, there = (place(Additive(), c, cls=cls) for c in (cluster, turned))
        assert instances(here) == instances(there) == ["a", "b"][: len(here.segments)]


works = st.builds(Work, st.integers(0, 4000), st.integers(0, 4000), st.floats(0, 2000))
costs = st.builds(
    Additive,
    prefill_s=st.floats(1e-6, 1e-3), decode_s=st.floats(1e-5, 1e-2), batch_s=st.floats(0, 0.05),
    row_s=st.floats(0, 0.02), byte_s=st.floats(0, 1e-4),
)  # fmt: skip
clusters = st.lists(st.lists(works, max_size=6), min_size=1, max_size=5)
tables = st.builds(
    TandemSplit.Options,
    ignore_ttft=st.booleans(), pairs=st.integers(1, 20),
    probes=st.integers(1, 10), gain=st.floats(0.0, 0.3), margin_tokens=st.integers(0, 100),
)  # fmt: skip
targets = st.none() | st.floats(0.1, 10.0)


@given(costs, clusters, tables, targets, st.integers(1, 9000), st.integers(1, 3000), st.data())
def test_segments_tile_the_request_and_a_cut_is_better_than_none(
    cost, held, options, ttft_s, prompt, output, data
):
    cluster = view(*held, at_s=1.0)
    emitted = data.draw(st.integers(0, output - 1))
    facts = {"emitted": emitted, "limit": output, "ttft_s": ttft_s}
    facts["push"] = data.draw(st.sampled_from([8, 0]))
    cls = data.draw(st.sampled_from([TandemSplit, PromptSplit, NoSplit]))
    placement = place(cost, cluster, prompt, output, options, cls=cls, **facts)
    bounds = [(s.index, s.start, s.stop) for s in placement.segments]
    cut = cut_of(placement)
    assert bounds == ([(0, 0, None)] if cut is None else [(0, 0, cut), (1, cut, None)])
    assert len(set(instances(placement))) == len(bounds) == len(placement.predicted_s)
    if cut is not None:
        assert 64 <= cut < prompt + output - 1
        assert cut % 16 == 0 or cut >= prompt + emitted
    solo = place(cost, cluster, prompt, output, options, cls=NoSplit, **facts)
    assert ("misses" in placement.why) <= ("misses" in solo.why)
    if cut is not None and "misses" not in solo.why:
        (alone_s,), where = solo.predicted_s, solo.segments[0].instance
        own_s = alone_s - sum(map(cost.of, cluster.loads[where].work))
        assert max(placement.predicted_s) < alone_s - options.gain * own_s


@given(costs, st.lists(works, max_size=4), st.lists(works, max_size=4))
def test_more_probes_level_the_two_sides(cost, a, b):
    cost = replace(cost, batch_s=0.0, row_s=0.0, byte_s=0.0)
    options = replace(PAPER, epsilon=0.0, gain=0.0)
    longest = [
        max(place(cost, view(a, b), 4096, 1000, replace(options, probes=k)).predicted_s)
        for k in (1, 3, 6, 10)
    ]
    assert longest == sorted(longest, reverse=True)
    total = sum(map(cost.of, [*a, *b, Work(4096, 0, 999.0)]))
    alone = min(sum(map(cost.of, side)) for side in (a, b))
    even = max(total / 2, total - alone - cost.of(Work(4096, 0, 999.0)))
    grain = 80 * max(cost.prefill_s, cost.decode_s)
    assert longest[-1] <= even + grain


def test_it_needs_a_segment_cost():
    with pytest.raises(FieldError, match=r"control\.placement: tandem_split needs"):
        TandemSplit(PAPER, Parts(None, None))
