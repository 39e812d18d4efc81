import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepserve.core.errors import FieldError
from stepserve.sim.quality import (
    STAGE_WEIGHTS,
    StageUse,
    accuracy_proxy,
    base_accuracy,
    loss,
)

GSM8K = ("llada-8b", "gsm8k")
thresholds = st.floats(0.3, 1.0)
thirds = st.tuples(thresholds, thresholds, thresholds)

MIXED = {0.9: 72.6, 0.7: 73.2, 0.5: 74.3, 0.4: 75.7, 0.2: 76.3, 0.1: 77.7}
"""Published accuracy when a share of the steps runs at 0.6 and the rest at 0.9 (DiLaServe B3)."""
STAGES = {"555": 65.0, "559": 73.0, "595": 69.5, "599": 80.5}
STAGES |= {"955": 66.5, "959": 71.5, "995": 69.0, "999": 79.0}
"""Published accuracy by the threshold of each third, 5 for 0.5 and 9 for 0.9 (DiLaServe D4)."""


def relative(threshold_of_third):
    proxy = accuracy_proxy(*GSM8K, [loss(t) for t in threshold_of_third])
    return proxy / base_accuracy(*GSM8K)


@given(thirds, st.integers(0, 2), st.floats(0.0, 0.5))
def test_a_higher_threshold_never_lowers_the_proxy(used, third, more):
    raised = [t + more if i == third else t for i, t in enumerate(used)]
    assert relative(raised) >= relative(used)


def test_fixed_thresholds_lose_what_was_published():
    for threshold, points in {0.9: 78.6, 0.8: 78.6, 0.7: 77.0, 0.6: 71.7, 0.5: 65.9}.items():
        assert relative([threshold] * 3) == pytest.approx(points / 78.6)


def test_mixing_loses_what_was_published():
    for share, points in MIXED.items():
        low, high = share * 6.37, (1 - share) * 3.26  # tokens per step: DiLaServe B3
        mean_loss = loss(0.6) * low / (low + high)
        proxy = accuracy_proxy(*GSM8K, [mean_loss] * 3) / base_accuracy(*GSM8K)
        assert 78.6 * proxy == pytest.approx(points, abs=1.1)


def test_stages_lose_what_was_published_within_its_error():
    for code, points in STAGES.items():
        assert 78.6 * relative([int(c) / 10 for c in code]) == pytest.approx(points, abs=3.0)


def test_the_first_third_is_free_and_the_last_dearest():
    assert STAGE_WEIGHTS[0] == 0.0 < STAGE_WEIGHTS[1] < STAGE_WEIGHTS[2]
    assert sum(STAGE_WEIGHTS) == pytest.approx(1.0)


@given(st.integers(1, 300), st.lists(st.tuples(st.integers(1, 9), thresholds), max_size=40))
def test_use_is_averaged_over_tokens(output, steps):
    use, before = StageUse(output), 0
    settled = []
    for tokens, threshold in steps:
        tokens = min(tokens, output - before)
        if tokens:
            use.settle(before, tokens, threshold)
            settled += [(3 * before // output, threshold)] * tokens
            before += tokens
    expected = sum(t for _, t in settled) / len(settled) if settled else 0.9
    assert use.mean_threshold == pytest.approx(expected)
    for third, found in enumerate(use.losses):
        own = [loss(t) for at, t in settled if at == third]
        assert found == pytest.approx(sum(own) / len(own) if own else 0.0)


def test_points_lost_elsewhere_are_taken_off():
    full = accuracy_proxy(*GSM8K, (0.0, 0.0, 0.0))
    assert accuracy_proxy(*GSM8K, (0.0, 0.0, 0.0), points_lost=1.5) == pytest.approx(full - 0.015)
    assert accuracy_proxy("dream-7b", "mbpp", (0.0,) * 3) == base_accuracy("dream-7b", "mbpp")
    assert accuracy_proxy(*GSM8K, (1.0,) * 3, points_lost=5.0) == 0.0


def test_unknown_names_are_refused():
    for names, field in [(("gpt", "gsm8k"), "model"), (("llada-8b", "sharegpt"), "dataset")]:
        with pytest.raises(FieldError) as error:
            base_accuracy(*names)
        assert error.value.field == field
    with pytest.raises(FieldError):
        accuracy_proxy(*GSM8K, (0.0, 0.0))
