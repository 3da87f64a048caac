"""The stream of documents: 70 % stories, 20 % conversations about stories, 10 % arithmetic, by number."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import log
from random import Random
from typing import Literal, NamedTuple

from pellucid.data.samples import arithmetic, chats
from pellucid.data.samples.stories import tell
from pellucid.errors import ConfigError

Kind = Literal["story", "chat", "arithmetic"]
SHARES: tuple[tuple[Kind, float], ...] = (("story", 0.7), ("chat", 0.2), ("arithmetic", 0.1))


@dataclass(frozen=True, slots=True)
class Sample:
    """One document: plain ``text``, or ``messages`` for the chat template; the other is None.

    Attributes:
        nats: -log of the probability with which the generator makes exactly this document. The mean of it over the
            tokens of many documents is the loss that no model can go below.
    """

    kind: Kind
    text: str | None
    messages: chats.Messages | None
    nats: float

    @property
    def size(self) -> int:
        """Bytes of text in the document, which is all ASCII; roles and control tokens do not count."""
        return sum(map(len, self.strings()))

    def strings(self) -> list[str]:
        """The text, or the content of each message."""
        if self.text is not None:
            return [self.text]
        return [message["content"] for message in self.messages or ()]


def stories(size_bytes: int, seed: int = 0) -> Iterator[Sample]:
    """Documents until their sizes add up to ``size_bytes``; the last one may go beyond it.

    The same seed gives the same documents on every machine and Python version, and a smaller size a prefix of them.
    No document has a hero together with an object of a held-out pair, or a held-out problem of arithmetic.

    Raises:
        ConfigError: ``size_bytes`` is not positive.
    """
    if size_bytes <= 0:
        raise ConfigError(f"sample:stories: size must be positive, got {size_bytes} bytes; a few MB make a small model")
    return _stories(size_bytes, Random(f"sample:stories/{seed}"))


def _stories(size_bytes: int, rng: Random) -> Iterator[Sample]:
    while size_bytes > 0:
        sample = _sample(rng)
        yield sample
        size_bytes -= sample.size


def _sample(rng: Random) -> Sample:
    at = rng.random()
    (story, story_share), (chat, chat_share), (sums, sums_share) = SHARES
    if at < story_share:
        told = tell(rng)
        return Sample(story, told.text, None, told.nats - log(story_share))
    if at < story_share + chat_share:
        messages, nats = chats.story_chat(rng)
        return Sample(chat, None, messages, nats - log(chat_share))
    nats = log(2) - log(sums_share)
    if rng.random() < 0.5:
        messages, nats_chat = chats.arithmetic_chat(rng)
        return Sample(sums, None, messages, nats + nats_chat)
    text, nats_text = arithmetic.worksheet(rng)
    return Sample(sums, text, None, nats + nats_text)


class Entropy(NamedTuple):
    """Mean of `Sample.nats`, the limit of the loss."""

    per_document: float
    per_word: float
    per_byte: float


def entropy_nats(num_samples: int = 1000, seed: int = 0) -> Entropy:
    """An estimate of the corpus's entropy from ``num_samples`` documents."""
    rng = Random(f"sample:stories/entropy/{seed}")
    samples = [_sample(rng) for _ in range(num_samples)]
    nats = sum(sample.nats for sample in samples)
    words = sum(len(string.split()) for sample in samples for string in sample.strings())
    return Entropy(nats / num_samples, nats / words, nats / sum(sample.size for sample in samples))
