"""Text of every kind of tokenizer: as its own package decodes it, token by token or at once."""

import contextlib
import json
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from gateway.scripted import TOKENIZER, settled, stripping
from stepserve.core.errors import FieldError, StepserveError
from stepserve.core.request import FinishReason
from stepserve.engine.hub import BUNDLED
from stepserve.gateway.streaming import ChoiceText, EndRules
from stepserve.gateway.tokenizer import TextTokenizer

SENTENCES = ["hello world, we stop here", "ab ba  aba", "žluťoučký kůň", "don't stop!", "so."] * 2
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPECIALS = ["<unk>", "<s>", "</s>"]
WORDS = ["h", "e", "l", "o", "w", "a", "b", "▁", "▁a", "▁b", "lo", "▁he", "▁▁▁", "s", "t", "p"]


def llama():
    """As Llama 2's: a space is put before the text, spaces are ▁, the rest falls back on bytes."""
    vocabulary = {token: i for i, token in enumerate([*SPECIALS, *BYTES, *WORDS])}
    merges = [("▁", "a"), ("▁", "b"), ("l", "o")]
    model = models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    made = Tokenizer(model)
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return made


def gemma():
    """As Gemma's: nothing is put before the text, nothing is left out."""
    made = llama()
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return made


def unigram(scheme):
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    made.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=60, special_tokens=SPECIALS, unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator(SENTENCES, trainer)
    return made


def word_piece(cleanup):
    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(cleanup=cleanup)
    trainer = trainers.WordPieceTrainer(vocab_size=80, special_tokens=SPECIALS, show_progress=False)
    made.train_from_iterator(SENTENCES, trainer)
    return made


def words():
    made = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


KINDS = {
    "byte-level": Tokenizer.from_str(TOKENIZER._tokenizer.to_str()),
    "byte-level without the first space": stripping()._tokenizer,
    "llama": llama(),
    "gemma": gemma(),
    "unigram": unigram("always"),
    "unigram, plain": unigram("never"),
    "word pieces": word_piece(cleanup=True),
    "word pieces, as they are": word_piece(cleanup=False),
    "words": words(),
}
for kind in KINDS.values():
    if kind.token_to_id("<s>") is not None:
        kind.add_special_tokens(["<s>", "</s>"])
    kind.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
READ = {name: TextTokenizer(kind, {}) for name, kind in KINDS.items()}
kinds = pytest.mark.parametrize("name", KINDS)


def streamed(tokenizer, ids, chunks=(), **rules):
    """The choice after all tokens have come, in chunks of the given sizes, and its pieces."""
    choice = ChoiceText(tokenizer.decoding(), EndRules(max_tokens=10_000, **rules))
    tokens, shown, start = settled(ids), [], 0
    for size in (*chunks, *[1] * len(ids)):
        shown.append(choice.feed(tokens[start : start + size]).text)
        start += size
    shown.append(choice.end(FinishReason.STOP).text)
    assert "".join(shown) == choice.text
    return choice


def whole(text):
    """Whether a text shows no byte that is no character."""
    return "\N{REPLACEMENT CHARACTER}" not in text


@kinds
@given(data=st.data())
def test_a_stream_is_the_text_of_the_whole_answer(name, data):
    """In any chunks, for any tokens; and it is what the package itself says."""
    raw, tokenizer = KINDS[name], READ[name]
    ids = data.draw(st.lists(st.integers(0, raw.get_vocab_size()), max_size=12))
    chunks = data.draw(st.lists(st.integers(0, 4), max_size=8))
    choice = streamed(tokenizer, ids, chunks)
    assert choice.text == tokenizer.decode(ids)
    expected = raw.decode(ids, skip_special_tokens=True)
    if whole(choice.text):
        assert choice.text == expected
    else:
        assert not whole(expected)


TEXTS = ["hello", "hello world", "a b", "b", "", "stop. a, b!", "we don't", "aba ba"]
BYTE_KINDS = ["byte-level", "byte-level without the first space", "llama"]
EXACT = [name for name in KINDS if not name.startswith("word")]


@kinds
@pytest.mark.parametrize("text", TEXTS)
def test_what_is_encoded_is_decoded_as_the_package_does(name, text):
    raw, tokenizer = KINDS[name], READ[name]
    ids = tokenizer.encode(text)
    assert streamed(tokenizer, ids).text == raw.decode(list(ids))
    if name in EXACT:
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", ["byte-level", "llama", "gemma"])
@pytest.mark.parametrize("text", ["  two", "漢字 a", "🙂👍🏽", "é\n", " a  b "])
def test_any_text_makes_the_round_trip_where_bytes_are_tokens(name, text):
    tokenizer = READ[name]
    choice = streamed(tokenizer, tokenizer.encode(text))
    assert choice.text == text


def test_characters_of_several_tokens_are_shown_when_they_are_whole():
    tokenizer = READ["llama"]
    ids = tokenizer.encode("a漢b")
    assert len(ids) == 5, "a, three bytes, b"
    choice = ChoiceText(tokenizer.decoding(), EndRules(max_tokens=99))
    shown = [choice.feed(one).text for one in zip(settled(ids), strict=True)]
    assert shown == ["a", "", "", "漢", "b"]
    assert [*map(tokenizer.token_bytes, ids)] == [b" a", b"\xe6", b"\xbc", b"\xa2", b"b"]


@kinds
@given(data=st.data())
def test_stop_strings_end_the_text_before_them(name, data):
    tokenizer = READ[name]
    ids = data.draw(st.lists(st.integers(0, KINDS[name].get_vocab_size() - 1), max_size=12))
    full = tokenizer.decode(ids)
    stops = data.draw(st.lists(st.text("ab. ho", min_size=1, max_size=3), min_size=1, max_size=3))
    choice = streamed(tokenizer, ids, stops=tuple(stops))
    ends = [(full.find(s) + len(s), full.find(s)) for s in stops if s in full]
    assert choice.text == (full[: min(ends)[1]] if ends else full)


@kinds
def test_the_bytes_of_tokens_make_the_text(name):
    """Of log probabilities: but for a space at the beginning, which is told of by ``left_out``."""
    raw, tokenizer = KINDS[name], READ[name]
    for text in TEXTS:
        ids = tokenizer.encode(text)
        joined = b"".join(map(tokenizer.token_bytes, ids)).decode(errors="replace")
        choice = streamed(tokenizer, ids)
        assert joined[choice.left_out :] == choice.text
    assert tokenizer.token_bytes(raw.token_to_id("<tool>")).strip() == b"<tool>"


def test_an_answer_that_goes_on_keeps_its_first_space():
    tokenizer = READ["llama"]
    ids = tokenizer.encode("a b")
    for begins, text in ((True, "a b"), (False, " a b")):
        decoding = tokenizer.decoding(begins=begins)
        assert "".join(map(decoding.push, ids)) == text


@kinds
@given(text=st.text("hello wrdab▁ \n漢é", max_size=60))
def test_characters_bound_tokens_from_below(name, text):
    """So that what is too long is known before it is cut up; of some kinds nothing is."""
    tokenizer = READ[name]
    assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text))
    assert (tokenizer.least_tokens("hello " * 1000) > 500) is (name in (*BYTE_KINDS, "gemma"))


@pytest.mark.parametrize("text", [" 3, 5, 8.", " Ana and Mia."])
def test_replies_of_the_bundled_model_do_not_begin_with_a_space(text):
    """Its words are tokens with the space before them."""
    tokenizer = TextTokenizer.from_folder(BUNDLED)
    choice = streamed(tokenizer, tokenizer.encode(text))
    assert choice.text == tokenizer.decode(tokenizer.encode(text)) == text[1:]
    assert choice.left_out == 1


def test_special_tokens_are_no_text():
    tokenizer = READ["llama"]
    end = KINDS["llama"].token_to_id("</s>")
    assert tokenizer.decode([end, *tokenizer.encode("a"), end]) == "a"
    assert tokenizer.token_name(end) == "</s>"
    assert tokenizer.token_bytes(end) == b""


STRIP = decoders.Strip(" ", 0, 1)


@pytest.mark.parametrize(
    ("decoder", "said"),
    [
        (decoders.CTC(), "decoder CTC is not supported"),
        (decoders.BPEDecoder(), "decoder BPEDecoder is not supported"),
        (decoders.Replace(Regex("x+"), " "), "decoder Replace is supported with a plain string"),
        (decoders.Sequence([decoders.Fuse(), STRIP]), "at the beginning of a text alone"),
        (decoders.Sequence([decoders.Fuse(), decoders.WordPiece()]), "WordPiece after Fuse"),
        (decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]), "Replace after Fuse"),
    ],
)
def test_other_decoders_are_refused_by_name(decoder, said):
    """Fault 23: say so at start."""
    other = llama()
    other.decoder = decoder
    with pytest.raises(FieldError, match=re.escape(said)) as caught:
        TextTokenizer(other, {})
    assert caught.value.field == "tokenizer.json"


ODD = st.one_of(
    st.sampled_from([None, True, "", "x", "1", (), 0, -1, 1, 2**31, 10**40, 0.5, -0.5]),
    st.builds(list), st.builds(dict), st.builds(lambda: [None]), st.builds(lambda: {"a": None}),
)  # fmt: skip
PARTS = ["decoder", "normalizer", "pre_tokenizer", "added_tokens", "model"]


def places(node, path=()):
    """The path of every value below a part of a tokenizer."""
    yield path
    if isinstance(node, dict | list) and len(path) < 5:
        items = node.items() if isinstance(node, dict) else enumerate(node[:9])
        for key, value in items:
            yield from places(value, (*path, key))


@kinds
@given(data=st.data())
@settings(max_examples=40)
def test_whatever_its_file_says_a_tokenizer_works_or_is_refused(name, data):
    document = json.loads(KINDS[name].to_str())
    part = data.draw(st.sampled_from(PARTS))
    path = (part, *data.draw(st.sampled_from(list(places(document[part])))))
    node = document
    for key in path[:-1]:
        node = node[key]
    if isinstance(node, dict) and data.draw(st.booleans()):
        del node[path[-1]]
    else:
        node[path[-1]] = data.draw(ODD)
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(StepserveError):
        Path(folder, "tokenizer.json").write_text(json.dumps(document))
        Path(folder, "tokenizer_config.json").write_text("{}")
        tokenizer = TextTokenizer.from_folder(Path(folder))
        tokenizer.decode(tokenizer.encode("hello <tool> a 漢"))
