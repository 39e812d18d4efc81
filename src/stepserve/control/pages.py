"""Page accounting: who holds how many KV pages of one instance."""

from stepserve.core.errors import CapacityError
from stepserve.core.ids import RequestId


def pages_for(tokens: int, page_tokens: int) -> int:
    """Pages that hold ``tokens`` positions."""
    return -(-tokens // page_tokens)


def segment_tokens(full: int, stop: int | None) -> int:
    """Of ``full`` positions of a request, those that a segment up to ``stop`` has to hold."""
    return full if stop is None else min(stop, full)


class PageLedger:
    """Reservations against a fixed number of pages. ``free + held == capacity``, always."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.free = capacity
        self._held: dict[RequestId, int] = {}

    def reserve(self, request_id: RequestId, pages: int) -> None:
        """Hold pages for a request. Raises CapacityError if they are not free."""
        if request_id in self._held:
            raise CapacityError(f"request {request_id} already holds pages")
        if pages > self.free:
            raise CapacityError(f"{pages} pages asked, {self.free} of {self.capacity} free")
        self._held[request_id] = pages
        self.free -= pages

    def resize(self, request_id: RequestId, pages: int) -> bool:
        """Hold that many for a request from now on; ``False``, and no change, if not free."""
        more = pages - self._held[request_id]
        if more > self.free:
            return False
        self._held[request_id] = pages
        self.free -= more
        return True

    def release(self, request_id: RequestId) -> None:
        """Give back all pages of a request; every reservation is released exactly once."""
        self.free += self._held.pop(request_id)

    def __len__(self) -> int:
        """Requests that hold a reservation."""
        return len(self._held)
