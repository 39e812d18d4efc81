"""From request bodies to the values the control plane works on."""

import secrets
from dataclasses import dataclass, replace

from stepserve.core.errors import FieldError
from stepserve.core.ids import RequestId
from stepserve.core.payload import Payload, SamplingParams
from stepserve.core.request import (
    SLO,
    CacheMode,
    DiffusionOptions,
    RefreshScope,
    Request,
    ThresholdBounds,
)
from stepserve.gateway.contract import FAMILY_FIELDS, ModelCard
from stepserve.gateway.messages import chat_text
from stepserve.gateway.schemas import (
    MAX_SAMPLES,
    ChatRequest,
    CompletionRequest,
    DLMFields,
    GenerationRequest,
)
from stepserve.gateway.slo import one_of
from stepserve.gateway.streaming import EndRules
from stepserve.gateway.tokenizer import TextTokenizer

_MAX_SEED = 2**63 - 1
# Preferred threshold and floor; the values are among the default candidate thresholds.
_EFFORT = {
    "none": (0.6, 0.5),
    "minimal": (0.6, 0.5),
    "instant": (0.6, 0.5),
    "low": (0.8, 0.6),
    "medium": (0.9, 0.7),
    "high": (0.9, 0.9),
    "xhigh": (0.9, 0.9),
    "max": (0.9, 0.9),
}
_NO_EFFORT = ("reasoning_effort", "none")  # asks every model for what those do that do not reason
_CACHE = {
    "exact": CacheMode.NONE,
    "none": CacheMode.NONE,
    "prefix": CacheMode.PREFIX,
    "approximate": CacheMode.DUAL,
    "dual": CacheMode.DUAL,
}


@dataclass(frozen=True, slots=True)
class Arrival:
    """Which HTTP request: its reply's id, when it came on the frontend's clock, its client's id."""

    reply_id: str
    at_s: float
    client_id: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """One choice to generate. ``echo`` is text to show before it."""

    index: int
    request: Request
    payload: Payload
    rules: EndRules
    first_of_prompt: bool
    echo: str = ""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of a prompt and the field that it came from; ``text`` is what ``echo`` shows."""

    ids: tuple[int, ...]
    param: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class Translator:
    """Turns bodies into samples for one model. Raises FieldError naming the field at fault.

    ``strict_limits``: a limit that the context has no room for is refused, not lowered. Sizes are
    checked before any text is cut into tokens.
    """

    card: ModelCard
    tokenizer: TextTokenizer
    strict_limits: bool = False

    def completion(self, body: CompletionRequest, slo: SLO, arrival: Arrival) -> tuple[Sample, ...]:
        """The samples of a ``/v1/completions`` body: prompts in order, ``n`` of each."""
        if body.echo and body.logprobs is not None:
            raise FieldError("logprobs", "with echo would score the prompt: not supported")
        if body.max_tokens == 0 and not body.echo:
            raise FieldError("max_tokens", "must be at least 1; 0 needs echo, which is all of it")
        _check_count(body, len(body.prompt))
        prompts = [self._prompt(prompt, bool(body.echo)) for prompt in body.prompt]
        return self._samples(body, prompts, slo, body.logprobs, arrival)

    def _prompt(self, prompt: str | list[int], echo: bool) -> Prompt:
        if not prompt:
            raise FieldError("prompt", "is empty")
        if isinstance(prompt, str):
            ids = self._ids(self.tokenizer.completion_text(prompt), "prompt")
            return Prompt(ids, "prompt", prompt if echo else "")
        self._check_length("prompt", len(prompt))
        return Prompt(tuple(prompt), "prompt", self.tokenizer.decode(prompt) if echo else "")

    def _ids(self, text: str, param: str) -> tuple[int, ...]:
        """Tokens of a whole prompt, unless its characters alone are too many."""
        self._check_length(param, self.tokenizer.least_tokens(text), "at least ")
        return self.tokenizer.encode(text)

    def _check_length(self, param: str, tokens: int, about: str = "") -> None:
        context = self.card.context_tokens
        if tokens > context:
            raise FieldError(
                param, f"has {about}{tokens} tokens, which exceeds the context of {context} tokens"
            )

    def chat(self, body: ChatRequest, slo: SLO, arrival: Arrival) -> tuple[Sample, ...]:
        """The samples of a ``/v1/chat/completions`` body."""
        if body.top_logprobs and not body.logprobs:
            raise FieldError("top_logprobs", "needs logprobs to be true")
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        if body.max_tokens == 0:
            raise FieldError("max_tokens", "must be at least 1")
        _check_count(body, 1)
        prompt = Prompt(self._ids(chat_text(body.messages, self.tokenizer), "messages"), "messages")
        return self._samples(body, [prompt], slo, logprobs, arrival)

    def _samples(
        self,
        body: GenerationRequest,
        prompts: list[Prompt],
        slo: SLO,
        logprobs: int | None,
        arrival: Arrival,
    ) -> tuple[Sample, ...]:
        n = body.n or 1
        diffusion = self._diffusion(body)
        sampling = self._sampling(body, n, logprobs)
        samples = []
        for number, prompt in enumerate(prompts):
            self._check_prompt(prompt)
            max_tokens = self._max_tokens(body, prompt, diffusion)
            rules = self._rules(body, max_tokens)
            for sample in range(n):
                index = number * n + sample
                request = Request(
                    id=RequestId(f"{arrival.reply_id}-{index}"),
                    family=self.card.family,
                    model=self.card.id,
                    prompt_tokens=len(prompt.ids),
                    max_output_tokens=max_tokens,
                    arrival_s=arrival.at_s,
                    client_id=arrival.client_id,
                    slo=slo,
                    diffusion=diffusion,
                    expected_output_tokens=body.expected_output_tokens,
                    min_output_tokens=rules.least_tokens,
                )
                payload = Payload(prompt.ids, _sampling_of(sampling, sample))
                samples.append(Sample(index, request, payload, rules, sample == 0, prompt.text))
        return tuple(samples)

    def _check_prompt(self, prompt: Prompt) -> None:
        if not prompt.ids:
            raise FieldError(prompt.param, "is empty")
        if min(prompt.ids) < 0 or max(prompt.ids) >= self.card.vocab_size:
            raise FieldError(prompt.param, f"token ids must be in [0, {self.card.vocab_size})")
        if self.card.mask_token_id in prompt.ids:
            raise FieldError(prompt.param, "holds the mask token; infilling is not supported")

    def _max_tokens(
        self, body: GenerationRequest, prompt: Prompt, options: DiffusionOptions
    ) -> int:
        """Output limit, exact as asked if it fits; positions reserved for it are whole blocks.

        Clients mean a cap: one that does not fit is lowered to the room. Blocks begin where the
        prompt ends, those of a block-causal model at position 0.
        """
        asked = one_of(
            {"max_tokens": body.max_tokens, "max_completion_tokens": body.max_completion_tokens}
        )
        block = options.block_tokens if self.card.denoises else 1
        context, used = self.card.context_tokens, len(prompt.ids)
        lead = used % block if options.cache_mode is CacheMode.BLOCK else 0
        room = (context - used + lead) // block * block - lead
        least = block - lead
        if asked == 0:  # the prompt is the answer
            return 0
        if room < least:
            raise FieldError(
                prompt.param,
                f"has {used} tokens; with an output of at least {least} it exceeds the context "
                f"of {context} tokens",
            )
        if asked is not None and asked > room and self.strict_limits:
            name = "max_tokens" if body.max_tokens is not None else "max_completion_tokens"
            blocks = f", and output is reserved in blocks of {block}" if block > 1 else ""
            raise FieldError(
                name,
                f"{asked} is too many: the prompt has {used} tokens, the context "
                f"{context}{blocks}, so at most {room} fit",
            )
        limit = min(self.card.default_max_tokens if asked is None else asked, room)
        if (body.min_tokens or 0) > limit:
            raise FieldError("min_tokens", f"exceeds the output limit of {limit} tokens")
        return limit

    def _rules(self, body: GenerationRequest, max_tokens: int) -> EndRules:
        return EndRules(
            max_tokens=max_tokens,
            eos_token_ids=self.card.eos_token_ids,
            stop_token_ids=frozenset(body.stop_token_ids or ()),
            stops=tuple(body.stop or ()),
            include_stop=bool(body.include_stop_str_in_output),
            ignore_eos=bool(body.ignore_eos),
            min_tokens=body.min_tokens or 0,
        )

    def _sampling(self, body: GenerationRequest, n: int, logprobs: int | None) -> SamplingParams:
        if any(token >= self.card.vocab_size for token in body.stop_token_ids or ()):
            raise FieldError("stop_token_ids", f"must be in [0, {self.card.vocab_size})")
        default = self.card.default_temperature
        temperature = default if body.temperature is None else body.temperature
        if n > 1 and temperature == 0:
            raise FieldError("n", "samples at temperature 0 are all the same; raise temperature")
        if body.seed is not None:
            seed = body.seed & _MAX_SEED
        else:
            seed = secrets.randbelow(_MAX_SEED) if temperature > 0 else 0
        return SamplingParams(
            temperature=temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=max(0, body.top_k or 0),
            min_p=body.min_p or 0.0,
            seed=seed,
            logprobs=logprobs,
            ignore_eos=bool(body.ignore_eos),
            min_tokens=body.min_tokens or 0,
            stop_token_ids=tuple(body.stop_token_ids or ()),
        )

    def _diffusion(self, body: GenerationRequest) -> DiffusionOptions:
        for name in sorted(FAMILY_FIELDS - self.card.request_fields):
            if getattr(body, name) is not None and (name, getattr(body, name)) != _NO_EFFORT:
                raise FieldError(
                    name, f"means nothing to {self.card.id!r}, an {self.card.family} model"
                )
        if not self.card.denoises:
            return DiffusionOptions()
        fields = body.dlm or DLMFields()
        threshold = one_of(
            {
                "dlm.confidence_threshold": fields.confidence_threshold,
                "confidence_threshold": body.confidence_threshold,
                "threshold": body.threshold,
            }
        )
        max_steps = one_of(
            {
                "dlm.max_steps_per_block": fields.max_steps_per_block,
                "num_denoising_steps": body.num_denoising_steps,
                "denoising_steps": body.denoising_steps,
            }
        )
        max_forwards = one_of(
            {"dlm.max_forwards": fields.max_forwards, "dlm.max_nfe": fields.max_nfe}
        )
        if fields.stream_mode == "snapshot":
            raise FieldError("dlm.stream_mode", "snapshots are not supported; streams append")
        if fields.edit_threshold:
            raise FieldError("dlm.edit_threshold", "this model cannot revise settled tokens")
        cache = self._cache(fields.cache or "auto")
        if cache.exact and fields.cache_refresh_interval is not None:
            raise FieldError("dlm.cache_refresh_interval", "needs dlm.cache to be approximate")
        expected = one_of(
            {
                "dlm.expected_output_tokens": fields.expected_output_tokens,
                "expected_output_tokens": body.expected_output_tokens,
            }
        )
        return DiffusionOptions(
            thresholds=self._thresholds(body, fields, threshold),
            block_tokens=self._block_length(fields),
            cache_mode=cache,
            refresh_blocks=fields.cache_refresh_interval or 1,
            refresh_scope=_refresh_scope(fields, cache, self.card.default_refresh_scope),
            max_steps_per_block=max_steps,
            max_forwards=max_forwards,
            expected_output_tokens=expected,
        )

    def _cache(self, asked: str) -> CacheMode:
        default = self.card.default_cache
        if default is not CacheMode.BLOCK:
            return _CACHE.get(asked, default)
        if asked not in ("auto", "exact"):
            raise FieldError("dlm.cache", "this model's is exact: finished blocks never change")
        return default

    def _thresholds(
        self, body: GenerationRequest, fields: DLMFields, preferred: float | None
    ) -> ThresholdBounds:
        floor = fields.min_confidence_threshold
        if body.reasoning_effort is not None:
            if preferred is not None or floor is not None:
                raise FieldError("reasoning_effort", "contradicts an explicit threshold")
            return ThresholdBounds(*_EFFORT[body.reasoning_effort])
        defaults = self.card.default_thresholds
        if preferred is None:
            preferred = defaults.preferred
        try:
            return ThresholdBounds(
                preferred, min(defaults.floor, preferred) if floor is None else floor
            )
        except FieldError as error:
            raise FieldError(f"dlm.{error.field}", error.message) from error

    def _block_length(self, fields: DLMFields) -> int:
        if fields.block_length is None:
            return self.card.default_block_length
        if fields.block_length not in self.card.block_lengths:
            known = ", ".join(map(str, self.card.block_lengths))
            raise FieldError("dlm.block_length", f"this model supports {known}")
        return fields.block_length


def _check_count(body: GenerationRequest, prompts: int) -> None:
    """Raises FieldError for too many samples."""
    if (body.n or 1) * prompts > MAX_SAMPLES:
        raise FieldError("n", f"prompts times n may be at most {MAX_SAMPLES}")


def _refresh_scope(fields: DLMFields, cache: CacheMode, default: RefreshScope) -> RefreshScope:
    """The server's choice where the client leaves it open; always full where all is exact."""
    if fields.refresh_scope in (None, "auto"):
        return RefreshScope.FULL if cache.exact else default
    return RefreshScope(fields.refresh_scope)


def _sampling_of(sampling: SamplingParams, sample: int) -> SamplingParams:
    """Sample i of a prompt uses seed + i."""
    return replace(sampling, seed=(sampling.seed + sample) & _MAX_SEED)
