import itertools

from hypothesis import given
from hypothesis import strategies as st

from stepserve.core.instance import Work
from stepserve.core.request import Progress
from stepserve.core.step import Mix, Step, StepKind
from stepserve.families.programs.autoregressive import AutoregressiveProgram
from support.ar_requests import TokenRow, ar_request, forecast_of

PROGRAM = AutoregressiveProgram(chunk_tokens=64)


class Run:
    """A request over segments with these stops, chunks of the sizes drawn; what each did."""

    def __init__(self, prompt, output, stops, chunk=lambda step: step.query_tokens):
        self.request = ar_request(prompt=prompt, output=output)
        self.progress = PROGRAM.start(self.request)
        self.inputs, self.tokens = [], []  # executed, emitted: all segments together
        self.parts = [self.segment(stop, chunk) for stop in stops]

    def segment(self, stop, chunk):
        """(prefilled inputs, decode steps, tokens emitted) of one segment."""
        row = TokenRow(self.request, held=self.progress.settled, emitted=self.progress.emitted)
        prefilled = decodes = 0
        first = self.progress.emitted
        while not self.progress.finished and (stop is None or self.progress.settled < stop):
            step = PROGRAM.next_step(self.request, self.progress, row.held > 0, 1.0)
            if step.kind.heavy:
                most = step.query_tokens if stop is None else stop - self.progress.settled
                step = PROGRAM.shorten(step, min(most, chunk(step)))
                prefilled += step.query_tokens
            else:
                decodes += 1
            self.inputs += range(step.context_tokens - step.query_tokens, step.context_tokens)
            outcome = row.run(step)
            self.tokens += range(self.progress.emitted, outcome.emitted)
            self.progress = PROGRAM.advance(self.request, self.progress, outcome)
        return prefilled, decodes, self.progress.emitted - first

    def check(self):
        """Every input of the axis but the last token executed once, every token emitted once."""
        prompt, output = self.request.prompt_tokens, self.request.max_output_tokens
        assert self.inputs == list(range(prompt + output - 1))
        assert self.tokens == list(range(output))
        assert self.progress.finished


def table_3_1(prompt, output, cut):
    """What DynaServe 3.1 says of the two segments."""
    executed = prompt + output - 1
    if cut == 0:
        return [(0, 0, 0), (prompt, output - 1, output)]
    if cut >= executed:
        return [(prompt, output - 1, output), (0, 0, 0)]
    if cut < prompt:
        return [(cut, 0, 0), (prompt - cut, output - 1, output)]
    if cut == prompt:
        return [(prompt, 0, 1), (0, output - 1, output - 1)]
    return [
        (prompt, cut - prompt, cut - prompt + 1),
        (0, executed - cut, executed - cut),
    ]


LENGTHS = [
    (p, d, s) for p, d in itertools.product(range(1, 7), range(1, 7)) for s in range(p + d + 2)
]


def test_two_segments_do_what_table_3_1_says():
    for prompt, output, cut in LENGTHS:
        run = Run(prompt, output, (cut, None))
        assert run.parts == table_3_1(prompt, output, cut), (prompt, output, cut)
        run.check()


def test_foreseen_work_is_what_the_segments_do():
    """The second segment's is asked for before the first has run."""
    for prompt, output, cut in LENGTHS:
        request, forecast = ar_request(prompt=prompt, output=output), forecast_of(output)
        start = PROGRAM.start(request)
        first = PROGRAM.work(request, start, forecast, cut)
        second = PROGRAM.work(request, start._replace(settled=cut), forecast, None)
        (prefilled, decodes, _), (later, more, _) = table_3_1(prompt, output, cut)
        assert first == Work(prefilled, 0, decodes), (prompt, output, cut)
        assert second == Work(later, cut, more), (prompt, output, cut)


@given(
    st.integers(1, 40),
    st.integers(1, 30),
    st.lists(st.integers(0, 75), max_size=3),
    st.data(),
)
def test_any_segments_and_chunks_tile_the_axis(prompt, output, cuts, data):
    def chunk(step):
        return data.draw(st.integers(1, step.query_tokens))

    Run(prompt, output, (*sorted(cuts), None), chunk).check()


@given(st.integers(1, 20), st.integers(2, 20), st.integers(0, 38), st.integers(0, 40))
def test_after_a_loss_the_known_tokens_are_prefilled_and_no_token_comes_twice(
    prompt, output, lost_at, landed
):
    run = Run(prompt, output, (min(lost_at, prompt + output - 2),))
    reached = run.progress
    run.progress = resumed = PROGRAM.resume(run.request, reached)
    assert resumed == reached._replace(settled=0)
    run.progress = resumed._replace(settled=min(landed, reached.settled))
    work = PROGRAM.work(run.request, run.progress, forecast_of(output), None)
    prefilled, decodes, _ = run.segment(None, lambda step: step.query_tokens)
    assert (work.prefill_tokens, work.decode_tokens) == (prefilled, decodes)
    assert run.tokens == list(range(output))


def test_an_output_longer_than_foreseen_is_expected_to_go_on():
    request = ar_request(prompt=10, output=4000)

    def decodes(emitted):
        progress = Progress(settled=9 + emitted, emitted=emitted)
        return PROGRAM.work(request, progress, forecast_of(100), None).decode_tokens

    assert [decodes(n) for n in (1, 99, 100, 1000)] == [99, 1, 32, 100]
    assert decodes(3999) == 1, "but not beyond its limit"


def test_only_a_prefill_is_shortened_and_never_to_nothing():
    step = Step("r", StepKind.PREFILL, 10, 30)
    assert PROGRAM.shorten(step, 4) == Step("r", StepKind.PREFILL, 4, 24)
    assert PROGRAM.shorten(step, 99) == step
    assert PROGRAM.shorten(step, 0) is None
    assert PROGRAM.shorten(Step("r", StepKind.DECODE, 1, 30), 1) is None


steps = st.builds(
    lambda decode, query, before: (
        Step("r", StepKind.DECODE, 1, before + 1)
        if decode
        else Step("r", StepKind.PREFILL, query, before + query)
    ),
    st.booleans(),
    st.integers(1, 500),
    st.integers(0, 500),
)


@given(st.lists(steps))
def test_a_mix_is_the_sum_of_its_steps(batch):
    parts = [PROGRAM.mix([step]) for step in batch]
    assert PROGRAM.mix(batch) == Mix(*map(sum, zip(Mix(), *parts, strict=True)))


def test_heavy_steps_left_are_chunks_of_what_is_to_be_prefilled():
    request = ar_request(prompt=130, output=10)

    def left(settled, emitted):
        return PROGRAM.heavy_left(request, Progress(settled, emitted), 10.0)

    assert [left(0, 0), left(66, 0), left(130, 1), left(0, 5)] == [3, 1, 0, 3]
