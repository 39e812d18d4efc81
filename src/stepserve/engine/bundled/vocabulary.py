"""Tokenizer of the bundled model: byte-level BPE in which each word of the tasks is one token."""

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from stepserve.engine.bundled.tasks import words

SPECIALS = ("<pad>", "<mask>", "<eos>", "<bos>", "<sep>", "<unk>")
PAD, MASK, EOS, BOS, SEP, UNK = range(len(SPECIALS))
SUPPRESSED = (PAD, MASK, BOS, SEP, UNK)
"""Token ids that a sampler must never write into a response."""

CHAT_TEMPLATE = (
    "{%- set prompt = namespace(text='<bos>') -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] in ['system', 'user'] -%}"
    "{%- set prompt.text = prompt.text + ' ' + message['content'] | trim -%}"
    "{%- elif message['role'] != 'assistant' -%}"
    "{{- raise_exception('unknown role: ' + message['role']) -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{{- prompt.text + '<sep>' -}}"
)
"""Single-turn layout: system and user texts joined; earlier assistant turns are not shown."""

COMPLETION_TEMPLATE = "{{- '<bos> ' + prompt | trim + '<sep>' -}}"
"""What ``/v1/completions`` makes of a prompt: the same layout."""


def build_tokenizer() -> Tokenizer:
    """Train the tokenizer on the word list of the tasks; deterministic."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\d| ?[A-Za-z]+| ?[^\sA-Za-z\d]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    # A word carries the space before it; the first of a text is shown without.
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(
        vocab_size=4096,  # never reached: merging stops when every word is one token
        min_frequency=1,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(words(), trainer)
    return tokenizer


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Token ids of a prompt as the chat template lays it out."""
    return [BOS, *tokenizer.encode(" " + prompt).ids, SEP]


def response_ids(tokenizer: Tokenizer, response: str) -> list[int]:
    """Token ids of a response, closed by one EOS."""
    return [*tokenizer.encode(" " + response).ids, EOS]


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
        "eos_token": "<eos>",
        "bos_token": "<bos>",
        "sep_token": "<sep>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
        "chat_template": CHAT_TEMPLATE,
        "completion_template": COMPLETION_TEMPLATE,
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
