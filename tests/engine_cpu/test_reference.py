"""The executor against a sampler written plainly: one row, dense tensors, no pages."""

from statistics import fmean, median

import pytest
import torch

from stepserve.core.denoising import due_step
from stepserve.core.request import CacheMode, Progress, RefreshScope
from stepserve.core.step import Batch
from stepserve.engine.diffusion_offline import denoise


class DenseAttention:
    """Keys and values of the whole sequence; executed positions overwrite theirs first.

    A prompt that is not executed again keeps those of its first pass.
    """

    def __init__(self):
        self.kept = {}
        self.span = None

    def __call__(self, layer, q, k, v):
        if len(self.span) == k.shape[0] and self.span.start == 0:
            self.kept[layer] = [k.clone(), v.clone()]
        keys, values = self.kept[layer]
        keys[self.span.start : self.span.stop] = k
        values[self.span.start : self.span.stop] = v
        repeat = q.shape[1] // k.shape[1]
        keys, values = (x.repeat_interleave(repeat, dim=1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q, keys) / q.shape[-1] ** 0.5
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)


@torch.no_grad()
def reference(loaded, request, payload, threshold):
    """Greedy denoising, step by step; returns the emitted tokens and the number of steps."""
    config, options = loaded.config, request.diffusion
    size, prompt, limit = options.block_tokens, request.prompt_tokens, request.max_output_tokens
    blocks = -(-limit // size)
    ids = torch.tensor(list(payload.prompt_ids) + [config.mask_token_id] * (blocks * size))
    attention = DenseAttention()
    before = None
    steps = 0
    for block in range(blocks):
        start = prompt + block * size
        stop = min(start + size, prompt + limit)
        opened = False
        output_only = options.refresh_scope is RefreshScope.OUTPUT and block > 0
        while (ids[start:stop] == config.mask_token_id).any():
            span = range(prompt if output_only else 0, len(ids))
            if options.cache_mode is not CacheMode.NONE and (
                opened or block % options.refresh_blocks
            ):
                dual = options.cache_mode is CacheMode.DUAL
                first = start if opened else start - size  # a skipped refresh: see due_step
                span = range(first, start + size if dual else len(ids))
            opened = True
            attention.span = span
            hidden = loaded.model.hidden(
                ids[span.start : span.stop], torch.arange(span.start, span.stop), attention
            )
            if config.shift_logits:
                first = hidden[:1] if span.start == 0 else before[None]
                hidden_at = torch.cat([first, hidden[:-1]])
                if start - 1 in span:
                    before = hidden[start - 1 - span.start]
            else:
                hidden_at = hidden
            logits = loaded.model.logits(hidden_at)
            logits[:, list(loaded.suppressed_token_ids)] = float("-inf")
            confidence, tokens = logits.softmax(-1).max(-1)
            ends = [
                p for p in range(prompt, prompt + limit) if ids[p].item() == config.eos_token_id
            ]
            masked = [
                p for p in range(start, min([stop, *ends])) if ids[p].item() == config.mask_token_id
            ]
            chosen = [p for p in masked if confidence[p - span.start] > threshold]
            if not chosen:
                chosen = [max(masked, key=lambda p: confidence[p - span.start].item())]
            for p in chosen:
                ids[p] = tokens[p - span.start]
            steps += 1
            output = ids[prompt : prompt + limit].tolist()
            head = output[: output.index(1)] if 1 in output else output
            if config.eos_token_id in head:
                return head[: head.index(config.eos_token_id) + 1], steps
        if config.shift_logits:
            before = hidden[stop - 1 - span.start]
    return ids[prompt : prompt + limit].tolist(), steps


MODELS = {
    "llada": {},
    "dream": {"shift_logits": True, "qkv_bias": True, "kv_heads": 1},
    "tied": {"tie_embeddings": True, "scale_embeddings": True, "kv_heads": 4},
}


REUSE = [
    (cache, scope)
    for cache in (CacheMode.NONE, CacheMode.PREFIX, CacheMode.DUAL)
    for scope in RefreshScope
    if cache is not CacheMode.NONE or scope is RefreshScope.FULL
]


def cases(make, cache, scope):
    """Requests of different prompts, limits, blocks and refresh intervals."""
    shapes = [(5, 16, 8, 1), (9, 13, 8, 1), (23, 24, 8, 2), (2, 7, 4, 1), (40, 30, 4, 3)]
    return [
        make(f"{cache}-{scope}{i}", p, o, block=b, cache=cache, refresh=r, scope=scope, seed=i)
        for i, (p, o, b, r) in enumerate(shapes)
    ]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("cache", "scope"), REUSE)
def test_a_row_alone_equals_the_reference(tiny, make, executor, model, cache, scope):
    loaded = tiny(**MODELS[model])
    engine = executor(loaded)
    steps = []
    for request, payload in cases(make, cache, scope):
        expected, expected_steps = reference(loaded, request, payload, 0.6)
        result = denoise(engine, [(request, payload)], 0.6)[request.id]
        assert (result.token_ids, result.steps) == (expected, expected_steps)
        steps.append(len(expected) / result.steps)
    assert max(steps) > 1.0, "no step of any case settled two tokens: the test shows little"
    assert engine.used_pages == 0


@pytest.mark.parametrize("model", MODELS)
def test_company_changes_nothing(tiny, make, executor, model):
    """All ways of reuse, lengths, blocks, thresholds, temperatures in one batch."""
    loaded = tiny(**MODELS[model])
    rows = [case for cache, scope in REUSE for case in cases(make, cache, scope)]
    rows += [
        (request, payload)
        for request, payload in (
            make("warm", prompt=11, output=16, seed=50, temperature=1.0),
            make("hot", prompt=12, output=9, block=4, seed=51, temperature=2.0, top_k=7, top_p=0.9),
        )
    ]
    thresholds = {request.id: 0.3 + 0.6 * i / len(rows) for i, (request, _) in enumerate(rows)}
    together = denoise(executor(loaded), rows, lambda request, _: thresholds[request.id])
    alone = executor(loaded)
    for request, payload in rows:
        single = denoise(alone, [(request, payload)], thresholds[request.id])[request.id]
        both = together[request.id]
        assert single.error is None
        assert (single.token_ids, single.steps, single.forced, single.finished) == (
            both.token_ids,
            both.steps,
            both.forced,
            both.finished,
        )


def test_confidence_statistics_are_over_the_latest_value_of_every_output_position(
    tiny, make, executor
):
    """DiLaServe B4: a recompute step refreshes all masked positions, a cached one the block."""
    loaded = tiny()
    engine = executor(loaded)
    request, payload = make(output=14, block=8)
    engine.add(request, payload, Progress(), {})
    first = engine.run(Batch(0, (due_step(request, 0, False, 0.99),)))
    ids = torch.tensor([*payload.prompt_ids, *[1] * 16])
    attention = DenseAttention()
    attention.span = range(20)
    logits = loaded.model.logits(loaded.model.hidden(ids, torch.arange(20), attention))
    logits[:, list(loaded.suppressed_token_ids)] = float("-inf")
    expected = logits.softmax(-1).max(-1).values[4:18]
    low, high = torch.quantile(expected, torch.tensor([0.25, 0.75])).tolist()
    values = expected.tolist()
    seen = first.outcomes[0].confidence
    assert (seen.minimum, seen.p25, seen.median, seen.mean, seen.p75) == pytest.approx(
        (min(values), low, median(values), fmean(values), high), abs=1e-5
    )
    second = engine.run(Batch(1, (due_step(request, 1, True, 0.99),))).outcomes[0].confidence
    assert second != seen
