"""Which block of the cache holds which tokens: allocation, sharing of prefixes, eviction.

A block has room for the keys and values of ``block_size`` tokens in every layer. Full blocks stand in a tree, in which the
path from a root spells the tokens before them: a request finds what it shares with earlier ones by comparing tokens, never
by a hash. A block is free, cached (in the tree, and nobody's), or held (by sequences, as often as they refer to it).
"""

import heapq
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

Key = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Node:
    """A full block in the tree."""

    key: Key
    """The tokens in the block."""
    block: int
    parent: "Node | None"
    children: dict[Key, "Node"] = field(default_factory=dict)
    used: int = 0
    """When a sequence last held it, in ticks of the pool."""


class BlockPool:
    """Hands out blocks ``1 ... num_blocks``; block 0 is nobody's and takes what padding writes.

    Args:
        reuse: keep full blocks for later requests; False frees them at once.
    """

    def __init__(self, num_blocks: int, block_size: int, *, reuse: bool = True) -> None:
        assert num_blocks >= 1 and block_size >= 1
        self.num_blocks, self.block_size, self.reuse = num_blocks, block_size, reuse
        self.evictions = 0
        self._free = list(range(num_blocks, 0, -1))
        self._holders = [0] * (num_blocks + 1)
        self._nodes: dict[int, Node] = {}
        self._roots: dict[str, Node] = {}
        self._idle: list[tuple[int, int]] = []
        """A heap of (used, block) of leaves that nobody holds; entries may be out of date."""
        self._num_cached = 0
        self._tick = 0

    @property
    def num_free(self) -> int:
        """Blocks without content."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that hold a prefix for later, and that can be evicted."""
        return self._num_cached

    @property
    def num_held(self) -> int:
        """Blocks of running sequences."""
        return self.num_blocks - self.num_free - self.num_cached

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could give."""
        return self.num_free + self.num_cached

    def match(self, tokens: SequenceOf[int], salt: str = "") -> list[int]:
        """The blocks of the longest cached prefix of ``tokens``, now held by the caller too.

        Args:
            salt: only requests with the same one share blocks.
        """
        found: list[int] = []
        node = self._roots.get(salt)
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            node = node.children.get(tuple(tokens[start : start + self.block_size])) if node is not None else None
            if node is None:
                break
            found.append(node.block)
        self.hold(found)
        return found

    def allocate(self, count: int) -> list[int] | None:
        """So many blocks for the caller alone, evicting the least recently used prefixes if need be; None if there are not."""
        if count > self.num_available:
            return None
        while len(self._free) < count:
            self._evict()
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._holders[block] = 1
        return blocks

    def hold(self, blocks: SequenceOf[int]) -> None:
        """One more sequence refers to these."""
        for block in blocks:
            if self._holders[block] == 0:
                assert block in self._nodes, f"block {block} is free"
                self._num_cached -= 1
            self._holders[block] += 1

    def release(self, blocks: SequenceOf[int]) -> None:
        """One sequence fewer refers to these: the only way back, whatever ended it."""
        self._tick += 1
        for block in reversed(blocks):  # children first, so that a whole idle path can be evicted from its leaf
            assert self._holders[block] > 0, f"block {block} is nobody's"
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._retire(block)

    def is_shared(self, block: int) -> bool:
        """Whether writing into the block would change it for somebody else."""
        return self._holders[block] > 1 or block in self._nodes

    def insert(self, tokens: SequenceOf[int], blocks: list[int], salt: str = "") -> None:
        """Make the full blocks of a sequence known to later requests.

        Where the same tokens are there already, the sequence's block is given back and replaced in ``blocks`` by the one that
        is there: then whoever holds a block holds all before it.
        """
        if not self.reuse:
            return
        node = self._roots.setdefault(salt, Node((), 0, None))
        for i in range(min(len(blocks), len(tokens) // self.block_size)):
            key = tuple(tokens[i * self.block_size : (i + 1) * self.block_size])
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(key, blocks[i], node)
                self._nodes[blocks[i]] = child
            elif child.block != blocks[i]:
                self.hold([child.block])
                self.release([blocks[i]])
                blocks[i] = child.block
            node = child

    def states(self) -> str:
        """A letter for each block, in order: "f" free, "c" cached, "h" held."""
        return "".join(
            "h" if count else "c" if block in self._nodes else "f"
            for block, count in enumerate(self._holders)
            if block > 0
        )

    def forget(self) -> None:
        """Free every cached block."""
        while self._num_cached:
            self._evict()

    def check(self) -> None:
        """AssertionError where the books do not agree; for tests."""
        held = sum(count > 0 for count in self._holders)
        cached = sum(self._holders[block] == 0 for block in self._nodes)
        assert (held, cached) == (self.num_held, self.num_cached), (held, cached, self.num_held, self.num_cached)
        assert self.num_free + self.num_cached + self.num_held == self.num_blocks
        assert len(set(self._free)) == len(self._free) and not set(self._free) & set(self._nodes)
        assert all(self._holders[block] == 0 for block in self._free)
        for block, node in self._nodes.items():
            assert node.block == block and node.parent is not None and node.parent.children[node.key] is node

    def _retire(self, block: int) -> None:
        node = self._nodes.get(block)
        if node is None:
            self._free.append(block)
            return
        self._num_cached += 1
        node.used = self._tick
        if not node.children:
            self._push(node)

    def _push(self, node: Node) -> None:
        heapq.heappush(self._idle, (node.used, node.block))
        if len(self._idle) > 4 * self.num_blocks + 64:  # mostly out of date: where nothing is evicted nobody pops them
            leaves = (n for n in self._nodes.values() if not n.children and self._holders[n.block] == 0)
            self._idle = [(n.used, n.block) for n in leaves]
            heapq.heapify(self._idle)

    def _evict(self) -> None:
        """Free the least recently used leaf that nobody holds."""
        while True:
            used, block = heapq.heappop(self._idle)
            node = self._nodes.get(block)
            if node is not None and node.used == used and not node.children and self._holders[block] == 0:
                break
        parent = node.parent
        assert parent is not None
        del parent.children[node.key], self._nodes[block]
        self._num_cached -= 1
        self._free.append(block)
        self.evictions += 1
        if parent.parent is not None and not parent.children and self._holders[parent.block] == 0:
            self._push(parent)
