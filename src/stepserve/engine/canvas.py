"""The output of one request, position by position. Plain integers and floats, no tensors."""

from collections.abc import Mapping, Sequence

from stepserve.core.denoising import canvas_tokens, lead_tokens
from stepserve.core.errors import FieldError
from stepserve.core.payload import SamplingParams
from stepserve.core.request import Confidence, FinishReason, Request


class Canvas:
    """Token ids of the output, [MASK] where nothing is settled yet.

    The canvas is ``max_output_tokens`` rounded up to whole blocks. The model sees all of it;
    positions at or beyond ``max_output_tokens`` stay masked and are never emitted, so the
    limit is exact. Blocks are worked off in order: the current one holds the first masked
    position. Of a block-causal model, the first is shorter by the ``lead`` of prompt tokens in it.
    """

    def __init__(
        self,
        request: Request,
        sampling: SamplingParams,
        *,
        mask_token_id: int,
        eos_token_ids: Sequence[int],
        settled: Mapping[int, int],
    ) -> None:
        """``settled`` maps offsets to token ids already final; FieldError if one is impossible."""
        self.limit = request.max_output_tokens
        self.block_tokens = request.diffusion.block_tokens
        self.lead = lead_tokens(request)
        self.mask = mask_token_id
        self.tokens = [mask_token_id] * canvas_tokens(request)
        # What a settled position was settled with is unknown after a move: it is certain now.
        self.confidence = [1.0 if k in settled else 0.0 for k in range(self.limit)]
        eos = () if sampling.ignore_eos else eos_token_ids
        self.ends = frozenset((*eos, *sampling.stop_token_ids))
        self.settled = 0
        self.emitted = 0
        self.finished: FinishReason | None = None
        self._end = self.limit  # offset of the earliest settled end token
        for offset, token in settled.items():
            if not 0 <= offset < self.limit or token == mask_token_id:
                raise FieldError("settled", f"token {token} at output offset {offset}")
        self.settle(settled)

    @property
    def block(self) -> range:
        """Offsets of the current block, those beyond the limit included."""
        stop = ((self.lead + self.emitted) // self.block_tokens + 1) * self.block_tokens - self.lead
        return range(max(0, stop - self.block_tokens), stop)

    def masked(self, within: range) -> list[int]:
        """Masked offsets below the limit in a range of offsets, in order."""
        stop = min(within.stop, self.limit)
        return [k for k in range(within.start, stop) if self.tokens[k] == self.mask]

    def candidate(self, offset: int) -> bool:
        """Whether a masked offset may be settled now.

        It has to be in the current block, and before the earliest settled end token: nothing
        behind that one will ever be emitted.
        """
        return offset in self.block and offset < self._end

    def settle(self, tokens: Mapping[int, int]) -> None:
        """Make positions final and extend what is emitted, in token order.

        The earliest event wins: an end token within the contiguous settled prefix ends the
        request there (and is emitted itself), whatever else was settled or capped behind it.
        """
        for offset, token in tokens.items():
            self.tokens[offset] = token
            if token in self.ends:
                self._end = min(self._end, offset)
        self.settled += len(tokens)
        while self.emitted < self.limit and self.tokens[self.emitted] != self.mask:
            self.emitted += 1
            if self.emitted > self._end:
                self.finished = FinishReason.STOP
                return
        if self.emitted == self.limit:
            self.finished = FinishReason.LENGTH

    def summary(self) -> Confidence:
        """Five numbers over the latest confidence of every output position."""
        ordered = sorted(self.confidence)
        last = len(ordered) - 1

        def quantile(share: float) -> float:
            below, part = divmod(share * last, 1)
            low, high = ordered[int(below)], ordered[min(int(below) + 1, last)]
            return low + (high - low) * part

        mean = sum(ordered) / len(ordered)
        return Confidence(ordered[0], quantile(0.25), quantile(0.5), mean, quantile(0.75))
