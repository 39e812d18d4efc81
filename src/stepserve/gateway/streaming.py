"""From settled tokens to text deltas: one pure object per choice, without any I/O.

Invariants, whatever the chunking of the tokens: the deltas joined are the final text; no part
of a stop string is ever shown (unless asked for); the earliest end in token order wins; tokens
after that end are neither shown nor billed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stepserve.core.payload import SettledToken
from stepserve.core.request import FinishReason
from stepserve.gateway.decoding import Decoding


@dataclass(frozen=True, slots=True)
class EndRules:
    """What ends an answer. Nothing but ``max_tokens`` ends it within ``min_tokens`` tokens."""

    max_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0

    @property
    def least_tokens(self) -> int:
        """No answer under these rules is shorter, unless it fails."""
        if self.ignore_eos and not (self.stop_token_ids or self.stops):
            return self.max_tokens
        return self.min_tokens


@dataclass(frozen=True, slots=True)
class Delta:
    """News of a choice: text that may be shown now, and the tokens billed since the last."""

    text: str = ""
    tokens: tuple[SettledToken, ...] = ()


class ChoiceText:
    """The text of one choice, as far as it has come.

    ``stop_reason`` is the stop string or stop token id that ended it (vLLM's field).
    """

    def __init__(self, decoding: Decoding, rules: EndRules) -> None:
        self._decoding = decoding
        self._rules = rules
        self._held = ""
        self._shown: list[str] = []
        self.tokens: list[SettledToken] = []
        self.finish: FinishReason | None = None
        self.stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        """All text shown so far."""
        return "".join(self._shown)

    @property
    def left_out(self) -> int:
        """How many characters the first tokens would have had elsewhere."""
        return self._decoding.left_out

    def feed(self, tokens: Sequence[SettledToken]) -> Delta:
        """Take the next settled tokens, in order. Those after the end are dropped."""
        billed, plain = len(self.tokens), self._plain(tokens)
        self.tokens += tokens[:plain]
        parts = [self._decoding.push(*[token.token_id for token in tokens[:plain]])]
        for token in tokens[plain:]:
            if self.finish is not None:
                break
            parts.append(self._take(token))
        return self._show("".join(parts), tuple(self.tokens[billed:]))

    def _plain(self, tokens: Sequence[SettledToken]) -> int:
        """How many of the first tokens can neither end the text nor be held back."""
        rules = self._rules
        if rules.stops or self.finish is not None:
            return 0
        room = max(0, rules.max_tokens - 1 - len(self.tokens))
        for index, token in enumerate(tokens[:room]):
            if token.token_id in rules.eos_token_ids or token.token_id in rules.stop_token_ids:
                return index
        return min(room, len(tokens))

    def end(self, reason: FinishReason) -> Delta:
        """No token follows. ``reason`` counts only if no token has ended the text before."""
        return self._show("" if self.finish is not None else self._finish(reason))

    def _show(self, text: str, tokens: tuple[SettledToken, ...] = ()) -> Delta:
        self._shown.append(text)
        return Delta(text, tokens)

    def _take(self, token: SettledToken) -> str:
        rules = self._rules
        self.tokens.append(token)
        may_stop = len(self.tokens) > rules.min_tokens
        if may_stop and token.token_id in rules.eos_token_ids and not rules.ignore_eos:
            return self._finish(FinishReason.STOP)
        if may_stop and token.token_id in rules.stop_token_ids:
            self.stop_reason = token.token_id
            last = self._decoding.push(token.token_id) if rules.include_stop else ""
            return self._finish(FinishReason.STOP, last)
        text = self._push(self._decoding.push(token.token_id), may_stop)
        if self.finish is None and len(self.tokens) >= rules.max_tokens:
            text += self._finish(FinishReason.LENGTH)
        return text

    def _push(self, piece: str, may_stop: bool) -> str:
        """Add text; return what may be shown, ending the choice if a stop string is complete."""
        known = len(self._held)
        text = self._held + piece
        found = self._first_stop(text, known) if may_stop and piece else None
        if found is not None:
            begin, end = found
            self.finish, self.stop_reason, self._held = FinishReason.STOP, text[begin:end], ""
            return text[: end if self._rules.include_stop else begin]
        keep = self._held_back(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _first_stop(self, text: str, known: int) -> tuple[int, int] | None:
        """The stop that is complete first, reading by character; the longest among equals.

        Only stops that end in text beyond ``known`` count: this makes the answer independent
        of how tokens cut the text.
        """
        found = []
        for stop in self._rules.stops:
            begin = text.find(stop, max(0, known - len(stop) + 1))
            if begin >= 0:
                found.append((begin + len(stop), begin))
        if not found:
            return None
        end, begin = min(found)
        return begin, end

    def _held_back(self, text: str) -> int:
        """Length of the longest suffix that could still become a stop string."""
        longest = max(map(len, self._rules.stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            suffix = text[-length:]
            if any(len(stop) > length and stop.startswith(suffix) for stop in self._rules.stops):
                return length
        return 0

    def _finish(self, reason: FinishReason, last: str = "") -> str:
        """End the choice; what was held back is text after all."""
        self.finish = reason
        text = self._held + last + self._decoding.end()
        self._held = ""
        return text
