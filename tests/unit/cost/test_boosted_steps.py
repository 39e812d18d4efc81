import dataclasses
import gc
import random

import lightgbm
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepserve.core.errors import FieldError
from stepserve.core.request import Confidence, FinishReason, Progress
from stepserve.core.step import StepOutcome
from stepserve.cost.boosted_fit import predictions, study, train, wmape, wmape_by_refresh
from stepserve.cost.boosted_steps import BoostedSteps, StepModel, Trees, new_row
from stepserve.cost.features import FEATURE_SETS, feature_matrix, training_rows
from stepserve.cost.step_log import read_step_logs
from support.parts import make_forecast
from support.step_logs import make_request, make_step, run_request, write_log

THRESHOLDS = (0.9, 0.8, 0.7, 0.6, 0.5)


def boosted(trees, healing_rate=0.0):
    return make_forecast(BoostedSteps, trees=trees, healing_rate=healing_rate)


def rows_of(folder, seed, requests, **how):
    return training_rows(read_step_logs([write_log(folder / "log", seed, requests, **how)]))


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """Rows to train on and rows of other lengths to test on; all run to their limit."""
    folder = tmp_path_factory.mktemp("logs")
    return rows_of(folder, 1, 60), rows_of(folder, 2, 20, limits=(96, 192))


@pytest.fixture(scope="module")
def model(full):
    return train(full[0])


@pytest.fixture(scope="module")
def early(tmp_path_factory):
    """Rows of requests that end by themselves."""
    return rows_of(tmp_path_factory.mktemp("early"), 3, 60, lengths=(10, 30, 60, 90))


def progress_of(rows, i, prompt=50):
    """The progress that a row is about."""
    confidence = Confidence(*rows.rows.confidence[i].tolist())
    return Progress(
        prompt + int(rows.rows.unmasked[i]), 0, int(rows.rows.steps[i]), None, confidence
    )


def test_forecasts_meet_the_papers_pattern_on_lengths_never_seen(full):
    best, result = study(*full, seed=0)
    assert best.features == "confidence"
    by_features, by_refresh = result.by_features, result.by_refresh
    assert by_features["length"] > 2 * by_features["progress"]
    assert by_features["progress"] > 1.1 * by_features["confidence"]
    assert by_refresh[8] <= 0.25  # DiLaServe C5
    assert by_refresh[None] >= 1.8 * by_refresh[8]
    assert by_refresh[1] == pytest.approx(by_features["confidence"])
    assert by_refresh[1] < by_refresh[32] < by_refresh[None]


def test_refreshing_late_is_as_good_as_counting_down(model, full):
    """By hand for the first request: predicted once, then one less per step, never below 0."""
    rows = full[1].part(full[1].rows.request == full[1].rows.request[0])
    first, truth = predictions(model, rows)[0], rows.remaining
    held = np.maximum(0.0, first - np.arange(len(truth)))
    expected = np.abs(held - truth).sum() / truth.sum()
    assert wmape_by_refresh(model, rows, (None,))[None] == pytest.approx(expected)


@pytest.mark.parametrize("features", FEATURE_SETS)
def test_rows_asked_one_by_one_get_the_librarys_answers(full, early, features):
    for rows in (full[0], early):
        model = train(rows, features)
        width = FEATURE_SETS[features]
        matrix = feature_matrix(rows.rows, rows.reach())[::50]
        for text in filter(None, (model.steps, model.output)):
            expected = lightgbm.Booster(model_str=text).predict(matrix[:, :width])
            shown = new_row()
            trees = Trees(text, width, shown)
            gc.collect()  # nothing the trees need may hang on an object of the library
            for row, answer in zip(matrix, expected, strict=True):
                shown[:] = row.tolist()
                assert trees.ask() == answer


def test_what_is_served_is_what_was_measured(model, full):
    rows = full[1]
    served, expected = (
        boosted(model),
        predictions(model, rows),
    )
    for i in range(0, len(expected), 17):
        request = make_request("r", int(rows.rows.limit_tokens[i]))
        threshold = float(rows.rows.threshold[i])
        forecast = served.remaining_steps(request, progress_of(rows, i), (threshold,))
        blocks = -(-rows.rows.limit_tokens[i] // 32) - rows.rows.unmasked[i] // 32
        assert forecast.steps[0] == pytest.approx(max(expected[i], blocks))
        assert forecast.output_tokens == request.max_output_tokens
        assert forecast.at_steps == rows.rows.steps[i]
        assert forecast.thresholds == (threshold,)


shares = st.lists(st.floats(0, 1), min_size=5, max_size=5).map(sorted)


@given(
    limit=st.integers(1, 600),
    block=st.integers(1, 64),
    done=st.floats(0, 1),
    steps=st.integers(0, 700),
    confidence=st.none() | shares,
    cap=st.none() | st.integers(1, 40),
    healing=st.sampled_from((0.0, 0.5)),
    natural=st.booleans(),
)
def test_forecasts_stay_within_what_is_possible(
    predictors, limit, block, done, steps, confidence, cap, healing, natural
):
    request = make_request("r", limit, block, max_steps_per_block=cap)
    unmasked = int(done * (limit - 1))
    summary = None if confidence is None else Confidence(*confidence)
    progress = Progress(50 + unmasked, 0, steps, None, summary)
    forecast = predictors[natural, healing].remaining_steps(request, progress, THRESHOLDS)
    assert unmasked + 1 <= forecast.output_tokens <= limit
    blocks_left = -(-int(-(-forecast.output_tokens // 1)) // block) - unmasked // block
    for value in forecast.steps:
        assert 1 <= value <= limit - unmasked
        if cap is None:
            assert value >= blocks_left
        else:
            assert value <= cap * (-(-limit // block))


@pytest.fixture(scope="module")
def predictors(model, early):
    made = {}
    for natural, trained in ((False, model), (True, train(early))):
        for healing in (0.0, 0.5):
            made[natural, healing] = make_forecast(
                BoostedSteps, trees=trained, healing_rate=healing
            )
    return made


def test_the_first_forecast_ignores_confidence_and_prompt(model):
    served = boosted(model)
    request = make_request("r", 128)
    first = served.remaining_steps(request, Progress(settled=50), THRESHOLDS)
    longer = dataclasses.replace(request, prompt_tokens=300)
    assert served.remaining_steps(longer, Progress(settled=300), THRESHOLDS) == first
    assert list(first.steps) == sorted(first.steps, reverse=True)
    assert served.remaining_steps(request, Progress(settled=50), (0.9,)).steps[0] == first.steps[0]


def test_output_length_is_foretold_where_requests_end_early(early):
    served = boosted(train(early))
    errors, plain, limits = [], [], early.rows.limit_tokens
    for i in range(0, len(limits), 5):
        request = make_request("r", int(limits[i]))
        forecast = served.remaining_steps(request, progress_of(early, i), (0.9, 0.5))
        errors.append(abs(forecast.output_tokens - early.output[i]))
        plain.append(abs(min(limits[i], early.natural_tokens) - early.output[i]))
    assert np.mean(errors) < 0.7 * np.mean(plain)


def test_a_clients_hint_sets_the_reach(early):
    served = boosted(train(early))
    told = make_request("r", 256, expected_output_tokens=200)
    untold = make_request("r", 256)
    steps = [served.remaining_steps(r, Progress(50), (0.9,)).steps[0] for r in (told, untold)]
    assert steps[0] > 2 * steps[1]


def test_what_a_request_makes_certain_bounds_the_reach_and_the_output(early):
    served, request = boosted(train(early)), make_request("r", 256)
    bound = dataclasses.replace(request, min_output_tokens=256)
    told = make_request("r", 256, expected_output_tokens=256)
    certain, hinted = (served.remaining_steps(r, Progress(50), (0.9,)) for r in (bound, told))
    assert certain.output_tokens == 256.0
    assert certain.steps[0] >= hinted.steps[0]


def errors_over(predictor, rng, requests, pace, teach):
    """Sum of errors over sum of true steps, for requests that take ``pace`` times as many."""
    error = truth = 0.0
    for index in range(requests):
        request, threshold = make_request(f"r{index}", 128), rng.choice(THRESHOLDS)
        steps = list(run_request(rng, request, threshold, pace=pace))
        for progress, outcome in steps:
            left = len(steps) - progress.steps
            forecast = predictor.remaining_steps(request, progress, (threshold,))
            error, truth = error + abs(forecast.steps[0] - left), truth + left
            if teach:
                predictor.learn(request, progress, outcome, make_step(request, threshold))
    return error / truth


def test_a_wrong_model_heals_if_asked_to(model):
    plain, healing = (
        boosted(model),
        boosted(model, 0.2),
    )
    for predictor in (plain, healing):
        errors_over(predictor, random.Random(5), 100, pace=2.0, teach=True)
    wrong = errors_over(plain, random.Random(6), 40, pace=2.0, teach=False)
    healed = errors_over(healing, random.Random(6), 40, pace=2.0, teach=False)
    never = errors_over(
        boosted(model),
        random.Random(6),
        40,
        pace=2.0,
        teach=False,
    )
    assert wrong == never
    assert healed < 0.7 * wrong


def test_a_right_model_is_not_spoiled_by_healing(model):
    healing = boosted(model, 0.05)
    errors_over(healing, random.Random(5), 100, pace=1.0, teach=True)
    before = errors_over(
        boosted(model),
        random.Random(6),
        40,
        pace=1.0,
        teach=False,
    )
    assert errors_over(healing, random.Random(6), 40, pace=1.0, teach=False) < 1.15 * before


@pytest.mark.parametrize(
    "last",
    [
        {"finished": FinishReason.ERROR, "error": "broken"},
        {"finished": FinishReason.STOP, "forced": 5},
        {"finished": FinishReason.CANCELLED},
    ],
)
def test_requests_that_say_nothing_about_the_model_teach_nothing(model, last):
    healing, request = (
        boosted(model, 0.5),
        make_request("r", 128),
    )
    expected = boosted(model).remaining_steps(request, Progress(50), THRESHOLDS)
    step = make_step(request, 0.9)
    for _ in range(20):
        healing.learn(request, Progress(50), StepOutcome(request.id, 9, 9), step)
        healing.learn(request, Progress(59, 9, 1), StepOutcome(request.id, 9, 9, **last), step)
    assert healing.remaining_steps(request, Progress(50), THRESHOLDS) == expected


def test_capped_requests_teach_nothing(model):
    healing, request = (
        boosted(model, 0.5),
        make_request("r", 128),
    )
    expected = boosted(model).remaining_steps(request, Progress(50), THRESHOLDS)
    capped, step = make_request("r", 128, max_steps_per_block=1), make_step(request, 0.9)
    ended = StepOutcome(request.id, 9, 9, FinishReason.STOP)
    healing.learn(capped, Progress(50), ended, step)
    assert healing.remaining_steps(request, Progress(50), THRESHOLDS) == expected
    healing.learn(request, Progress(50), ended, step)
    assert healing.remaining_steps(request, Progress(50), THRESHOLDS) != expected


def test_a_model_file_round_trips(model, early, tmp_path):
    for features in FEATURE_SETS:
        for rows in (model, early):
            saved = rows if rows is model else train(early, features)
            saved = dataclasses.replace(saved, wmape=0.2, source="a test")
            saved.save(tmp_path / "model.txt")
            assert StepModel.load(tmp_path / "model.txt") == saved


def test_a_model_file_that_cannot_be_used_is_refused(model, tmp_path):
    path = tmp_path / "model.txt"
    with pytest.raises(FieldError, match="cannot read"):
        StepModel.load(path)
    model.save(path)
    text = path.read_text()
    for broken in ("", "{}", "[1]\n", text[:-100], text.replace("step model 1", "step model 2")):
        path.write_text(broken)
        with pytest.raises(FieldError, match="is no step model"):
            StepModel.load(path)
    path.write_text(text.replace('"confidence"', '"progress"'))
    with pytest.raises(FieldError, match="11 features, not 6"):
        StepModel.load(path)
    path.write_text(text.replace("num_class", "nam_class"))
    with pytest.raises(FieldError, match="LightGBM refuses"):
        StepModel.load(path)


def test_training_is_repeatable(full):
    assert train(full[0], seed=1).steps == train(full[0], seed=1).steps
    assert wmape(train(full[0]), full[0]) < wmape(train(full[0], "progress"), full[0])
