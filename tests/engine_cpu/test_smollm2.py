"""SmolLM2-135M, a real checkpoint: tokens and token ids are those of transformers.

Skipped unless STEPSERVE_SMOLLM2 names the folder that tools/smollm2.py writes. Its ``--record``
made smollm2.json: prompts, and what transformers 5.19.0 (torch 2.13.0, float32, one row at a
time, greedy, 64 tokens) makes of them. ``least_lead``: by how much, in logits, the chosen token
was ahead of the second at the closest of the steps.
"""

import json
import os
import random
import warnings
from pathlib import Path

import pytest
import torch

from stepserve.core.ids import RequestId
from stepserve.core.payload import Payload
from stepserve.core.request import Family, Progress, Request
from stepserve.core.step import Batch
from stepserve.engine.ar_executor import AutoregressiveExecutor
from stepserve.engine.ar_offline import due_step, everything, generate
from stepserve.engine.loader import load_model
from stepserve.gateway.tokenizer import TextTokenizer

FOLDER = Path(os.environ.get("STEPSERVE_SMOLLM2", ""))
pytestmark = pytest.mark.skipif(
    "STEPSERVE_SMOLLM2" not in os.environ, reason="STEPSERVE_SMOLLM2 names no checkpoint"
)
CASES = json.loads(Path(__file__).with_name("smollm2.json").read_text(encoding="utf-8"))
NEW_TOKENS = 64
EXPECTED = {f"{index}": case["output_ids"] for index, case in enumerate(CASES)}


@pytest.fixture(scope="module")
def loaded():
    return load_model(FOLDER)


@pytest.fixture(scope="module")
def tokenizer():
    return TextTokenizer.from_folder(FOLDER)


def engine(loaded):
    return AutoregressiveExecutor(loaded, page_capacity=128)


def rows():
    for index, case in enumerate(CASES):
        ids = tuple(case["prompt_ids"])
        name = RequestId(f"{index}")
        request = Request(name, Family.AUTOREGRESSIVE, "smollm2", len(ids), NEW_TOKENS, 0.0)
        yield request, Payload(ids)


def ids_of(results):
    assert all(result.error is None for result in results.values())
    return {name: result.token_ids for name, result in results.items()}


def test_the_reference_tells_models_apart():
    assert all(case["least_lead"] > 0.002 for case in CASES), "rounding does not decide"
    assert len({tuple(ids) for ids in EXPECTED.values()}) == len(CASES)
    ends = [ids[-1] == 2 for ids in EXPECTED.values()]
    assert any(ends), "some end by themselves"
    assert not all(ends), "some are ended"


def test_the_reference_is_what_transformers_makes():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
        for case in CASES:
            prompt = torch.tensor([case["prompt_ids"]])
            out = theirs.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
            )
            assert out[0, prompt.shape[1] :].tolist() == case["output_ids"]


def test_whole_prompts_one_row_at_a_time(loaded):
    executor = engine(loaded)
    alone = {}
    for row in rows():
        alone |= ids_of(generate(executor, [row]))
    assert alone == EXPECTED
    assert executor.used_pages == 0


def test_all_rows_in_one_batch(loaded):
    assert ids_of(generate(engine(loaded), rows())) == EXPECTED


def test_all_rows_in_chunks(loaded):
    """Rows sit batches out as well, so chunks of some prompts meet decodes of others."""
    chance = random.Random(1)

    def cut(request, outstanding):
        return min(outstanding, chance.choice((0, 1, 3, 16, 17)))

    assert ids_of(generate(engine(loaded), rows(), cut)) == EXPECTED


@pytest.mark.parametrize("seed", [0, 1])
def test_each_row_cut_at_random_places(loaded, seed):
    """Three cuts, anywhere in prompt and output: four executors, one after the other."""
    chance = random.Random(seed)
    for request, payload in rows():
        expected = EXPECTED[request.id]
        last = request.prompt_tokens + len(expected) - 1  # inputs executed until the end
        stops = [*sorted(chance.sample(range(1, last), min(3, last - 1))), last]
        before, done, ids = None, 0, []
        for epoch, stop in enumerate(stops):
            here = engine(loaded)
            progress = Progress(settled=done, emitted=len(ids))
            here.add(request, payload, progress, dict(enumerate(ids)))
            if before is not None:
                middle = chance.randrange(1, done) if done > 1 else 1
                for start, end in ((middle, done), (0, middle)):
                    if start < end:
                        chunk = before.export_kv(request.id, epoch, start, end)
                        assert here.import_kv(chunk)
            done = run_until(here, request, done, stop, ids)
            before = here
        assert ids == expected


def run_until(executor, request, done, stop, ids):
    """Execute inputs ``[done, stop)`` and append what is sampled; returns ``stop``."""
    while done < stop:
        step = due_step(request, done, len(ids), everything)
        if step.context_tokens > stop:
            step = step._replace(query_tokens=stop - done, context_tokens=stop)
        result = executor.run(Batch(0, (step,)))
        assert result.outcomes[0].error is None
        ids += [token.token_id for token in result.settled[request.id]]
        done = step.context_tokens
    return done


def test_token_ids_of_texts_and_chats(tokenizer):
    for case in CASES:
        if "chat" in case:
            assert tokenizer.chat_ids(case["chat"]) == tuple(case["prompt_ids"])
        else:
            assert tokenizer.encode(case["text"]) == tuple(case["prompt_ids"])


@pytest.mark.parametrize(
    "text",
    [
        "hello",
        " leading",
        "a\n\n\tb  c ",
        "1,234.5",
        "žluťoučký kůň",
        "漢字かな",
        "🙂👍🏽",
        "\u200bא",
    ],
)
def test_text_round_trips(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(tokenizer.token_bytes(token) for token in ids) == text.encode()


def test_the_ends_of_an_answer_are_not_text(loaded, tokenizer):
    """The model ends a chat with a special token, which the loader knows as the end."""
    (end,) = loaded.config.eos_token_ids
    assert tokenizer.token_name(end) == "<|im_end|>"
    assert tokenizer.token_bytes(end) == b""
    assert tokenizer.completion_ids("ab")[0] == 1, "after the beginning of text"
