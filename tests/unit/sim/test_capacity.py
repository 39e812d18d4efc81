"""The capacity search on servers whose capacity is known in closed form."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepserve.sim.capacity import capacity

BASE_S, LIMIT_S = 0.04, 0.1


def holds_below(service_per_s: float):
    """As one queue: the time between tokens grows with 1 / (1 - load). Holds up to 0.6 of it."""

    def holds(rate_per_s: float) -> bool:
        load = rate_per_s / service_per_s
        return load < 1.0 and BASE_S / (1.0 - load) <= LIMIT_S

    return holds


@pytest.mark.parametrize("service_per_s", [1.0, 7.3, 12.0, 80.0])
@pytest.mark.parametrize("first_share", [0.05, 0.5, 0.62, 3.0])
def test_finds_the_knee_to_its_resolution(service_per_s: float, first_share: float) -> None:
    found = capacity(holds_below(service_per_s), first_share * service_per_s)
    true_per_s = 0.6 * service_per_s
    assert found.per_s <= true_per_s < found.per_s + max(0.1, 0.02 * found.per_s) + 1e-9


@given(st.floats(0.2, 200.0), st.floats(0.1, 500.0), st.sampled_from([1.05, 1.3, 2.0]))
def test_the_answer_held_and_the_next_rate_tried_did_not(
    service_per_s: float, first_per_s: float, growth: float
) -> None:
    found = capacity(holds_below(service_per_s), first_per_s, growth=growth)
    held = [rate for rate, ok in found.probes if ok]
    failed = [rate for rate, ok in found.probes if not ok]
    assert found.per_s == max(held, default=0.0)
    assert found.per_s < min(failed)
    assert len({rate for rate, _ in found.probes}) == len(found.probes)  # none tried twice


def test_a_good_first_guess_costs_few_probes() -> None:
    guessed = capacity(holds_below(10.0), 6.05, growth=1.05)
    assert len(guessed.probes) <= 4
    assert guessed.per_s == pytest.approx(6.0, abs=0.15)


def test_a_server_that_never_holds_has_none() -> None:
    found = capacity(lambda _: False, 5.0)
    assert found.per_s == 0.0
    assert found.probes[-1] == (0.1, False)
    assert len(found.probes) <= 8


def test_a_coarser_search_asks_less_often() -> None:
    fine = capacity(holds_below(50.0), 10.0)
    coarse = capacity(holds_below(50.0), 10.0, step_per_s=0.1, share=0.1)
    assert len(coarse.probes) < len(fine.probes)
    assert math.isclose(coarse.per_s, 30.0, rel_tol=0.1)
