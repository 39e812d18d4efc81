import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepserve.core.errors import FieldError
from stepserve.core.request import Family, FinishReason, Progress, Request
from stepserve.core.step import Step, StepKind, StepOutcome
from stepserve.cost.output_length import ClassMean, Hinted, MaxTokens
from support.parts import make_forecast


def make(prompt=100, limit=1000, hint=None, least=0):
    return Request(
        "r0",
        Family.AUTOREGRESSIVE,
        "toy",
        prompt,
        limit,
        0.0,
        expected_output_tokens=hint,
        min_output_tokens=least,
    )


def ask(predictor, request, emitted=0, steps=0):
    progress = Progress(request.prompt_tokens, emitted, steps)
    return predictor.remaining_steps(request, progress, (1.0,))


def tell(predictor, request, emitted, finished):
    step = Step(request.id, StepKind.DECODE, 1, request.prompt_tokens + emitted)
    before = Progress(request.prompt_tokens + emitted - 1, emitted - 1)
    outcome = StepOutcome(request.id, 1, emitted, finished)
    predictor.learn(request, before, outcome, step)


def test_the_limit_the_hint_or_the_mean():
    request = make(limit=300, hint=40)
    assert ask(make_forecast(MaxTokens), request) == ((1.0,), (300.0,), 300.0, 0)
    assert ask(make_forecast(Hinted), request) == ((1.0,), (40.0,), 40.0, 0)
    assert ask(make_forecast(Hinted, output_tokens=70.0), make()) == ((1.0,), (70.0,), 70.0, 0)


@pytest.mark.parametrize("forecast", [MaxTokens, ClassMean, Hinted])
def test_what_a_request_makes_certain_goes_before_hints_and_means(forecast):
    predictor = make_forecast(forecast)
    for hint in (None, 5, 9000):
        assert ask(predictor, make(limit=96, hint=hint, least=96)).output_tokens == 96.0
    assert ask(predictor, make(limit=96, hint=40, least=96), emitted=50).steps == (46.0,)
    assert ask(predictor, make(limit=1000, hint=5, least=600)).output_tokens >= 600.0
    assert ask(make_forecast(Hinted), make(hint=5, least=600), emitted=20).output_tokens == 600.0


def test_tokens_that_could_not_be_the_last_teach_nothing():
    """Every free token is the last with 1 %: the mean stays 100, whatever must come before."""
    predictor, rng = make_forecast(ClassMean, output_tokens=70.0), random.Random(4)
    for _ in range(300):
        tell(predictor, make(limit=96, least=96), 96, FinishReason.LENGTH)
    assert ask(predictor, make()).output_tokens == 70.0
    errors = []
    for turn in range(3000):
        least = rng.choice((0, 200))
        emitted = least + 1 + int(rng.expovariate(1 / 99.5))
        tell(predictor, make(limit=9000, least=least), emitted, FinishReason.STOP)
        if turn > 500:
            errors.append(ask(predictor, make()).output_tokens - 100.0)
    assert abs(sum(errors) / len(errors)) < 10.0


def test_what_is_emitted_is_no_longer_to_come():
    request = make(hint=40)
    assert ask(make_forecast(Hinted), request, emitted=15, steps=17) == ((1.0,), (25.0,), 40.0, 17)


def test_a_request_that_outlives_its_forecast_has_a_tenth_left_and_32_at_least():
    """DynaServe 3.6, over-run."""
    request = make(limit=2000, hint=40)
    assert ask(make_forecast(Hinted), request, emitted=40).steps == (32.0,)
    assert ask(make_forecast(Hinted), request, emitted=1000).output_tokens == 1100.0
    assert ask(make_forecast(Hinted), request, emitted=1995).output_tokens == 2000.0


def test_short_and_long_prompts_have_means_of_their_own():
    predictor, rng = make_forecast(ClassMean), random.Random(1)
    for _ in range(400):
        tell(predictor, make(prompt=100), rng.randrange(280, 321), FinishReason.STOP)
        tell(predictor, make(prompt=3000), rng.randrange(20, 41), FinishReason.STOP)
    assert ask(predictor, make(prompt=70)).output_tokens == pytest.approx(300, rel=0.05)
    assert ask(predictor, make(prompt=2500)).output_tokens == pytest.approx(30, rel=0.1)
    unseen = ask(predictor, make(prompt=20000)).output_tokens
    assert unseen == pytest.approx(165, rel=0.15)


def test_a_class_starts_from_all_the_others():
    predictor = make_forecast(ClassMean)
    for _ in range(300):
        tell(predictor, make(prompt=100), 50, FinishReason.STOP)
    tell(predictor, make(prompt=3000), 50, FinishReason.STOP)
    assert ask(predictor, make(prompt=3000)).output_tokens == pytest.approx(50, rel=0.05)


def test_ends_at_the_limit_are_lower_bounds_not_lengths():
    """Every token is the last with 1 %: the mean is 100, whatever the limit cuts off."""
    predictor, rng = make_forecast(ClassMean), random.Random(4)
    errors = []
    for turn in range(3000):
        natural = 1 + int(rng.expovariate(1 / 99.5))
        reason = FinishReason.STOP if natural <= 60 else FinishReason.LENGTH
        tell(predictor, make(limit=60), min(natural, 60), reason)
        if turn > 500:
            errors.append(ask(predictor, make(limit=1000)).output_tokens - 100.0)
    assert abs(sum(errors) / len(errors)) < 10.0


def test_where_all_end_at_their_limit_the_limit_is_expected():
    """So it is where a client ignores the end of text; after a few requests, not at once."""
    predictor = make_forecast(ClassMean, output_tokens=50.0)
    for _ in range(40):
        tell(predictor, make(limit=64), 64, FinishReason.LENGTH)
    for limit in (16, 64, 500):
        assert ask(predictor, make(limit=limit)).output_tokens == pytest.approx(limit)


def test_cancelled_failed_and_running_requests_teach_nothing():
    predictor = make_forecast(ClassMean, output_tokens=70.0)
    for reason in (None, FinishReason.CANCELLED, FinishReason.ERROR):
        tell(predictor, make(), 5, reason)
    assert ask(predictor, make()).output_tokens == 70.0


def test_requests_with_a_hint_teach_the_others():
    predictor = make_forecast(Hinted, output_tokens=70.0)
    for _ in range(200):
        tell(predictor, make(hint=10), 30, FinishReason.STOP)
    assert ask(predictor, make()).output_tokens == pytest.approx(30, rel=0.05)


def test_a_start_of_no_tokens_is_refused():
    with pytest.raises(FieldError, match="output_tokens"):
        make_forecast(ClassMean, output_tokens=0.5)


ends = st.lists(
    st.tuples(
        st.integers(1, 40000),
        st.integers(1, 5000),
        st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
    ),
    max_size=30,
)
hints = st.none() | st.integers(1, 9000)


@given(ends, st.integers(1, 40000), st.integers(1, 5000), hints, st.data())
def test_forecasts_lie_between_what_is_certain_and_the_limit(seen, prompt, limit, hint, data):
    predictor = make_forecast(Hinted)
    for length, emitted, reason in seen:
        tell(predictor, make(prompt=length, limit=5000), emitted, reason)
    emitted, least = data.draw(st.integers(0, limit - 1)), data.draw(st.integers(0, limit))
    for one in (predictor, make_forecast(MaxTokens)):
        forecast = ask(one, make(prompt, limit, hint, least), emitted, steps=7)
        assert max(1, emitted, least) <= forecast.output_tokens <= limit
        assert forecast.steps == (max(1.0, forecast.output_tokens - emitted),)
        assert forecast.at_steps == 7
