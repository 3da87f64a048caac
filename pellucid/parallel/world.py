"""Where this process runs."""

import torch

from pellucid.errors import ConfigError


def resolve_device(name: str) -> torch.device:
    """A device by name; "auto" is cuda where there is one, else cpu.

    Raises:
        ConfigError: no such device here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device
