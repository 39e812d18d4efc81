"""What the executor needs of a request and no scheduler ever looks at."""

from dataclasses import dataclass

from stepserve.core.ids import RequestId


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Per-request sampling. ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 are off.

    ``logprobs``: how many alternatives to report with each token, ``None`` for no log
    probabilities at all. A reported log probability is the log-softmax (temperature 1, before
    any truncation) at the step that settled the position; it is not a sequence likelihood.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    logprobs: int | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Payload:
    """Token values and sampling of one request."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()


@dataclass(frozen=True, slots=True)
class SettledToken:
    """One output position that became final. ``offset`` 0 is the first output token.

    ``top`` holds (token id, log probability) of the best alternatives, best first.
    """

    offset: int
    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class KvChunk:
    """Keys and values of positions ``[start, stop)`` of a request, on their way.

    ``epoch`` is the hand-over's. ``checksums`` (CRC-32, one per page touched) are of the bytes
    as they left; ``data`` is whatever the two executors understand.
    """

    request_id: RequestId
    epoch: int
    start: int
    stop: int
    checksums: tuple[int, ...]
    data: object
