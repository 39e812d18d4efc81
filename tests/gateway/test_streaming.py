"""Text of one choice: stop strings, bytes, limits, in any chunking."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.scripted import EOS, TOKENIZER, byte_ids, settled, stripping
from stepserve.core.request import FinishReason
from stepserve.gateway.streaming import ChoiceText, EndRules


def run(ids, chunks=None, tokenizer=TOKENIZER, **rules):
    """Feed ids cut into chunks of the given sizes; return the choice and its deltas."""
    rules = EndRules(**({"max_tokens": 10_000, "eos_token_ids": frozenset({EOS})} | rules))
    choice = ChoiceText(tokenizer.decoding(), rules)
    tokens, deltas, start = settled(ids), [], 0
    for size in chunks or [1] * len(ids):
        deltas.append(choice.feed(tokens[start : start + size]))
        start += size
    deltas.append(choice.feed(tokens[start:]))
    deltas.append(choice.end(FinishReason.STOP))
    return choice, deltas


def first_stop(text, stops):
    """The plain rule: the stop string that is complete first; the longest among equals."""
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return min(found) if found else None


STRIPPING = stripping()
texts = st.text(alphabet="ab☃🙂 ", max_size=20)
stop_lists = st.lists(st.text(alphabet="ab☃ ", min_size=1, max_size=4), max_size=4)
chunkings = st.lists(st.integers(0, 7), max_size=30)


@given(texts, stop_lists, chunkings, st.booleans(), st.booleans())
def test_stops_do_not_depend_on_chunks_or_tokens(text, stops, chunks, include, by_byte):
    """Faults 34, 37, 38, 40."""
    ids = byte_ids(text) if by_byte else list(TOKENIZER.encode(text))
    choice, deltas = run(ids, chunks, stops=tuple(stops), include_stop=include)
    found = first_stop(text, stops)
    expected = text if found is None else text[: found[0 if include else 1]]
    assert "".join(delta.text for delta in deltas) == choice.text == expected
    assert choice.stop_reason == (None if found is None else text[found[1] : found[0]])
    assert choice.finish is FinishReason.STOP


@given(texts, stop_lists, chunkings)
def test_a_leading_space_is_left_out_before_stops_are_looked_for(text, stops, chunks):
    choice, _ = run(byte_ids(text), chunks, STRIPPING, stops=tuple(stops))
    shown, _ = run(byte_ids(text.removeprefix(" ")), stops=tuple(stops))
    assert (choice.text, choice.stop_reason) == (shown.text, shown.stop_reason)
    assert choice.left_out == text.startswith(" ")


@given(texts, stop_lists, chunkings)
def test_only_a_possible_stop_is_held_back(text, stops, chunks):
    """Fault 38: at any moment, what is not shown is a proper prefix of a stop string."""
    rules = EndRules(max_tokens=10_000, stops=tuple(stops))
    choice = ChoiceText(TOKENIZER.decoding(), rules)
    tokens, start = settled(byte_ids(text)), 0
    for size in chunks:
        choice.feed(tokens[start : start + size])
        start += size
        if choice.finish is not None:
            break
        complete = text.encode()[:start].decode(errors="ignore")
        held = complete.removeprefix(choice.text)
        assert complete.startswith(choice.text)
        assert not held or any(len(s) > len(held) and s.startswith(held) for s in stops)


@given(st.binary(max_size=12), chunkings)
def test_any_bytes_become_text(data, chunks):
    """Fault 40: invalid bytes, also at the end, are U+FFFD, never an error."""
    alphabet = {TOKENIZER.token_bytes(index): index for index in range(300)}
    ids = [alphabet[bytes([byte])] for byte in data]
    choice, deltas = run(ids, chunks)
    assert "".join(d.text for d in deltas) == choice.text == data.decode(errors="replace")
    assert choice.text == TOKENIZER.decode(ids)


@pytest.mark.parametrize("eos_at", range(8))
@pytest.mark.parametrize("limit", range(1, 9))
def test_earliest_end_in_token_order_wins(eos_at, limit):
    """Faults 1, 35: a block holds end-of-text and crosses the limit."""
    ids = byte_ids("abcdefgh")
    ids[eos_at] = EOS
    choice, _ = run(ids, chunks=[8], max_tokens=limit)
    stopped = eos_at < limit
    assert choice.finish is (FinishReason.STOP if stopped else FinishReason.LENGTH)
    assert choice.text == "abcdefgh"[: min(eos_at, limit)]
    assert len(choice.tokens) == (eos_at + 1 if stopped else limit)


def test_stop_string_before_end_of_text_and_limit():
    choice, deltas = run([*byte_ids("abSTOPcd"), EOS], chunks=[9], stops=("STOP",), max_tokens=6)
    assert choice.text == "ab"
    assert choice.stop_reason == "STOP"
    assert len(choice.tokens) == 6, "tokens after the stop string are not billed"
    assert sum(len(delta.tokens) for delta in deltas) == 6


def test_stop_token_id_is_text_only_if_asked():
    ids = byte_ids("abc")
    for include, text in ((False, "a"), (True, "ab")):
        choice, _ = run(ids, stop_token_ids=frozenset({ids[1]}), include_stop=include)
        assert (choice.text, choice.stop_reason) == (text, ids[1])
        assert len(choice.tokens) == 2


def test_ignore_eos_runs_to_the_limit():
    """Fault 78."""
    ids = [*byte_ids("ab"), EOS, *byte_ids("cdefg")]
    choice, _ = run(ids, max_tokens=5, ignore_eos=True)
    assert (choice.text, choice.finish) == ("abcd", FinishReason.LENGTH)
    assert len(choice.tokens) == 5


@pytest.mark.parametrize(("min_tokens", "text"), [(0, "a"), (1, "a"), (2, "aba"), (5, "ababa")])
def test_min_tokens_holds_for_stop_strings(min_tokens, text):
    """Fault 78: a stop string counts if its last token comes after ``min_tokens`` tokens."""
    choice, _ = run(byte_ids("ababa"), stops=("b",), min_tokens=min_tokens)
    assert choice.text == text


def test_leading_spaces_survive():
    """2F: deltas are never stripped."""
    choice, deltas = run(byte_ids("  a  b "))
    assert "".join(delta.text for delta in deltas) == choice.text == "  a  b "
