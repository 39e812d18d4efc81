"""What a simulated world remembers of each request."""

from dataclasses import dataclass

from stepserve.core.actions import Finish, Reject
from stepserve.core.request import Progress, RefreshScope, Request
from stepserve.core.step import Step

from .quality import StageUse


@dataclass(slots=True)
class Record:
    """What became of one request.

    ``progress`` is what reached the frontend when the request last left an instance.
    ``tokens`` counts settled tokens, ``use`` the thresholds they were settled at.
    ``releases``: times it was let go while it went on (migrations and drains).
    ``cheap_openings``: blocks after the first that its options let begin without a refresh of
    everything; ``skipped``: those that did.
    """

    request: Request
    index: int
    use: StageUse
    progress: Progress | None = None
    answer: Finish | Reject | None = None
    answered_s: float = 0.0
    tokens: int = 0
    refreshes: int = 0
    cheap_openings: int = 0
    skipped: int = 0
    releases: int = 0

    def open_block(self, step: Step) -> None:
        """``step`` opens a block after the first: were keys and values left as they are?"""
        options = self.request.diffusion
        block = self.tokens // options.block_tokens
        output_only = options.refresh_scope is RefreshScope.OUTPUT
        if output_only or block % options.refresh_blocks:
            self.cheap_openings += 1
            self.skipped += step.query_tokens < step.context_tokens
