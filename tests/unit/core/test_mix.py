from hypothesis import given
from hypothesis import strategies as st

from stepserve.core.step import Mix, Step, StepKind


def mix(*steps):
    return Mix.of([Step("r", kind, query, context) for kind, query, context in steps])


def test_a_chunk_counts_each_pair_of_query_and_key_it_looks_at():
    assert mix((StepKind.PREFILL, 3, 3)) == Mix(3, 1 + 2 + 3)
    assert mix((StepKind.PREFILL, 2, 12)) == Mix(2, 11 + 12)
    assert mix((StepKind.DECODE, 1, 7), (StepKind.DECODE, 1, 9)) == Mix(0, 0, 2, 16)


@given(st.integers(1, 500), st.integers(1, 500))
def test_cutting_a_chunk_changes_no_pairs(first, second):
    whole = mix((StepKind.PREFILL, first + second, first + second))
    parts = mix((StepKind.PREFILL, first, first), (StepKind.PREFILL, second, first + second))
    assert whole == parts
