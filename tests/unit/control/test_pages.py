import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepserve.control.pages import PageLedger, pages_for
from stepserve.core.errors import CapacityError
from stepserve.core.ids import RequestId


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30))))
def test_free_plus_held_is_capacity_whatever_happens(operations):
    """Counters went negative after unusual orders of commits and aborts."""
    ledger, held = PageLedger(50), {}
    for name, pages in operations:
        request_id = RequestId(f"r{name}")
        if request_id in held and pages % 2:
            more = pages - held[request_id]
            assert ledger.resize(request_id, pages) == (more <= 50 - sum(held.values()))
            held[request_id] = ledger._held[request_id]
        elif request_id in held:
            ledger.release(request_id)
            del held[request_id]
        else:
            try:
                ledger.reserve(request_id, pages)
                held[request_id] = pages
            except CapacityError:
                assert pages > 50 - sum(held.values())
        assert ledger.free == 50 - sum(held.values())
        assert len(ledger) == len(held)


def test_what_does_not_fit_stays_as_it_is():
    ledger = PageLedger(4)
    ledger.reserve(RequestId("a"), 1)
    ledger.reserve(RequestId("b"), 2)
    assert not ledger.resize(RequestId("a"), 3)
    assert ledger.free == 1
    assert ledger.resize(RequestId("a"), 2)
    assert ledger.free == 0


def test_a_request_reserves_once():
    ledger = PageLedger(4)
    ledger.reserve(RequestId("a"), 1)
    with pytest.raises(CapacityError, match="already holds"):
        ledger.reserve(RequestId("a"), 1)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_pages_for(tokens, pages):
    assert pages_for(tokens, 16) == pages
