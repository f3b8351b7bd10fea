"""Pages shared between requests whose texts begin alike: a radix tree over whole pages.

Knows: which page holds the keys and values of which tokens after which others, who may be evicted, and hits.
Does not know: requests or slots (scheduler.py), or what the pages hold. Target and drafter use the same page
numbers, so a hit brings the drafter's context along.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from jspark.kv import PageAllocator


@dataclass(eq=False)
class Node:
    """One page in the tree. key: its tokens. used: when it was last matched or inserted."""

    key: tuple[int, ...]
    page: int
    parent: Node | None
    used: int = 0
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)


@dataclass
class CacheStats:
    """Tokens asked for and found since the start, and pages evicted."""

    asked: int = 0
    found: int = 0
    evicted: int = 0


class PrefixCache:
    """The tree. It holds one reference to each of its pages; every request that uses a page holds another.

    lookahead: tokens after a page that its content depends on. An EAGLE-3 drafter's entry for a position is made
    from the token after it, so there the page is shared only when that token agrees too (lookahead 1).
    """

    def __init__(self, allocator: PageAllocator, lookahead: int = 0):
        self.stats = CacheStats()
        self._allocator = allocator
        self._lookahead = lookahead
        self._root = Node((), -1, None)
        self._clock = itertools.count(1)
        # Leaves by age: (used, serial, node). Entries go stale when a leaf is used again or gets a child.
        self._ages: list[tuple[int, int, Node]] = []
        self._serial = itertools.count()
        self._size = 0

    def __len__(self) -> int:
        """Pages in the tree."""
        return self._size

    def _keys(self, tokens: Sequence[int], pages: int) -> list[tuple[int, ...]]:
        size, ahead = self._allocator.page_size, self._lookahead
        pages = min(pages, (len(tokens) - ahead) // size)
        return [tuple(tokens[i * size : (i + 1) * size + ahead]) for i in range(pages)]

    def _touch(self, node: Node) -> None:
        node.used = next(self._clock)
        if not node.children:
            self._push(node)

    def _push(self, node: Node) -> None:
        heapq.heappush(self._ages, (node.used, next(self._serial), node))
        if len(self._ages) > 4 * self._size + 64:
            self._ages = [entry for entry in self._ages if _current(entry)]
            heapq.heapify(self._ages)

    def match(self, tokens: Sequence[int], most: int) -> list[int]:
        """The pages of the longest known beginning of `tokens`, `most` pages at most.

        The caller owns a reference to each and gives it back like a page of its own.
        """
        pages, node = [], self._root
        for key in self._keys(tokens, most):
            child = node.children.get(key)
            if child is None:
                break
            node = child
            self._touch(node)
            pages.append(node.page)
        self._allocator.retain(pages)
        return pages

    def count(self, asked: int, found: int) -> None:
        """Counts a match that was used."""
        self.stats.asked += asked
        self.stats.found += found

    def insert(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Makes the whole pages of `tokens` known; `pages[i]` holds its i-th page.

        A page whose text is known already is left to its owner: the tree keeps the one it has.
        """
        node = self._root
        for key, page in zip(self._keys(tokens, len(pages)), pages, strict=False):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(key, page, node)
                self._allocator.retain([page])
                self._allocator.mark_cached(page)
                self._size += 1
            self._touch(child)
            node = child

    def make_room(self, pages: int) -> bool:
        """Evicts the longest unused pages until `pages` are free; whether that many are."""
        in_use = []
        while self._allocator.free < pages and self._ages:
            entry = heapq.heappop(self._ages)
            node = entry[2]
            if not _current(entry):
                continue
            if self._allocator.references(node.page) > 1:
                in_use.append(entry)
                continue
            self._drop(node)
            self.stats.evicted += 1
        for entry in in_use:
            heapq.heappush(self._ages, entry)
        return self._allocator.free >= pages

    def clear(self) -> int:
        """Forgets everything that no request uses; the number of pages freed."""
        before = self._allocator.free
        self.make_room(self._allocator.capacity)
        return self._allocator.free - before

    def _drop(self, node: Node) -> None:
        assert node.parent is not None
        parent, node.parent = node.parent, None
        del parent.children[node.key]
        self._size -= 1
        self._allocator.unmark_cached(node.page)
        self._allocator.give_back([node.page])
        if parent.parent is not None and not parent.children:
            self._push(parent)


def _current(entry: tuple[int, int, Node]) -> bool:
    """Whether an entry of the ages still speaks of a leaf as it is."""
    used, _, node = entry
    return node.used == used and not node.children and node.parent is not None
