"""Guess the next tokens from the sequence's own text: what followed the last few tokens before is tried again.

Saxena 2023, "Prompt Lookup Decoding". A guess costs a row in the forward; only guesses that the model would have drawn anyway
are kept, so that the answer is the same.
"""

from weakref import WeakKeyDictionary

from pellucid.inference.sequence import Sequence

LONGEST, SHORTEST = 3, 2
"""Tokens that must have stood before, tried from the longest."""


class PromptLookup:
    """Called with a sequence that decodes; gives its draft.

    Args:
        count: tokens to guess at most.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._seen: WeakKeyDictionary[Sequence, _Seen] = WeakKeyDictionary()

    def __call__(self, sequence: Sequence) -> list[int]:
        tokens = sequence.tokens
        count = min(self.count, sequence.admitted - len(tokens) - 1)  # the last one may be drawn, never guessed
        if count < 1:
            return []
        seen = self._seen.setdefault(sequence, _Seen())
        seen.read(tokens)
        for length in range(LONGEST, SHORTEST - 1, -1):
            if (after := seen.after.get(tuple(tokens[-length:]))) is not None:
                again = tokens[after : after + count]
                return (again * count)[:count]  # from the end on as if it went round
        return []


class _Seen:
    """Where each few tokens of a sequence stood last, the very end left out; what is known is not looked at again."""

    def __init__(self) -> None:
        self.after: dict[tuple[int, ...], int] = {}
        """To the position that follows them."""
        self._end = 0

    def read(self, tokens: list[int]) -> None:
        for end in range(self._end + 1, len(tokens)):
            for length in range(SHORTEST, min(LONGEST, end) + 1):
                self.after[tuple(tokens[end - length : end])] = end
        self._end = max(self._end, len(tokens) - 1)
