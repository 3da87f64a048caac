"""A model with everything that makes sharding hard."""

import torch
from torch import nn


class Net(nn.Module):
    """Odd sizes, a frozen layer, a parameter that is a single number, and one that only some inputs reach."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first, self.frozen, self.last = nn.Linear(19, 67), nn.Linear(67, 67), nn.Linear(67, 7)
        self.scale, self.seldom = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.zeros(70))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        self.frozen.requires_grad_(False)

    def forward(self, x, all_of_it=True):
        y = self.last(torch.tanh(self.frozen(self.first(x)))) * self.scale
        return y + self.seldom.sum() if all_of_it else y
