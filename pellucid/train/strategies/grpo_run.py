"""`Grpo` and the run that it is in: what is refused, what is logged, and what a checkpoint keeps."""

from typing import TYPE_CHECKING, Any

from pellucid.config import RunConfig
from pellucid.errors import ConfigError
from pellucid.parallel.plan import Message, Rollout
from pellucid.train.callbacks import Callback, StepInfo
from pellucid.train.experience import num_bytes, summary
from pellucid.train.ranks import NOTHING_BYTES
from pellucid.train.strategies.grpo_options import GrpoOptions

if TYPE_CHECKING:
    from pellucid.train.loop import Trainer
    from pellucid.train.setup import Setup
    from pellucid.train.strategies.grpo import Grpo


def check_run(setup: "Setup", options: GrpoOptions, *, online: bool) -> None:
    """`ConfigError` for what GRPO cannot do in this run."""
    config = setup.config
    if setup.executor.shards_weights:
        raise ConfigError(
            f"parallel.mode is {config.parallel.mode}, which shards weights, and grpo needs them whole on each rank to answer "
            'prompts; choose "zero2" (gradients and optimizer state sharded), "zero1", "ddp" or "none"'
        )
    if config.model.dropout or (config.lora is not None and config.lora.dropout):
        key = "model.dropout" if config.model.dropout else "lora.dropout"
        raise ConfigError(
            f"{key} is not 0, and grpo compares the model with the sampler, which drops nothing; set {key} to 0"
        )
    if config.train.compile:
        raise ConfigError("train.compile is on, and rows of answers are of another length in each step; leave it off")
    if options.reference_every and config.lora is not None:
        raise ConfigError(
            f"strategy.reference_every is {options.reference_every}, and with [lora] the reference is the base, which stays as it "
            "is; set it to 0"
        )
    if online and not options.rewards:
        raise ConfigError(
            'strategy.rewards is empty, and prompts are answered for rewards; name some, such as ["exact_match"] or '
            '["mymodule:reward"]'
        )
    if online and setup.tokenizer is None:
        raise ConfigError("grpo has rewards read answers as text, and the data has no tokenizer; prepare it with one")
    if not online and options.rewards:
        raise ConfigError(
            f"strategy.rewards is {', '.join(options.rewards)}, and the data has answers with rewards of their own; leave it out, "
            "or prepare prompts without responses"
        )


def plan_rollout(options: GrpoOptions, config: RunConfig, prompts: int) -> Rollout:
    """What ranks tell each other, each of ``prompts`` at most.

    How long answers become nobody knows before, so theirs is what it would be if all filled the window; how many stored
    ones there are only the data says.
    """
    most = None
    if options.rewards:
        window, answers = config.data.context or config.model.max_position_embeddings, prompts * options.completions
        known = (3 if options.kl_coef == 0 else 4) if options.updates > 1 else 0  # of `SCORES`, with the reference's
        drawn = answers * min(options.max_tokens, window - 1)
        most = num_bytes(answers=answers, rewards=len(options.rewards), tokens=answers * window, scores=known * drawn)
    told = (Message("rollout/drawn", NOTHING_BYTES, True), Message("rollout/answers", most, False))
    return Rollout(options.updates, told)


class GrpoState(Callback):
    """Keeps `Grpo.state` in checkpoints, writes rollouts into the log, and ends the reward processes with the run.

    A line ``{"event": "rollout", "step", ...}`` has what `summary` says, ``seconds`` and ``tokens_per_s`` of drawing and
    judging, and ``update_tokens_per_s`` of the rest of the step.
    """

    name = "grpo"

    def __init__(self, strategy: "Grpo") -> None:
        self.strategy = strategy

    def on_optimizer_step(self, trainer: "Trainer", info: StepInfo) -> None:
        strategy, seconds = self.strategy, self.strategy.rollout_seconds
        if seconds is None:
            return
        answers = [answer for group in strategy.answers.values() for answer in group]
        names = strategy.options.rewards
        drawn, read = sum(a.num_learnt for a in answers), sum(len(a.ids) - 1 for a in answers)
        trainer.log({
            "event": "rollout", "step": info.step, "answers": len(answers), **summary(answers, names), "seconds": seconds,
            "tokens_per_s": drawn / seconds, "update_tokens_per_s": read / max(info.seconds - seconds, 1e-9),
        })  # fmt: skip

    def on_train_end(self, trainer: "Trainer", info: Any) -> None:
        self.strategy.close()

    def on_error(self, trainer: "Trainer", info: BaseException) -> None:
        self.strategy.close()

    def state_dict(self) -> dict[str, Any]:
        return self.strategy.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.strategy.load_state(state)
