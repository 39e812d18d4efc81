"""The tokens of one autoregressive request. Plain integers, no tensors."""

from collections.abc import Mapping, Sequence

from stepserve.core.errors import FieldError
from stepserve.core.payload import SamplingParams
from stepserve.core.request import FinishReason


class TokenSequence:
    """Prompt and output so far, and whether the output has ended.

    Its length is what is known: the inputs that can be executed. Emitted ids are the whole
    state of sampling (DynaServe 3.6): a draw depends on seed and offset alone, and
    penalties and grammars are not served.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        limit: int,
        eos_token_ids: Sequence[int],
        settled: Mapping[int, int],
    ) -> None:
        """``limit``: most output tokens; ``settled`` maps output offsets to ids already emitted.

        Raises FieldError unless these offsets are 0, 1, ... below the limit, with no end of
        the output before the last.
        """
        self.tokens = list(prompt)
        self.sampling = sampling
        self.finished: FinishReason | None = None
        self._prompt_tokens = len(prompt)
        self._limit = limit
        self._eos = tuple(eos_token_ids)
        eos = () if sampling.ignore_eos else self._eos
        self._ends = frozenset((*eos, *sampling.stop_token_ids))
        for offset in range(len(settled)):
            if offset not in settled or self.finished is not None:
                raise FieldError("settled", f"offsets {sorted(settled)}: not an output so far")
            self.append(settled[offset])

    def __len__(self) -> int:
        """Tokens known: prompt and output so far."""
        return len(self.tokens)

    @property
    def emitted(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - self._prompt_tokens

    def append(self, token: int) -> None:
        """Emit a token. One that ends the text counts before the limit that it reaches."""
        self.tokens.append(token)
        if token in self._ends:
            self.finished = FinishReason.STOP
        elif self.emitted == self._limit:
            self.finished = FinishReason.LENGTH

    def forbidden(self) -> tuple[int, ...]:
        """Token ids that must not come next."""
        if self.emitted < self.sampling.min_tokens:
            return (*self._eos, *self.sampling.stop_token_ids)
        return self._eos if self.sampling.ignore_eos else ()
