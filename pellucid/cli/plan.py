"""`pellucid plan`."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pellucid.cli.output import notice, print_json
from pellucid.config import RunConfig, load_config
from pellucid.errors import ConfigError

if TYPE_CHECKING:
    from pellucid.parallel.plan import ModePlan

VOCAB_SIZE = 8192
"""Where neither the configuration nor data says it."""
LINKS = ("100Gbit/s", "10Gbit/s", "1Gbit/s")
"""Without latency, so that they compare bytes alone."""
GIB, MB = 2**30, 1e6
MOST_RANKS = 1_000_000
"""A plan keeps a few numbers for each."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "plan",
        help="say what each parallel mode holds and sends, before a run",
        description="For every parallel mode: the memory of a rank and the bytes that it sends in an optimizer step, from "
        "shapes alone. Nothing is allocated and no data is read, so that a model for a thousand GPUs is planned on a laptop.",
    )
    parser.add_argument("config", metavar="CONFIG.toml")
    parser.add_argument("--world-size", type=int, required=True, metavar="W", help="ranks")
    parser.add_argument(
        "--link", metavar="SPEED[,LATENCY]", help='also the seconds on this link, such as "25Gbit/s,50us"'
    )
    parser.add_argument("--json", action="store_true", help="one object on stdout")
    parser.set_defaults(run=run, takes_settings=True)


def run(args: argparse.Namespace) -> int:
    """Plan and print."""
    config = with_whole_batch(planned_config(args.config, args.settings), args.world_size)
    links = [*LINKS, args.link] if args.link else list(LINKS)
    facts = plan_facts(config, args.world_size, links)
    if args.json:
        print_json(facts)
    else:
        print_plan(config, facts)
    return 0


def planned_config(path: str, settings: dict[str, str]) -> RunConfig:
    """The configuration, with a vocabulary: its own, or that of its data."""
    config = load_config(path, settings)
    if config.train.init:
        from pellucid.checkpoint.model_folder import find_model, read_config

        config = load_config(path, settings, base_model=read_config(find_model(config.train.init)))
    if config.model.vocab_size:
        return config
    vocab_size = VOCAB_SIZE
    if config.data.path:
        from pellucid.data.index import read_index

        vocab_size = read_index(Path(config.data.path)).vocab_size
    else:
        notice(
            f"neither model.vocab_size nor data.path is set; planned with a vocabulary of {vocab_size:,} "
            "(--model.vocab_size N, or --data.path DATA)"
        )
    return replace(config, model=replace(config.model, vocab_size=vocab_size))


def with_whole_batch(config: RunConfig, world_size: int) -> RunConfig:
    """The configuration with a global batch that ``world_size`` ranks can share, which is said where it is another one."""
    if not 1 <= world_size <= MOST_RANKS:
        raise ConfigError(f"--world-size must be at least 1 and at most {MOST_RANKS:,}, got {world_size}")
    batch, share = config.train.global_batch, config.train.micro_batch * world_size
    if batch % share == 0:
        return config
    whole = math.ceil(batch / share) * share
    notice(
        f"train.global_batch {batch} is not a multiple of train.micro_batch {config.train.micro_batch} x {world_size} ranks, "
        f"which `pellucid train` would refuse; planned with a global batch of {whole:,}"
    )
    return replace(config, train=replace(config.train, global_batch=whole))


def micro_batches(config: RunConfig, world_size: int) -> int:
    """Forwards a rank in one optimizer step."""
    return config.train.global_batch // (config.train.micro_batch * world_size)


def plan_facts(config: RunConfig, world_size: int, links: Sequence[str]) -> dict[str, Any]:
    """What ``--json`` prints: bytes and seconds of rank 0, by mode.

    Mode none is there for one rank only, where it is all that the others amount to; modes whose sums cannot be ordered are
    not there if they should be, and those that shard weights not where the strategy needs them whole.
    """
    accumulation = micro_batches(config, world_size)
    speeds = {link: _link(link) for link in links}
    from pellucid.model.linear import as_elsewhere
    from pellucid.parallel.ordered import ORDERED_MODES
    from pellucid.parallel.plan import modes
    from pellucid.registry import lookup
    from pellucid.train.activations import peak_activation_bytes
    from pellucid.train.estimate import planned_parameters
    from pellucid.train.setup import build_strategy, plan_mode

    lookup("mode", config.parallel.mode)
    device = _device(config)
    whole_weights = getattr(build_strategy(config), "whole_weights", False)
    parameters = planned_parameters(config)
    with as_elsewhere():
        activations = peak_activation_bytes(config, device=device)
    facts: dict[str, Any] = {}
    for mode in modes():
        if mode == "none" and world_size > 1:
            continue
        if config.parallel.reduction == "ordered" and mode not in ORDERED_MODES:
            continue
        if whole_weights and lookup("mode", mode).target.shards_weights:
            continue
        planned = plan_mode(config, parameters, mode, world_size=world_size, micro_batches=accumulation)
        facts[mode] = {
            "weights_bytes": planned.weights_bytes,
            "gradients_bytes": planned.gradients_bytes,
            "optimizer_bytes": planned.optimizer_bytes,
            "scratch_bytes": planned.scratch_bytes,
            "activations_bytes_estimate": activations,
            "step": [asdict(row) for row in planned.step],
            "wire_bytes": planned.wire_bytes,
            "padding_bytes": planned.padding_bytes,
            "seconds_at": {link: _seconds(planned, *speed) for link, speed in speeds.items()},
        } | planned.rollout_json()
    return {"parameters": sum(info.numel for info in parameters), "world_size": world_size, "modes": facts}


def _seconds(planned: "ModePlan", bytes_per_s: float, latency_s: float) -> float:
    """One collective after the other, with nothing to hide behind."""
    return sum(row.count for row in planned.step) * latency_s + planned.wire_bytes / bytes_per_s


def _link(text: str) -> tuple[float, float]:
    from pellucid.parallel.link import Link

    try:
        link = Link.parse(text)
    except ConfigError:
        raise ConfigError(
            f'--link is {text!r}; write a bandwidth and, if you like, a latency: "25Gbit/s,50us"'
        ) from None
    return link.bytes_per_s, link.latency_s


def _device(config: RunConfig) -> Any:
    """That of the run where it is here, else the CPU, whose activations are much the same.

    Raises:
        ConfigError: there is no such device anywhere.
    """
    import torch

    try:
        torch.device("cpu" if config.train.device == "auto" else config.train.device)
    except RuntimeError as error:
        raise ConfigError(f"train.device {config.train.device!r} is unknown: {str(error).splitlines()[0]}") from error
    wants_cuda = config.train.device == "auto" or config.train.device.startswith("cuda")
    return torch.device("cuda" if wants_cuda and torch.cuda.is_available() else "cpu")


def print_plan(config: RunConfig, facts: dict[str, Any]) -> None:
    """Tables: memory of a rank, what it sends in a step, by which collectives, and those of a rollout."""
    ranks, train, modes = facts["world_size"], config.train, facts["modes"]
    context = config.data.context or config.model.max_position_embeddings
    from pellucid.train.setup import build_strategy
    from pellucid.train.strategies import rows_of

    rows_each = rows_of(build_strategy(config))
    print(
        f"{facts['parameters']:,} parameters, {ranks:,} ranks, {train.global_batch * rows_each * context:,} tokens a step: "
        f"{micro_batches(config, ranks):,} x {train.micro_batch * rows_each:,} sequences of {context:,} on each rank"
    )
    memory = []
    for mode, held in modes.items():
        sizes = [held[f"{part}_bytes"] for part in ("weights", "gradients", "optimizer", "scratch")]
        sizes.append(held["activations_bytes_estimate"])
        memory.append([mode, *(f"{size / GIB:,.2f}" for size in (*sizes, sum(sizes)))])
    heads = ["mode", "weights", "gradients", "optimizer", "scratch", "activations", "total"]
    _table("GiB a rank holds at its peak; scratch is what is gathered or on its way", heads, memory)
    links = list(next(iter(modes.values()))["seconds_at"])
    traffic = [
        [mode, f"{held['wire_bytes'] / MB:,.2f}", f"{held['padding_bytes'] / MB:,.2f}"]
        + [f"{seconds:,.3g}" for seconds in held["seconds_at"].values()]
        for mode, held in modes.items()
    ]
    _table(
        "A rank sends in a step, and how long that takes if nothing hides it",
        ["mode", "MB", "MB of padding", *(f"s at {link}" for link in links)],
        traffic,
    )
    rows = [[mode, *row] for mode, held in modes.items() for row in _by_tag(held["step"])]
    if rows:
        _table("Collectives of a step", ["mode", "tag", "op", "count", "bytes", "bytes sent"], rows)
    rollout = next(iter(modes.values())).get("rollout")
    if rollout is not None:
        every = f"the first of {rollout['every']:,} steps" if rollout["every"] > 1 else "each step"
        _table(
            f"Collectives of a rollout, besides, in {every}",
            ["tag", "op", "count", "", "bytes", "bytes sent"],
            [_of_rollout(row) for row in rollout["rows"]],
        )


def _of_rollout(row: dict[str, Any]) -> list[str]:
    """A row that is the same in every mode."""
    figures = [f"{row[key]:,}" if row[key] is not None else "-" for key in ("payload_bytes", "wire_bytes")]
    how = "exactly" if row["exact"] else "at most" if row["payload_bytes"] is not None else "as stored"
    return [row["tag"], row["op"], f"{row['count']:,}", how, *figures]


def _by_tag(step: list[dict[str, Any]]) -> list[list[str]]:
    """Rows of a step, those whose tags differ after the slash as one."""
    sums: dict[tuple[str, str], list[int]] = {}
    for row in step:
        family, slash, _ = row["tag"].partition("/")
        total = sums.setdefault((f"{family}/*" if slash else family, row["op"]), [0, 0, 0])
        for i, key in enumerate(("count", "payload_bytes", "wire_bytes")):
            total[i] += row[key]
    return [[tag, op, *(f"{figure:,}" for figure in total)] for (tag, op), total in sums.items()]


def _table(title: str, heads: list[str], rows: list[list[str]]) -> None:
    """Figures flush right, with as many decimals as they were given."""
    from pellucid.report.terminal import print_table

    cells = [heads, *rows]
    figures = [all(row[i][:1].isdigit() for row in rows) for i in range(len(heads))]
    widths = [max(len(row[i]) for row in cells) for i in range(len(heads))]
    heads, *rows = [
        [cell.rjust(width) if right else cell for cell, width, right in zip(row, widths, figures, strict=True)]
        for row in cells
    ]
    print()
    print_table(heads, rows, title=title)
