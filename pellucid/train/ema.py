"""A moving average of the weights, beside them.

Polyak & Juditsky 1992. Where a rank holds rows of a weight it averages those rows; where it holds all of it, all.
"""

import torch
from torch import Tensor

from pellucid.errors import CheckpointError
from pellucid.model.moe import BALANCING_BIAS
from pellucid.parallel import Executor
from pellucid.parallel.parts import SavedTensors, check_weights

EMA_WEIGHTS = "ema.safetensors"
"""In a checkpoint: the averages by the weights' names. Weights that are never trained have none."""
EMA_MODEL, EMA_ADAPTER = "model_ema", "adapter_ema"
"""In a run's folder, beside ``model`` and ``adapter``."""


class WeightAverage:
    """``average <- decay * average + (1 - decay) * weight`` after each finished step, in the weights' type.

    It begins at the weights as they are.

    Args:
        executor: prepared; it says what this rank holds.
    """

    def __init__(self, executor: Executor, decay: float) -> None:
        self.executor, self.decay = executor, decay
        moving = {info.name for info in executor.infos if info.trainable or info.name.endswith(BALANCING_BIAS)}
        self.weights = {part.name: part.tensor for part in executor.held_weights() if part.name in moving}
        """What this rank holds of the weights themselves, in their own memory."""
        self.held = {name: weight.clone() for name, weight in self.weights.items()}
        """The same of the average."""

    @torch.no_grad()
    def update(self) -> None:
        """Count a finished step."""
        torch._foreach_lerp_(list(self.held.values()), list(self.weights.values()), 1 - self.decay)

    def whole(self) -> dict[str, Tensor]:
        """What this rank holds of the averaged model: the average, and weights that do not move."""
        return {part.name: part.tensor for part in self.executor.held_weights()} | self.held

    def load(self, saved: SavedTensors) -> None:
        """Continue from a checkpoint of any mode and any number of ranks.

        Raises:
            CheckpointError: it is of other weights; names them.
        """
        shapes = {name: shape for name, (shape, _) in self.executor.weight_shapes().items() if name in self.held}
        try:
            check_weights(saved, shapes)
        except CheckpointError as error:
            raise CheckpointError(f"{EMA_WEIGHTS}: {error}") from error
        for part in self.executor.held_weights():
            if part.name in self.held:
                values = saved.read(part.name, part.start, part.stop)
                self.held[part.name].copy_(values.view(part.tensor.shape))
