"""Templates and byte-level text."""

import json

import pytest

from gateway.scripted import (
    BOS,
    CHAT_TEMPLATE,
    EOS,
    MASK,
    SEP,
    SPECIALS,
    TOKENIZER,
    build_tokenizer,
    stripping,
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
    tokenizer = stripping()
    raw = tokenizer._tokenizer
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


WRONG = {
    "no tokenizer": ("tokenizer.json", "{}", "tokenizer.json: is no tokenizer"),
    "pointer": ("tokenizer.json", "version https://git-lfs.github.com/spec/v1", "git-lfs pointer"),
    "cut off": ("tokenizer.json", TOKENIZER._tokenizer.to_str()[:300], "is no tokenizer"),
    "missing": ("tokenizer.json", None, "cannot read .*tokenizer.json: No such file"),
    "no config": ("tokenizer_config.json", None, "cannot read .*tokenizer_config.json: No such"),
    "config list": ("tokenizer_config.json", "[]", "tokenizer_config.json holds no JSON object"),
    "token": ("tokenizer_config.json", '{"bos_token": 1}', "bos_token must be a string"),
    "template": ("tokenizer_config.json", '{"chat_template": "{% if"}', "chat_template cannot be"),
    "list": ("tokenizer_config.json", '{"chat_template": [1]}', "must be a string, or a list"),
    "number": ("tokenizer_config.json", '{"chat_template": 1}', "chat_template must be a string"),
    "completion": ("tokenizer_config.json", '{"completion_template": null}', "must be a string"),
}


@pytest.mark.parametrize(("name", "text", "said"), WRONG.values(), ids=WRONG)
def test_a_file_that_cannot_be_used_is_named(tmp_path, name, text, said):
    TOKENIZER._tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    TextTokenizer.from_folder(tmp_path)
    (tmp_path / name).unlink()
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(FieldError, match=said) as caught:
        TextTokenizer.from_folder(tmp_path)
    assert caught.value.field == "model"
    assert str(tmp_path / name) in caught.value.message
    assert "\n" not in caught.value.message
