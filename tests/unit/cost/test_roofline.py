import dataclasses
import random

import pytest

from stepserve.core.errors import FieldError
from stepserve.core.step import Mix
from stepserve.cost.roofline import Roofline, roofline_on_a100

LINE = roofline_on_a100("qwen2.5-14b")


def prompt(tokens, context=0, decodes=0, each=1024):
    pairs = tokens * context + tokens * (tokens + 1) // 2
    return Mix(tokens, pairs, decodes, decodes * each)


@pytest.mark.parametrize(("decodes", "expected"), [(0, 528), (64, 464), (128, 384), (256, 256)])
def test_prefill_that_fits_100_ms_is_about_what_the_specification_says(decodes, expected):
    """DynaServe 2.3: first check of any implementation (its base time is not given)."""
    fits = [m for m in range(0, 2048, 16) if LINE.seconds(prompt(m, decodes=decodes)) <= 0.1]
    assert abs(fits[-1] - expected) <= 32


def test_a_prompt_of_2048_tokens_takes_about_0_37_s():
    assert LINE.seconds(prompt(2048)) == pytest.approx(0.37, rel=0.02)


def test_keys_and_values_per_token_are_the_published_ones():
    for model, kib in [("14b", 192), ("32b", 256), ("72b", 320)]:
        assert roofline_on_a100(f"qwen2.5-{model}").kv_bytes_per_token == kib * 1024
    with pytest.raises(FieldError, match=r"^model: .*qwen2\.5-14b"):
        roofline_on_a100("qwen2.5-7b")


def test_decodes_are_bound_by_memory_prompts_by_arithmetic_and_more_gpus_help_both():
    pair = roofline_on_a100("qwen2.5-14b", tp=2)
    for mix in (prompt(0, decodes=1), prompt(1024)):
        assert LINE.seconds(mix) - 0.005 == pytest.approx(2 * (pair.seconds(mix) - 0.005))
    faster = dataclasses.replace(LINE, flops_per_s=2 * LINE.flops_per_s)
    assert faster.seconds(prompt(0, decodes=1)) == LINE.seconds(prompt(0, decodes=1))
    assert faster.seconds(prompt(1024)) < 0.55 * LINE.seconds(prompt(1024))


def test_a_chunk_late_in_a_prompt_costs_its_attention_over_what_came_before():
    more_s = LINE.seconds(prompt(512, 8192)) - LINE.seconds(prompt(512))
    assert more_s == pytest.approx(512 * 8192 * LINE.pair_s)


def test_rates_and_base_are_fitted_from_measured_batches():
    truth = dataclasses.replace(LINE, flops_per_s=90e12, bytes_per_s=0.7e12, base_s=0.012)
    rng = random.Random(3)
    mixes = [prompt(rng.randrange(0, 2048), 0, rng.randrange(1, 64)) for _ in range(60)]
    steps = [(mix, truth.seconds(mix) * rng.gauss(1.0, 0.02)) for mix in mixes]
    fitted = LINE.fitted(steps)
    for mix in (prompt(0, decodes=8), prompt(1024, decodes=16), prompt(300, 2000)):
        assert fitted.seconds(mix) == pytest.approx(truth.seconds(mix), rel=0.03)
    assert fitted.parameters == LINE.parameters


def test_a_rate_that_no_batch_tells_of_stays():
    slower = dataclasses.replace(LINE, bytes_per_s=0.8e12)
    decodes = [prompt(0, decodes=n) for n in range(1, 20)]
    fitted = LINE.fitted([(mix, slower.seconds(mix)) for mix in decodes])
    assert fitted.bytes_per_s == pytest.approx(0.8e12, rel=0.01)
    assert fitted.flops_per_s == LINE.flops_per_s
    for steps in ([], [(prompt(10), 0.0)]):
        with pytest.raises(FieldError, match="steps"):
            LINE.fitted(steps)


def test_a_shape_of_nothing_is_refused_by_name():
    with pytest.raises(FieldError, match=r"roofline\.layers"):
        Roofline(1e9, 0, 1024, 1000, 2e9, 1e12, 1e11)
