import dataclasses

import pytest

from stepserve.core.errors import FieldError
from stepserve.core.request import FinishReason, Progress
from stepserve.core.step import Step, StepKind, StepOutcome
from stepserve.cost.remaining_steps import MeanYield, Yields
from support.parts import make_forecast
from support.toy_world import YIELDS, make_request


def mean():
    return make_forecast(MeanYield, YIELDS)


def forecast(predictor, settled=0, steps=0, output=100, thresholds=(0.9, 0.8, 0.5)):
    request = make_request(prompt=20, output=output)
    progress = Progress(settled=20 + settled, steps=steps)
    return predictor.remaining_steps(request, progress, thresholds)


def test_tokens_left_over_tokens_per_step_with_interpolation():
    first = forecast(mean())  # 40 tokens expected; 2, 2.5 and 4 per step
    assert first.steps == pytest.approx((20.0, 16.0, 10.0))
    assert first.output_tokens == 40.0
    assert forecast(mean(), settled=20, steps=9).at_steps == 9
    assert forecast(mean(), output=10).steps == pytest.approx((5.0, 4.0, 2.5))


def test_a_request_that_outlives_the_mean_still_has_steps_left():
    late = forecast(mean(), settled=60)
    assert late.output_tokens == 80.0
    assert min(late.steps) >= 1.0


def test_what_a_request_makes_certain_goes_before_the_mean_and_the_hint():
    """40 tokens are the mean; at 0.9 a step settles 2."""
    for hint in (None, 5):
        options = dataclasses.replace(make_request().diffusion, expected_output_tokens=hint)
        request = dataclasses.replace(
            make_request(prompt=20, output=100), diffusion=options, min_output_tokens=100
        )
        whole = mean().remaining_steps(request, Progress(20), (0.9,))
        assert (whole.steps, whole.output_tokens) == ((50.0,), 100.0)
        late = mean().remaining_steps(request, Progress(80), (0.9,))
        assert (late.steps, late.output_tokens) == ((20.0,), 100.0)


def test_an_answer_that_could_not_be_shorter_teaches_no_length():
    predictor, request = mean(), make_request()
    step = Step(request.id, StepKind.CACHED, 16, 68, 0.9)
    bound = dataclasses.replace(request, min_output_tokens=70)
    for _ in range(500):
        outcome = StepOutcome(request.id, 2, 80, FinishReason.STOP)
        predictor.learn(bound, Progress(settled=20), outcome, step)
    assert forecast(predictor).output_tokens == 40.0


def test_both_means_are_learned():
    predictor = mean()
    request = make_request()
    step = Step(request.id, StepKind.CACHED, 16, 68, 0.9)
    for _ in range(500):
        outcome = StepOutcome(request.id, 8, 80, FinishReason.STOP)
        predictor.learn(request, Progress(settled=20), outcome, step)
    assert forecast(predictor).steps[0] == pytest.approx(80 / 8, rel=0.01)


def test_a_clients_own_caps_teach_nothing_but_bound_the_forecast():
    predictor = mean()
    request = make_request()
    step = Step(request.id, StepKind.CACHED, 16, 68, 0.9)
    for _ in range(500):
        capped = StepOutcome(request.id, 16, 16, FinishReason.STOP, forced=9)
        predictor.learn(request, Progress(settled=20), capped, step)
        short = StepOutcome(request.id, 2, 4, FinishReason.LENGTH)
        predictor.learn(request, Progress(settled=20), short, step)
    assert forecast(predictor) == forecast(mean())
    few = dataclasses.replace(request.diffusion, max_forwards=5, max_steps_per_block=2)
    bounded = dataclasses.replace(request, diffusion=few)
    steps = predictor.remaining_steps(bounded, Progress(settled=20), (0.9, 0.5)).steps
    assert steps == (5.0, 5.0)
    later = Progress(settled=20 + 20, steps=1)
    assert predictor.remaining_steps(bounded, later, (0.9, 0.5)).steps == (4.0, 4.0)


def test_yields_name_the_field_at_fault():
    with pytest.raises(FieldError, match="tokens_per_step"):
        Yields({}, 40.0, "bad")
    with pytest.raises(FieldError, match="output_tokens"):
        Yields({0.9: 1.0}, 0.0, "bad")
