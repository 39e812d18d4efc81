"""Chunked prefill with a static chunk beside all decodes, however long it takes.

The baseline of ``tbt_budget`` (DynaServe 1.7): ``control.chunk_tokens`` is its one number.
"""

from collections.abc import Sequence

from stepserve.core.instance import InstanceSpec

from .chunked_prefill import ChunkedPrefill, Row


class StaticChunk(ChunkedPrefill):
    """A ``BatchingPolicy``."""

    def room(
        self, decoding: Sequence[Row], waiting: Sequence[Row], spec: InstanceSpec, now_s: float
    ) -> int:
        """The chunk, at least a page."""
        return max(self._chunk_tokens, spec.page_tokens)
