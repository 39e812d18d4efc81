"""Where an output ends, and why: decided in token order, whatever one step committed."""

import pytest

from stepserve.core.request import CacheMode, FinishReason
from stepserve.engine.diffusion_offline import denoise

EOS, STOP = 2, 30

MODES = (CacheMode.NONE, CacheMode.PREFIX, CacheMode.DUAL)  # of models that are not block-causal


@pytest.mark.parametrize("in_order", [True, False], ids=["one step", "end token first"])
def test_earliest_event_wins_for_all_offsets_of_stop_and_cap(scripted, make, executor, in_order):
    """A block holds EOS at offset k and the cap at offset j."""
    for k in range(10):
        loaded = scripted({k: (EOS, 0.99)}, default=(10, 0.95 if in_order else 0.6))
        engine = executor(loaded)
        for j in range(1, 10):
            rows = [make(f"{cache}", output=j, block=8, cache=cache, seed=3) for cache in MODES]
            for result in denoise(engine, rows, 0.9).values():
                ended = k < j
                assert result.finished is (FinishReason.STOP if ended else FinishReason.LENGTH)
                assert result.token_ids == ([10] * k + [EOS] if ended else [10] * j)
                if in_order:
                    assert result.steps == (1 if min(k, j - 1) < 8 else 2)


def test_nothing_behind_a_settled_end_is_worked_on(scripted, make, executor):
    """What stands behind is surer, and yet only what stands before counts."""
    behind = dict.fromkeys(range(5, 16), (11, 0.8))
    loaded = scripted({4: (EOS, 0.99)} | behind, default=(10, 0.5))
    result = denoise(executor(loaded), [make(output=16, block=16)], 0.9)["r"]
    assert (result.steps, result.forced, result.token_ids) == (5, 4, [10] * 4 + [EOS])


def test_the_earliest_of_several_ends_counts(scripted, make, executor):
    loaded = scripted({3: (EOS, 0.99), 6: (STOP, 0.99)})
    result = denoise(executor(loaded), [make(output=8, stop_token_ids=(STOP,))], 0.9)["r"]
    assert result.token_ids == [10] * 3 + [EOS]


@pytest.mark.parametrize("cap", [1, 7, 8, 9, 16, 19])
def test_ignore_eos_gives_exactly_the_limit(scripted, make, executor, cap):
    """Limits that are no multiple of the block are exact."""
    loaded = scripted(dict.fromkeys(range(0, 20, 3), (EOS, 0.9)))
    result = denoise(executor(loaded), [make(output=cap, ignore_eos=True)], 0.5)["r"]
    assert len(result.token_ids) == cap
    assert EOS not in result.token_ids
    assert result.finished is FinishReason.LENGTH


def test_min_tokens_holds_back_every_end_token(scripted, make, executor):
    loaded = scripted({1: (EOS, 0.9), 3: (STOP, 0.9), 5: (STOP, 0.9), 6: (EOS, 0.9)})
    row = make(output=16, min_tokens=5, stop_token_ids=(STOP,))
    result = denoise(executor(loaded), [row], 0.5)["r"]
    assert len(result.token_ids) == 6
    assert result.token_ids[-1] == STOP
    assert not {EOS, STOP} & set(result.token_ids[:5])


def test_stop_token_ids_belong_to_their_row(scripted, make, executor):
    loaded = scripted({3: (STOP, 0.99)})
    rows = [make("a", output=8, stop_token_ids=(STOP,)), make("b", output=8)]
    results = denoise(executor(loaded), rows, 0.5)
    assert [len(results[name].token_ids) for name in "ab"] == [4, 8]
    assert results["a"].finished is FinishReason.STOP


def test_special_tokens_are_never_produced(tiny, make, executor):
    loaded = tiny(sharpness=0.1)
    row = make(output=64, block=16, temperature=50.0, ignore_eos=True)
    result = denoise(executor(loaded), [row], 0.01)["r"]
    assert len(result.token_ids) == 64
    assert not {0, 1, EOS} & set(result.token_ids)
