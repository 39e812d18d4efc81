"""What each tenant has in flight, and had within a minute, of this gateway process.

Gateways of several processes count each for itself: together they let through as many times as
much. A count that they share would need an answer from elsewhere before each request.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from stepserve.core.request import Request
from stepserve.gateway.errors import APIError, try_again
from stepserve.gateway.tenants import Tenant


@dataclass(slots=True)
class Spent:
    """What was spent and has not flowed off yet, at ``limit`` a minute."""

    amount: float = 0.0
    at_s: float = 0.0

    def wait_s(self, more: float, limit: int, now_s: float) -> float:
        """Seconds until there is room for more; 0 if there is now."""
        if not limit:
            return 0.0
        self.amount = max(0.0, self.amount - (now_s - self.at_s) * limit / 60.0)
        self.at_s = now_s
        return max(0.0, self.amount + more - limit) * 60.0 / limit


@dataclass(slots=True)
class Use:
    """Of one tenant."""

    requests: int = 0
    tokens: int = 0
    requests_spent: Spent = field(default_factory=Spent)
    tokens_spent: Spent = field(default_factory=Spent)


def tokens_of(request: Request) -> int:
    """What a request may take at most."""
    return request.prompt_tokens + request.max_output_tokens


class Limits:
    """Lets requests of tenants in, or says when to come back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._uses: dict[str, Use] = {}

    def use(self, tenant: str) -> Use:
        """What a tenant has in flight."""
        return self._uses.setdefault(tenant, Use())

    def admit(self, tenant: Tenant, requests: Iterable[Request]) -> None:
        """Count requests in, all or none.

        Raises APIError: 429 where they would pass a limit now, 403 where they always would.
        """
        costs = [tokens_of(request) for request in requests]
        count, tokens = len(costs), sum(costs)
        self._check_ever(tenant, count, tokens)
        use, now_s = self.use(tenant.name), self._clock()
        if 0 < tenant.requests_in_flight < use.requests + count:
            limit = tenant.requests_in_flight
            raise limited("requests_in_flight", f"{use.requests} of {limit} are in flight")
        if 0 < tenant.tokens_in_flight < use.tokens + tokens:
            what = f"{use.tokens} of {tenant.tokens_in_flight} tokens are in flight"
            raise limited("tokens_in_flight", f"{what}, and this needs {tokens}")
        wait_s = use.requests_spent.wait_s(count, tenant.requests_per_minute, now_s)
        if wait_s:
            what = f"more than {tenant.requests_per_minute} requests a minute"
            raise limited("requests_per_minute", what, wait_s)
        wait_s = use.tokens_spent.wait_s(tokens, tenant.tokens_per_minute, now_s)
        if wait_s:
            what = f"more than {tenant.tokens_per_minute} tokens a minute; this needs {tokens}"
            raise limited("tokens_per_minute", what, wait_s)
        use.requests += count
        use.tokens += tokens
        use.requests_spent.amount += count
        use.tokens_spent.amount += tokens

    def _check_ever(self, tenant: Tenant, count: int, tokens: int) -> None:
        for name, needed, param in (
            ("requests_in_flight", count, "n"),
            ("requests_per_minute", count, "n"),
            ("tokens_in_flight", tokens, "max_tokens"),
            ("tokens_per_minute", tokens, "max_tokens"),
        ):
            limit = getattr(tenant, name)
            if 0 < limit < needed:
                raise APIError(403, f"needs {needed}; your {name} are {limit}", param=param)

    def end(self, request: Request, output_tokens: int, refused: bool) -> None:
        """A request is over; what it did not take of its limit is given back, all if refused."""
        use = self.use(request.tenant)
        use.requests -= 1
        use.tokens -= tokens_of(request)
        unused = tokens_of(request) if refused else request.max_output_tokens - output_tokens
        use.tokens_spent.amount = max(0.0, use.tokens_spent.amount - max(0, unused))
        use.requests_spent.amount = max(0.0, use.requests_spent.amount - refused)


def limited(limit: str, why: str, after_s: float = 1.0) -> APIError:
    """429 for a tenant that is at a limit: when to come back, and which it is."""
    headers = try_again(after_s)
    return APIError(429, f"{limit}: {why}", code="rate_limit_exceeded", headers=headers)
