import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepserve.core.request import Progress
from stepserve.core.step import StepKind
from stepserve.families.programs.autoregressive import AutoregressiveProgram
from stepserve.policies.batching.age_budget import AgeBudget
from stepserve.policies.batching.chunked_prefill import OVERDUE
from stepserve.policies.batching.static_chunk import StaticChunk
from stepserve.policies.batching.tbt_budget import TbtBudget
from support.ar_requests import ar_request, ar_running
from support.parts import make_control, make_policy
from support.toy_world import make_spec

PROGRAM = AutoregressiveProgram(2048)
SPEC = make_spec()  # pages of 16 tokens
NOW_S = 100.0


class MixCost:
    """10 ms, 0.1 ms per prefill token, 1 us per 100 pairs, 0.1 ms per decode: counts the asks."""

    def __init__(self):
        self.asks = 0

    def step_time_s(self, tokens, rows, spec, mix=None):
        self.asks += 1
        assert mix is not None
        assert tokens == mix.prefill_tokens + mix.decodes
        assert rows >= mix.decodes
        return self.seconds(mix)

    def seconds(self, mix):
        prefill_s = mix.prefill_tokens * 1e-4 + mix.prefill_pairs * 1e-8
        return 0.010 + prefill_s + mix.decodes * 1e-4 + mix.decode_context * 1e-7

    def observe(self, tokens, rows, spec, seconds, mix=None):
        raise AssertionError("batching policies do not learn")


def budget(cost=None, cls=TbtBudget, **options):
    names = [name for name in ("tbt_s", "chunk_tokens") if name in options]
    shared = make_control(**{name: options.pop(name) for name in names})
    if cls is not StaticChunk:
        options = {"overhead_s": 0.0, "safety": 1.0} | options
    return make_policy(cls, cost or MixCost(), PROGRAM, shared, **options)


def candidate(name, *, prompt=1000, settled=0, emitted=0, age_s=0.0, skipped=0, **options):
    """A prefill, or a decode if tokens were ``emitted``; arrived at time 0 unless told."""
    request = ar_request(name, prompt=prompt, output=100, **options)
    settled = prompt + emitted - 1 if emitted else settled
    last = {"joined_s": NOW_S - age_s, "last_token_s": NOW_S - age_s}
    progress = Progress(settled, emitted)
    running = ar_running(PROGRAM, request, progress, skipped=skipped, **last)
    return running, PROGRAM.next_step(request, running.progress, True, 1.0)


def chunks(steps):
    return {s.request_id: s.query_tokens for s in steps if s.kind is StepKind.PREFILL}


def decodes(steps):
    return [s.request_id for s in steps if s.kind is StepKind.DECODE]


def compose(policy, *rows, now_s=NOW_S):
    return policy.compose(list(rows), SPEC, now_s)


def test_the_largest_chunk_of_whole_pages_that_ends_in_time():
    cost = MixCost()
    steps = compose(budget(cost), candidate("p", prompt=5000), candidate("d", emitted=3))
    assert decodes(steps) == ["d"]
    tokens = chunks(steps)["p"]
    assert tokens % 16 == 0
    assert cost.seconds(PROGRAM.mix(steps)) <= 0.1
    (longer,) = [PROGRAM.shorten(candidate("p", prompt=5000)[1], tokens + 16)]
    assert cost.seconds(PROGRAM.mix([steps[0], longer])) > 0.1
    assert cost.asks <= 12


def test_a_long_context_leaves_less_room_than_a_short_one():
    """Pairs of queries and keys take time, too."""
    early = candidate("p", prompt=60_000)
    late = candidate("p", prompt=60_000, settled=48_000)
    assert chunks(compose(budget(), late))["p"] < chunks(compose(budget(), early))["p"]


def test_prefills_follow_each_other_and_the_last_is_cut():
    rows = [candidate(n, prompt=300, arrival_s=float(i)) for i, n in enumerate("abcd")]
    steps = compose(budget(), *rows)
    assert chunks(steps) == {"a": 300, "b": 300, "c": 272}, "300 + 300 + 272 tokens: below 0.1 s"


def test_the_tightest_target_of_those_that_decode_bounds_the_batch():
    tight, loose = candidate("t", emitted=1, tbt_s=0.05), candidate("l", emitted=1, tbt_s=9.0)
    prefill = candidate("p", prompt=5000, tbt_s=0.02)
    assert chunks(compose(budget(), tight, loose, prefill))["p"] < 400
    assert chunks(compose(budget(), loose, prefill))["p"] == 2048, "chunk_tokens, at most"
    assert chunks(compose(budget(), prefill))["p"] < 100, "its own target when it is alone"


@pytest.mark.parametrize("cls", [TbtBudget, AgeBudget])
def test_a_target_tighter_than_all_can_bear_is_worked_for_no_further(cls):
    """It is still judged as asked: see ``SLO``."""
    asked = candidate("t", emitted=1, tbt_s=0.001, least_tbt_s=0.05)
    bearable, prefill = candidate("t", emitted=1, tbt_s=0.05), candidate("p", prompt=5000)
    steps = compose(budget(cls=cls), asked, prefill)
    assert chunks(steps) == chunks(compose(budget(cls=cls), bearable, prefill))
    assert chunks(steps)["p"] > 0


def test_with_age_only_what_is_left_of_the_gap_is_spent():
    late, prefill = candidate("d", emitted=1, age_s=0.04), candidate("p", prompt=5000)
    whole = chunks(compose(budget(), late, prefill))["p"]
    rest = chunks(compose(budget(cls=AgeBudget), late, prefill))["p"]
    assert whole - rest == pytest.approx(400, abs=32)


def test_a_token_that_is_late_already_does_not_stop_prefills():
    late, prefill = candidate("d", emitted=1, age_s=7.0), candidate("p", prompt=5000)
    assert chunks(compose(budget(cls=AgeBudget), late, prefill))["p"] == pytest.approx(390, abs=16)


def test_without_a_budget_chunks_are_as_long_as_configured():
    rows = [candidate(str(i), emitted=1) for i in range(50)] + [candidate("p", prompt=5000)]
    cost = MixCost()
    steps = compose(budget(cost, cls=StaticChunk, chunk_tokens=512), *rows)
    assert chunks(steps) == {"p": 512}
    assert len(decodes(steps)) == 50
    assert not cost.asks


def overload():
    """Decodes alone take 110 ms."""
    return [candidate(f"d{i}", emitted=1) for i in range(500)]


def test_prefills_starve_for_four_batches_and_no_longer():
    policy, rows = budget(), [*overload(), candidate("p")]
    sizes = []
    for i in range(10):
        steps = compose(policy, *rows, now_s=NOW_S + i * 1e-3)
        assert len(decodes(steps)) == 500, "decodes are never left out"
        sizes.append(chunks(steps).get("p", 0))
    assert sizes == [0, 0, 0, 0, 64, 0, 0, 0, 0, 64]


def test_prefills_starve_for_as_long_as_configured_and_no_longer():
    policy, rows = budget(starved_s=0.3, least_chunk_tokens=32), [*overload(), candidate("p")]
    sizes = [chunks(compose(policy, *rows, now_s=NOW_S + i * 0.2)).get("p", 0) for i in range(5)]
    assert sizes == [0, 0, 32, 0, 32]


def test_newcomers_do_not_defer_the_guard():
    policy = budget()
    for i in range(4):
        assert not chunks(compose(policy, *overload(), candidate("p", arrival_s=float(i))))
    assert chunks(compose(policy, *overload(), candidate("new", arrival_s=9.0)))


def test_chunks_end_at_pages_whatever_they_start_at():
    row = candidate("p", prompt=5000, settled=1003)
    assert (1003 + chunks(compose(budget(), row))["p"]) % 16 == 0
    row = candidate("p", prompt=1010, settled=1003)
    assert chunks(compose(budget(), row)) == {"p": 7}, "but for the end"


def first(policy, *rows):
    return next(iter(chunks(compose(policy, *rows))))


def test_orders_of_prefills():
    rows = [
        candidate("big", prompt=4000, arrival_s=1.0, weight=2.0, e2e_s=90.0),
        candidate("heavy", prompt=3000, arrival_s=2.0, weight=9.0),
        candidate("small", prompt=1500, arrival_s=3.0, weight=1.0),
        candidate("due", prompt=2000, arrival_s=4.0, weight=1.0, e2e_s=5.0),
    ]
    orders = ("fcfs", "priority", "shortest", "deadline")
    chosen = [first(budget(order=order), *rows) for order in orders]
    assert chosen == ["big", "heavy", "small", "due"]


def test_no_order_starves_a_prefill_for_ever():
    long = candidate("long", prompt=4000, skipped=OVERDUE * 4)
    assert first(budget(order="shortest"), candidate("short", prompt=1500), long) == "long"
    waits = candidate("long", prompt=4000, skipped=OVERDUE * 4 - 1)
    assert first(budget(order="shortest"), candidate("short", prompt=1500), waits) == "short"


def test_prefills_that_can_meet_a_ttft_target_go_first():
    old = candidate("old", arrival_s=0.0)
    missed = candidate("missed", arrival_s=90.0, ttft_s=1.0)
    soon = candidate("soon", arrival_s=99.5, ttft_s=1.0)
    later = candidate("later", arrival_s=99.0, ttft_s=9.0)
    steps = compose(budget(tbt_s=9.0, chunk_tokens=9999), later, missed, soon, old)
    assert list(chunks(steps)) == ["soon", "later", "old", "missed"]
    assert first(budget(ignore_ttft=True), later, missed, soon, old) == "old"


rows = st.builds(
    lambda prompt, at, **row: {"prompt": prompt, "settled": min(at, prompt - 1), **row},
    prompt=st.integers(1, 9000),
    at=st.integers(0, 9000),
    emitted=st.sampled_from((0, 0, 1, 40)),
    age_s=st.floats(0.0, 0.3),
    tbt_s=st.sampled_from((None, 0.02, 0.2, 2.0)),
)


@given(
    st.lists(rows, min_size=1, max_size=30),
    st.sampled_from((AgeBudget, TbtBudget)),
    st.sampled_from(("fcfs", "shortest", "deadline", "priority")),
)
def test_whatever_runs(drawn, kind, order):
    """A fresh policy: the guard has nothing to do but where a prefill waited for 0.4 s."""
    cost = MixCost()
    tried = budget(cost, kind, order=order)
    candidates = [candidate(str(i), **row) for i, row in enumerate(drawn)]
    steps = compose(tried, *candidates)
    due = {step.request_id: step for _, step in candidates}
    assert decodes(steps) == decodes(due.values()), "all of them, first"
    assert steps
    assert len({s.request_id for s in steps}) == len(steps)
    parts = 0
    for step in steps:
        whole = due[step.request_id]
        assert step.context_tokens - step.query_tokens == (
            whole.context_tokens - whole.query_tokens
        )
        if step != whole:
            parts += 1
            assert step.context_tokens % 16 == 0
    assert parts <= 1, "one prefill is cut, the others are whole or wait"
    assert cost.asks <= 12
    prefilled = sum(chunks(steps).values())
    assert prefilled <= 2048
    decoding = [(r, s) for r, s in candidates if s.kind is StepKind.DECODE]
    bound_by = decoding or candidates
    limits_s = [
        target
        - (min(NOW_S - r.last_token_s, 0.5 * target) if decoding and kind is AgeBudget else 0.0)
        for r, _ in bound_by
        for target in (r.request.slo.tbt_s or 0.1,)
    ]
    in_time = cost.seconds(PROGRAM.mix(steps)) <= min(limits_s) + 1e-12
    assert in_time or (prefilled == 0 if decoding else prefilled <= 64)
