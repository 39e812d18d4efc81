"""What the requests of a benchmark ask for: problems with known answers, or text of a length."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from stepserve.core.errors import FieldError
from stepserve.engine.bundled.tasks import Problem, correct, sample
from stepserve.sim.workload import Arrival

BUNDLED_MAX_TOKENS = 96
"""Output limit for bundled problems: the bundled model's own; right answers are under 60."""

_TOKEN = re.compile(r"[A-Za-z]+|\d|[^\sA-Za-z\d]")
"""A token of the bundled model; about a token of any other."""


@dataclass(frozen=True, slots=True)
class Job:
    """One question. ``expected_tokens`` is the length of the answer as far as it is foreseen."""

    prompt: str
    max_tokens: int
    expected_tokens: int
    problem: Problem | None = None

    def correct(self, text: str) -> bool | None:
        """Whether an answer is right; ``None`` where no answer is."""
        return None if self.problem is None else correct(self.problem, text)


def bundled_jobs(count: int, seed: int, max_tokens: int | None) -> list[Job]:
    """Held-out problems of the bundled model's tasks, in their published mix."""
    rng = random.Random(seed)
    problems = [sample(rng, evaluation=True) for _ in range(count)]
    limit = BUNDLED_MAX_TOKENS if max_tokens is None else max_tokens
    return [Job(p.prompt, limit, len(_TOKEN.findall(p.response)), p) for p in problems]


def text_jobs(
    arrivals: Sequence[Arrival],
    seed: int,
    prompt_tokens: int | None,
    max_tokens: int | None,
    long_prompts: tuple[float, int] | None = None,
) -> list[Job]:
    """Readable text of each arrival's length, or of the lengths given where it states none.

    ``long_prompts``: a share of the requests has prompts of so many tokens instead.

    Readable, because a diffusion model does not converge on random tokens and would be timed
    at its step cap. Raises FieldError when a length is neither in the arrivals nor given.
    """
    rng = random.Random(seed)
    share, long_tokens = long_prompts or (0.0, 0)
    words = [word for _ in range(_STATEMENTS) for word in sample(rng).prompt.split(" ")]
    jobs = []
    for arrival in arrivals:
        asked = _length(arrival.prompt_tokens, prompt_tokens, "--prompt-tokens")
        if share and rng.random() < share:
            asked = long_tokens
        answer = _length(arrival.output_tokens, max_tokens, "--max-tokens")
        start = rng.randrange(len(words))
        text = (words[start:] + words * (asked // len(words) + 1))[:asked]
        jobs.append(Job(" ".join(text), answer, answer))
    return jobs


_STATEMENTS = 1000
"""Problem statements that texts are cut from, one word with its full stop for each token."""


def _length(stated: int | None, given: int | None, option: str) -> int:
    if stated is None and given is None:
        raise FieldError(option, "needed: the arrivals carry no lengths")
    return max(1, stated if stated is not None else given or 0)
