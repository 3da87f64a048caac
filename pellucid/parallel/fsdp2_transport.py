"""torch's ``fully_shard`` moves its bytes through these. Apart from the executor: importing torch's engine takes half a second.

W ranks.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from pellucid.errors import TrainingError
from pellucid.parallel import comm
from pellucid.parallel.whole import section_numel


class UnitTransport:
    """Stands between torch's engine and the process group for one unit: torch asks for buffers, then for the transfer.

    Args:
        parameters: as torch has sharded them, by name.
        tag: what the ledger's tags begin with.
    """

    def __init__(self, path: str, parameters: Mapping[str, nn.Parameter], tag: str) -> None:
        self.path, self.parameters, self.tag = path or "root", parameters, tag

    @property
    def names(self) -> Sequence[str]:
        return list(self.parameters)

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class UnitGather(UnitTransport, AllGather):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        tag = f"{self.tag}/{self.path}"
        comm.all_gather(input_tensor, output_tensor, tag=tag, owner=self.names, group=group).wait()


class UnitScatter(UnitTransport, ReduceScatter):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        assert op == dist.ReduceOp.SUM, "set_force_sum_reduction_for_comms"
        size = comm.world_size(group)
        trained = [p for p in self.parameters.values() if p.requires_grad]
        if input_tensor.numel() != size * sum(section_numel(p.shape, size) for p in trained):
            raise TrainingError(  # torch leaves out what has none, and ranks would add gradients of different parameters
                f"a backward through {self.path} gave no gradient for some of its parameters ({', '.join(self.names)}); "
                "fsdp2 needs one for each on every rank: freeze what is not used, or choose zero3"
            )
        tag = f"{self.tag}/{self.path}"
        comm.reduce_scatter(input_tensor, output_tensor, tag=tag, owner=self.names, group=group).wait()
