"""Which page of the pool belongs to which request."""

from __future__ import annotations


class PageAllocator:
    """Hands out the pages of one pool.

    A request is opened with the most tokens it may ever hold. That many pages are promised to it,
    so a request that was let in can always grow; pages are taken only when tokens need them.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        if pages < 1 or page_size < 1:
            raise ValueError(
                f"A pool needs at least one page of one row, got {pages} of {page_size}."
            )
        self.page_size = page_size
        self.pages = pages
        self.free = list(range(pages - 1, -1, -1))
        self.owned: dict[int, list[int]] = {}
        self.promised: dict[int, int] = {}

    def pages_for(self, tokens: int) -> int:
        """Return the number of pages that hold `tokens`."""
        return -(-tokens // self.page_size)

    def open(self, request: int, max_tokens: int) -> bool:
        """Promise pages for `max_tokens`, or return False while others hold too many."""
        if request in self.promised:
            raise ValueError(f"Request {request} is already open.")
        need = self.pages_for(max_tokens)
        if need > self.pages:
            raise ValueError(
                f"Request {request} needs {need} pages of {self.page_size} tokens, but the pool "
                f"has {self.pages}."
            )
        if sum(self.promised.values()) + need > self.pages:
            return False
        self.promised[request] = need
        self.owned[request] = []
        return True

    def grow(self, request: int, tokens: int) -> None:
        """Take pages until the request can hold `tokens` in all."""
        owned = self.owned[request]
        need = self.pages_for(tokens)
        if need > self.promised[request]:
            raise ValueError(f"Request {request} grows past the pages that it was promised.")
        while len(owned) < need:
            owned.append(self.free.pop())

    def close(self, request: int) -> None:
        """Give every page of the request back."""
        self.free.extend(reversed(self.owned.pop(request)))
        del self.promised[request]

    def row(self, request: int, width: int) -> list[int]:
        """Return the request's block-table row; entries it does not own yet are -1."""
        owned = self.owned[request]
        return owned + [-1] * (width - len(owned))
