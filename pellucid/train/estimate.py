"""What a run will need, before its first step."""

from dataclasses import dataclass

import torch

from pellucid.errors import ConfigError
from pellucid.train.precision import matmul_gflops
from pellucid.train.setup import Setup, context_of

GIB = 2**30
EFFICIENCY = 0.55
"""Share of the matrix-product speed that whole training steps reach."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Needs of a run."""

    parameters: int
    state_bytes: int
    """Weights, gradients and the optimizer's moments."""
    activation_bytes: int
    """Of one micro-batch, roughly."""
    available_bytes: int | None
    seconds: float | None
    """For all steps; None on devices whose speed is not probed."""
    steps: int
    tokens_per_step: int
    where: str

    def line(self) -> str:
        """One line for a person."""
        memory = f"about {(self.state_bytes + self.activation_bytes) / GIB:.2f} GiB"
        if self.available_bytes is not None:
            memory += f" of {self.available_bytes / GIB:.1f} GiB free"
        parts = [
            f"{self.parameters:,} parameters",
            memory,
            f"{self.steps:,} steps of {self.tokens_per_step:,} tokens",
            self.where,
        ]
        if self.seconds is not None:
            parts.append(f"about {self.seconds / 60:.1f} min")
        return " · ".join(parts)

    def refuse_if_too_large(self) -> None:
        """`ConfigError` where the memory is not there."""
        need = self.state_bytes + self.activation_bytes
        if self.available_bytes is not None and need > self.available_bytes:
            raise ConfigError(
                f"this run needs about {need / GIB:.1f} GiB and {self.available_bytes / GIB:.1f} GiB are free; "
                "lower train.micro_batch or data.context, set train.activation_checkpointing = true, or take a smaller model"
            )


def estimate(setup: Setup) -> Estimate:
    """Memory from shapes, time from the model's arithmetic and a probe of the matrix-product speed."""
    config = setup.config
    context, micro = context_of(config), config.train.micro_batch
    tokens = config.train.global_batch * context
    parameters = setup.model.num_parameters()
    seconds = None
    if setup.device.type == "cpu":
        speed = matmul_gflops(setup.dtype) * 1e9 * EFFICIENCY
        seconds = setup.total_steps * tokens * setup.model.flops_per_token(context) / speed
    kind = str(setup.dtype).removeprefix("torch.")
    return Estimate(
        parameters=parameters,
        state_bytes=16 * parameters,
        activation_bytes=activation_bytes(setup, micro * context, context),
        available_bytes=_available(setup.device),
        seconds=seconds,
        steps=setup.total_steps,
        tokens_per_step=tokens,
        where=f"{setup.device} in {kind}" + (", compiled" if config.train.compile else ""),
    )


def activation_bytes(setup: Setup, tokens: int, context: int) -> int:
    """Kept from forward to backward for one micro-batch of ``tokens``, plus the logits and their gradient."""
    c = setup.config.model
    width = 4 if setup.dtype == torch.float32 else 2
    heads = c.num_attention_heads * c.head_dim
    kv = c.num_key_value_heads * c.head_dim
    residual = 2 * c.hidden_size * 4  # inputs of the two norms, float32
    block = residual + width * (2 * c.hidden_size + 3 * heads + 4 * kv + 4 * c.intermediate_size)
    if setup.config.train.activation_checkpointing:
        kept = c.num_hidden_layers * c.hidden_size * 4 + block
    else:
        kept = c.num_hidden_layers * block
    logits = c.vocab_size * (2 * 4 + width)
    return tokens * (kept + logits)


def _available(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            table = dict(line.split(":", 1) for line in file)
    except OSError:
        return None
    return int(table["MemAvailable"].split()[0]) * 1024
