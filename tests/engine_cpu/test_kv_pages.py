"""Pages are counted exactly: free + used == capacity, and at the end nothing is left."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepserve.core.denoising import due_step
from stepserve.core.errors import CapacityError
from stepserve.core.ids import RequestId
from stepserve.core.request import CacheMode, Progress
from stepserve.core.step import Batch
from stepserve.engine.kv_pages import PagePool

PAGE, CAPACITY = 4, 30


def pool(tiny):
    options = {"device": torch.device("cpu"), "dtype": torch.float32}
    return PagePool(tiny().config, page_tokens=PAGE, capacity=CAPACITY, **options)


@pytest.mark.parametrize(("tokens", "pages"), [(1, 1), (4, 1), (5, 2), (120, 30)])
def test_a_reservation_is_rounded_up_to_pages(tiny, tokens, pages):
    kv = pool(tiny)
    taken = kv.allocate(tokens)
    assert (len(taken), kv.used, kv.free) == (pages, pages, CAPACITY - pages)
    slots = kv.slots(taken, tokens).tolist()
    assert len(set(slots)) == tokens
    assert {slot // PAGE for slot in slots} == set(taken)
    kv.release(taken)
    assert (kv.used, kv.free) == (0, CAPACITY)


def test_a_refused_reservation_takes_nothing(tiny):
    kv = pool(tiny)
    kept = kv.allocate(100)
    with pytest.raises(CapacityError, match="6 pages needed, 5 of 30 free"):
        kv.allocate(21)
    assert kv.free == 5
    assert not set(kept) & set(kv.allocate(20))
    assert kv.allocate(0) == []


actions = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            st.integers(1, 20),
            st.integers(1, 20),
            st.sampled_from([CacheMode.NONE, CacheMode.PREFIX, CacheMode.DUAL]),
        ),
        st.tuples(st.just("step"), st.floats(0.3, 0.9), st.integers(1, 7)),
        st.tuples(st.just("abort"), st.integers(0, 100)),
    ),
    max_size=40,
)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(actions=actions)
def test_random_lives_leave_the_pool_as_it_was(scripted, make, executor, actions):
    """Adds, steps, ends and aborts in any order."""
    loaded = scripted({k: (10, 0.2 + 0.04 * k) for k in range(20)} | {15: (2, 0.9)})
    engine = executor(loaded, page_tokens=PAGE, page_capacity=CAPACITY)
    held, settled, expected = {}, {}, {}
    for number, (what, *values) in enumerate(actions):
        if what == "add":
            prompt, output, cache = values
            request, payload = make(f"{number}", prompt=prompt, output=output, cache=cache)
            pages = -(-(prompt + -(-output // 8) * 8) // PAGE) if cache is not CacheMode.NONE else 0
            if pages > CAPACITY - sum(expected.values()):
                with pytest.raises(CapacityError):
                    engine.add(request, payload, Progress(), {})
                continue
            engine.add(request, payload, Progress(), {})
            held[request.id], settled[request.id], expected[request.id] = request, None, pages
        elif what == "step":
            threshold, every = values
            chosen = [name for i, name in enumerate(held) if i % every == 0]
            steps = tuple(
                due_step(held[name], settled[name] or 0, settled[name] is not None, threshold)
                for name in chosen
            )
            for outcome in engine.run(Batch(number, steps)).outcomes:
                name = outcome.request_id
                assert outcome.error is None
                assert outcome.settled >= 1
                settled[name] = (settled[name] or 0) + outcome.settled
                assert 0 <= outcome.emitted <= settled[name] <= held[name].max_output_tokens
                if outcome.finished is not None:
                    engine.remove(name)
                    del held[name], expected[name]
        elif held:
            name = list(held)[values[0] % len(held)]
            engine.remove(name)
            del held[name], expected[name]
        assert engine.used_pages == sum(expected.values())
    for name in held:
        engine.remove(RequestId(name))
    assert engine.used_pages == 0
