"""What can be set of `Grpo`."""

from dataclasses import dataclass

from pellucid.errors import ConfigError
from pellucid.train.grpo_losses import Advantage, Denominator
from pellucid.train.rewards import check_reward

MAX_COMPLETIONS = 1024
"""The engine draws no more samples of a prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GrpoOptions:
    """Reinforcement learning from rewards of whole answers; Shao et al. 2024, arXiv:2402.03300."""

    rewards: tuple[str, ...] = ()
    """What answers are worth, added up: registered names, such as "exact_match", or "module:function". Online only."""
    reward_timeout_s: float = 10.0
    """Seconds that one reward may take over one answer."""
    reward_workers: int = 2
    """Processes of each rank that rewards run in."""
    completions: int = 8
    """Answers to each prompt, 2 to 1024: the group. Online only; of stored rollouts a group is what is stored."""
    max_tokens: int = 256
    """Tokens of an answer at most, less where the window ends; also the divisor of denominator "constant"."""
    temperature: float = 1.0
    """Of sampling, and of every log-probability in the loss."""
    kv_gb: float = 1.0
    """Keys and values of a rollout, 10^9 bytes at most, freed behind it; answers that do not fit wait."""
    updates: int = 1
    """Optimizer steps that learn from the same answers."""
    advantage: Advantage = "grpo"
    """"grpo" divides by the standard deviation of a group's rewards, "dr_grpo" (arXiv:2503.20783) does not."""
    denominator: Denominator = "sequence"
    """A mean over the answers of their mean over tokens; "token": over all tokens alike (arXiv:2503.14476); "constant": the sum
    of each answer over max_tokens (Dr. GRPO, arXiv:2503.20783)."""
    clip_low: float = 0.2
    """A ratio below 1 - clip_low gets no gradient from an answer that is worse than its group."""
    clip_high: float = 0.2
    """A ratio above 1 + clip_high gets none from one that is better."""
    kl_coef: float = 0.04
    """Weight of the divergence from the reference; 0: no reference is held."""
    reference_model: str = ""
    """The reference; "": the model as it is before the first step, with [lora] the base without the adapter."""
    reference_every: int = 0
    """Optimizer steps after which the reference becomes the model as it is then; 0: never."""

    def __post_init__(self) -> None:
        for name in ("updates", "max_tokens", "reward_workers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"strategy.{name} must be at least 1, got {getattr(self, name)}")
        if self.completions < 2:
            raise ConfigError(
                f"strategy.completions is {self.completions}, and an answer is only better or worse than others to its prompt; "
                "take at least 2"
            )
        if self.completions > MAX_COMPLETIONS:
            raise ConfigError(
                f"strategy.completions must be at most {MAX_COMPLETIONS}, got {self.completions}; larger groups are not drawn"
            )
        for name in ("temperature", "reward_timeout_s", "kv_gb"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"strategy.{name} must be positive and finite, got {getattr(self, name)}")
        for name in ("kl_coef", "clip_high"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"strategy.{name} must be finite and not negative, got {getattr(self, name)}")
        if not 0 <= self.clip_low <= 1:
            raise ConfigError(f"strategy.clip_low must be in [0, 1], got {self.clip_low}")
        if self.reference_every < 0 or self.reference_every % self.updates:
            raise ConfigError(
                f"strategy.reference_every is {self.reference_every} and must be a multiple of strategy.updates "
                f"({self.updates}): a reference stays as it is while steps learn from the same answers"
            )
        if self.reference_every and (self.reference_model or not self.kl_coef):
            key = "reference_model" if self.reference_model else "kl_coef"
            raise ConfigError(
                f"strategy.reference_every is {self.reference_every} and strategy.{key} is {getattr(self, key)!r}: only a copy of "
                f"the model itself can follow it; set reference_every to 0"
            )
        for name in self.rewards:
            check_reward(name)
