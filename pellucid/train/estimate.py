"""What a run will need, before its first step."""

import math
from dataclasses import dataclass, replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pellucid.config import RunConfig, options_of
from pellucid.data.batches import Windows
from pellucid.data.records import PackedRecords
from pellucid.errors import ConfigError
from pellucid.model import Transformer
from pellucid.model.lora import add_lora
from pellucid.parallel import comm
from pellucid.parallel.layout import ParameterInfo, parameter_infos
from pellucid.parallel.plan import modes
from pellucid.registry import lookup
from pellucid.train.activations import ShapeModel, known_shape, peak_activation_bytes
from pellucid.train.memory import GIB, available_bytes
from pellucid.train.precision import matmul_gflops
from pellucid.train.setup import Setup, context_of, plan_mode
from pellucid.train.strategies import Strategy, rows_of

EFFICIENCY = 0.55
"""Share of the matrix-product speed that whole training steps reach."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Needs of a run."""

    parameters: int
    state_bytes: int
    """Weights, gradients and what the optimizer keeps, on this rank."""
    activation_bytes: int
    """Of one micro-batch, at its peak; `peak_activation_bytes`."""
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
    """Memory from a run on shapes, time from the model's arithmetic and a probe of the matrix-product speed."""
    config = setup.config
    context = context_of(config)
    tokens = config.train.global_batch * context * rows_of(setup.strategy)
    seconds = None
    if setup.device.type == "cpu":
        speed = matmul_gflops(setup.dtype) * 1e9 * EFFICIENCY
        whole = Transformer(config.model, device="meta")  # a rank may hold rows alone
        seconds = setup.total_steps * tokens / comm.world_size() * whole.flops_per_token(context) / speed
    kind = str(setup.dtype).removeprefix("torch.")
    return Estimate(
        parameters=sum(math.prod(shape) for shape, _ in setup.executor.weight_shapes().values()),
        state_bytes=_state_bytes(config, setup.strategy),
        activation_bytes=peak_activation_bytes(
            config, strategy=setup.strategy, device=setup.device, documents=_documents_in_a_row(setup)
        ),
        available_bytes=available_bytes(setup.device),
        seconds=seconds,
        steps=setup.total_steps,
        tokens_per_step=tokens,
        where=f"{setup.device} in {kind}" + (", compiled" if config.train.compile else ""),
    )


def planned_parameters(config: RunConfig, *, vocab_size: int = 0) -> list[ParameterInfo]:
    """The parameters of ``config.model`` as `plan` wants them, with what ``config.optim`` keeps for each.

    The optimizer takes one step on tensors without storage, so that any registered one is counted as it is; one that cannot
    step without values is taken to keep two tensors, as Adam does. Only state of the parameter's own shape counts: a number
    of steps is no memory to speak of.

    Args:
        vocab_size: where ``config.model.vocab_size`` is 0.

    Raises:
        ConfigError: no vocabulary size is known.
    """
    model = ShapeModel(known_shape(config, vocab_size))
    if config.lora is not None:
        add_lora(model, config.lora)
    options = options_of("optimizer", config.optim.name, config.optim.options)
    with FakeTensorMode():
        model.fill(torch.device("cpu"))
        optimizer: torch.optim.Optimizer = lookup("optimizer", config.optim.name).target(
            model, config.optim.lr, options
        )
        infos = parameter_infos(model, optimizer)
        try:
            optimizer.step()
        except RuntimeError:
            return infos
    parameters = dict(model.named_parameters())
    return [replace(info, state_tensors=_state_tensors(optimizer, parameters[info.name])) for info in infos]


def _state_tensors(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> int:
    state = optimizer.state[parameter].values()
    return sum(isinstance(value, torch.Tensor) and value.shape == parameter.shape for value in state)


def _state_bytes(config: RunConfig, strategy: Strategy) -> int:
    """Of this rank; modes that cannot be planned are taken to hold everything."""
    mode = config.parallel.mode if config.parallel.mode in modes() else "none"
    size = comm.world_size()
    micro_batches = max(1, config.train.global_batch // (config.train.micro_batch * size))
    held = plan_mode(
        config, planned_parameters(config), mode, world_size=size, micro_batches=micro_batches, strategy=strategy
    )
    return held.weights_bytes + held.gradients_bytes + held.optimizer_bytes + held.scratch_bytes


def _documents_in_a_row(setup: Setup) -> int:
    """Of mean length, the first one cut off; 1 where a row cannot hold a border, as with one answer a row."""
    if not isinstance(setup.loader.windows, Windows | PackedRecords):
        return 1
    split, context = setup.loader.windows.split, context_of(setup.config)
    if split.num_documents == 1:
        return 1
    return min(context, 1 + math.ceil(context * split.num_documents / split.num_tokens))
