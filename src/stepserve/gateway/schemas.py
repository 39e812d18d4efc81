"""Request bodies. Unknown fields are kept for ``fields.check_extra_fields`` to judge."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from stepserve.gateway.text import TextBody

MAX_SAMPLES = 128
"""Most samples of one HTTP request: prompts times ``n``."""

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
TimeLeft = float  # not positive: the time is over
StopString = Annotated[str, Field(min_length=1, max_length=1024)]


class _Open(BaseModel):
    """Accepts unknown fields. JSON types are taken as they are: "5" is not a number."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class _Body(_Open, TextBody):
    """A whole body."""


class _Closed(BaseModel):
    """Our own extensions refuse unknown fields: a typing error must not change an SLO."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _prompts(value: Any) -> Any:
    """One prompt or several, as a list of prompts."""
    if isinstance(value, str) or _is_ids(value):
        return [value]
    if isinstance(value, list) and len(value) > MAX_SAMPLES:
        raise ValueError(f"may be at most {MAX_SAMPLES} prompts, not {len(value)}")
    texts = isinstance(value, list) and all(isinstance(item, str) for item in value)
    if value and (texts or (isinstance(value, list) and all(map(_is_ids, value)))):
        return value
    raise ValueError("must be text or token ids, or a list of either, and not empty")


def _strings(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


_TEXT_PARTS = ("text", "refusal")


def _plain_text(value: Any) -> Any:
    """Message content as one string; parts are joined by newlines. What is absent stays so."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, dict) for part in value):
        texts = [part.get(part["type"]) for part in value if part.get("type") in _TEXT_PARTS]
        if len(texts) == len(value) and all(isinstance(text, str) for text in texts):
            return "\n".join(texts)
    raise ValueError("must be a string or a list of parts of type text")


Effort = Literal["instant", "none", "minimal", "low", "medium", "high", "xhigh", "max"]


class StreamOptions(_Open):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SLOFields(_Closed):
    """``slo``: latency targets of this request (docs/api.md). Milliseconds."""

    slo_class: str | None = Field(default=None, validation_alias="class")
    e2e_ms: TimeLeft | None = None
    ttlt_ms: TimeLeft | None = None
    ttft_ms: TimeLeft | None = None
    tpot_ms: Positive | None = None
    tbt_ms: Positive | None = None
    deadline_unix_ms: float | None = None
    on_miss: Literal["degrade", "best_effort", "reject"] | None = None
    weight: Positive | None = None


class DLMFields(_Closed):
    """``dlm``: how a diffusion model denoises this request (docs/api.md)."""

    confidence_threshold: float | None = None
    min_confidence_threshold: float | None = None
    edit_threshold: float | None = None
    max_steps_per_block: Count | None = None
    max_forwards: Count | None = None
    max_nfe: Count | None = None
    block_length: Count | None = None
    algorithm: Literal["low_confidence"] | None = None
    cache: Literal["exact", "approximate", "auto", "none", "prefix", "dual"] | None = None
    cache_refresh_interval: Count | None = None
    refresh_scope: Literal["full", "output", "auto"] | None = None
    expected_output_tokens: Count | None = None
    stream_mode: Literal["append", "snapshot"] | None = None


class GenerationRequest(_Body):
    """What both generation endpoints take."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    max_completion_tokens: Count | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    stop: Annotated[list[StopString], Field(max_length=16), BeforeValidator(_strings)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=64)] | None = None
    include_stop_str_in_output: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    # Identity: accepted for bookkeeping on the client's side; no effect on the answer.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    expected_output_tokens: Count | None = None
    slo: SLOFields | None = None
    dlm: DLMFields | None = None
    reasoning_effort: Effort | None = None
    # Names that users of other diffusion servers write.
    confidence_threshold: float | None = None
    threshold: float | None = None
    num_denoising_steps: Count | None = None
    denoising_steps: Count | None = None


class CompletionRequest(GenerationRequest):
    """Body of ``POST /v1/completions``."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompts)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None


class FunctionCall(_Open):
    """What an earlier turn of the model called; ``arguments`` is JSON, as the model wrote it."""

    name: str
    arguments: str


class ToolCall(_Open):
    """One call of an earlier turn."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


class Message(_Open):
    """One message of a chat. ``name`` reaches the template when it is not null.

    ``content`` may be absent of the model's own turns. ``annotations`` say nothing to a model.
    """

    role: str
    content: Annotated[str | None, BeforeValidator(_plain_text)] = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    annotations: list[Any] | None = None


class ChatRequest(GenerationRequest):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class TokenizeRequest(_Body):
    """Body of ``POST /tokenize``: a prompt or a chat, laid out as generation would do it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(_Body):
    """Body of ``POST /detokenize``."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]
