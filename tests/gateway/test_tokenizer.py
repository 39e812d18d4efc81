"""Templates and byte-level text."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models

from gateway.scripted import (
    BOS,
    CHAT_TEMPLATE,
    EOS,
    MASK,
    SEP,
    SPECIALS,
    TOKENIZER,
    build_tokenizer,
)
from stepserve.core.errors import FieldError
from stepserve.gateway.tokenizer import TextTokenizer


@pytest.mark.parametrize(
    "text", ["hello world", " leading", "žluťoučký kůň", "漢字", "🙂👍🏽", "\n"]
)
def test_round_trip(text):
    """Fault 40."""
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_a_decoder_that_drops_the_first_space():
    raw = Tokenizer.from_str(TOKENIZER._tokenizer.to_str())
    raw.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    tokenizer = TextTokenizer(raw, {})
    for text in ("hello", " hello", "  hello world", " ", ""):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == raw.decode(ids)


def test_completion_template():
    assert TOKENIZER.completion_ids("ab") == (BOS, *TOKENIZER.encode("ab"), SEP)


def test_without_a_completion_template_text_follows_bos():
    config = {f"{name[1:-1]}_token": name for name in SPECIALS}
    plain = TextTokenizer(TOKENIZER._tokenizer, config)
    assert plain.completion_ids("ab") == (BOS, *plain.encode("ab"))
    with pytest.raises(FieldError, match="no chat template"):
        plain.chat_ids([{"role": "user", "content": "ab"}])


@pytest.mark.parametrize(
    "template", ["{{ messages[0].missing.deeper }}", "{{ 1 + messages[0].content }}"]
)
def test_template_failures_name_the_messages(template):
    """Fault 45: also failures that the template's author did not foresee."""
    tokenizer = build_tokenizer(chat_template=template)
    with pytest.raises(FieldError) as caught:
        tokenizer.chat_ids([{"role": "user", "content": "ab"}])
    assert caught.value.field == "messages"


def test_templates_cannot_reach_python():
    tokenizer = build_tokenizer(chat_template="{{ ''.__class__.__mro__ }}")
    with pytest.raises(FieldError, match="unsafe"):
        tokenizer.chat_ids([{"role": "user", "content": "ab"}])


def test_named_templates():
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHAT_TEMPLATE}]
    messages = [{"role": "user", "content": "ab"}]
    assert build_tokenizer(chat_template=named).chat_ids(messages) == TOKENIZER.chat_ids(messages)


def test_special_tokens_have_a_name_and_no_text():
    assert TOKENIZER.token_name(EOS) == "<eos>"
    assert TOKENIZER.decode([EOS, MASK, 299_999]) == ""


def test_reads_a_model_folder(tmp_path):
    TOKENIZER._tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": {"content": "<bos>"}, "chat_template": "ignored"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0]['content'] }}")
    tokenizer = TextTokenizer.from_folder(tmp_path)
    chat = tokenizer.chat_ids([{"role": "user", "content": "ab"}])
    assert chat == (BOS, *tokenizer.encode("ab"))


def test_other_vocabularies_are_refused():
    """Fault 23: say so at start."""
    other = Tokenizer(models.BPE())
    other.decoder = decoders.Metaspace()
    with pytest.raises(FieldError, match="byte-level"):
        TextTokenizer(other, {})
