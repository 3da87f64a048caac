"""What the scheduler moves about: one sample of a request on its way, its part of a forward, and the plan of a step."""

from dataclasses import dataclass, field

from torch import Tensor

from pellucid.inference.constraints import ConstraintState
from pellucid.inference.request import Alternatives, FinishReason, Request, TokenLogprob


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """One sample of a request on its way."""

    request: Request
    choice: int
    """Which of the request's ``n``."""
    seed: int
    max_new: int
    number: int
    """Order of arrival."""
    tokens: list[int]
    """Prompt and answer."""
    salt: str = ""
    """Only sequences with the same one share blocks."""
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    """Leading tokens whose keys and values are in the blocks."""
    num_published: int = 0
    """Leading blocks that others can find."""
    last_turn: int = 0
    """When a chunk of what it knows was last read, counted over all chunks; those that wait longest are next."""
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[Alternatives] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: FinishReason | None = None
    forks: list["Sequence"] = field(default_factory=list)
    """Further samples, which start where this one's prompt has been read."""
    constraint: ConstraintState | None = None
    """Where the request's constraint stands."""
    saved: list[Tensor] | None = None
    """Content of the blocks of a sequence that was pre-empted by copying out."""
    draft: list[int] = field(default_factory=list)
    """Guessed next tokens, to be checked in this step."""

    @property
    def places(self) -> int:
        """It runs, or will, with the samples that start where its prompt has been read."""
        return 1 + len(self.forks)

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether the log-probabilities of its prompt are asked for, and not all known."""
        wanted = self.request.params.prompt_logprobs is not None
        return wanted and len(self.prompt_logprobs or ()) < self.num_prompt

    @property
    def num_prompt(self) -> int:
        return len(self.request.tokens)

    @property
    def output(self) -> list[int]:
        """The new ids."""
        return self.tokens[self.num_prompt :]

    @property
    def admitted(self) -> int:
        """The longest that it can become; dynamic rotary frequencies are fixed from it."""
        return self.num_prompt + self.max_new

    @property
    def decodes(self) -> bool:
        """Whether only the token drawn last is not computed yet."""
        return self.num_computed == len(self.tokens) - 1 and len(self.tokens) > self.num_prompt


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``start ... start + count`` of a sequence, its draft included, in one forward."""

    sequence: Sequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """Whether it ends what is known of the sequence, so that the next token is drawn."""
        return self.start + self.count >= len(self.sequence.tokens)


@dataclass(slots=True)
class StepPlan:
    """What one step does."""

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Blocks to copy first, (source, target): copy-on-write."""
    reused: dict[str, int] = field(default_factory=dict)
    """Prompt tokens of newly admitted requests that were in the cache."""
    preempted: list[str] = field(default_factory=list)
    restored: list[tuple[list[Tensor], list[int]]] = field(default_factory=list)
    """Saved contents to put into blocks first."""
