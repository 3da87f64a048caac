"""`pellucid train`."""

import argparse
import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pellucid.cli.output import notice
from pellucid.config import RunConfig, load_config
from pellucid.errors import ConfigError, PellucidError, RankError

if TYPE_CHECKING:
    from pellucid.train import Callback, Trainer


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "train",
        help="train a model as a configuration says",
        description="Train a model. Every setting can be given with its dotted name: --train.steps 100 --optim.lr 1e-3. "
        "`pellucid config` prints them all.",
    )
    parser.add_argument(
        "config", nargs="?", metavar="CONFIG.toml", help="the settings; without it the defaults, or the run's own"
    )
    parser.add_argument("--out", metavar="RUN", help="folder of the run")
    parser.add_argument(
        "--resume", action="store_true", help="continue from the newest checkpoint in RUN, if there is one"
    )
    parser.add_argument("--init", metavar="MODEL", help="start from the weights of this model, checkpoint or run")
    parser.add_argument(
        "--nproc", type=int, metavar="N", help="train on N ranks of this machine, one process each (torchrun works too)"
    )
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the estimate and stop")
    parser.set_defaults(run=run, takes_settings=True, allocator="training")


def run(args: argparse.Namespace) -> int:
    """Train; also writes the report."""
    from pellucid.parallel.world import in_environment, is_restart, process_group

    args.resume = args.resume or is_restart()
    config = run_configuration(args)
    options = {"resume": args.resume, "dry_run": args.dry_run, "quiet": args.quiet}
    if in_environment():
        if args.nproc is not None:
            raise ConfigError(
                f"--nproc {args.nproc} was given under torchrun, which starts the ranks itself; leave it out"
            )
        with process_group(_backend(config), config.parallel.timeout_s) as world:
            _require_mode(config, world.size)
            train(config, **options)
    elif args.nproc is None or args.nproc == 1:
        train(config, **options)
    else:
        train_on_ranks(config, args.nproc, options, args.log_level)
    return 0


def train_on_ranks(config: RunConfig, nproc: int, options: dict[str, Any], log_level: str) -> None:
    """As `train`, on ``nproc`` ranks of this machine. Shared with the demo.

    Args:
        options: `train`'s own.

    Raises:
        RankError: a rank failed; its traceback is on stderr.
    """
    from pellucid.parallel.launch import launch

    _require_mode(config, nproc)
    method, timeout_s = config.parallel.start_method, config.parallel.timeout_s
    try:
        launch(
            _train_rank, nproc, config, options, log_level,
            start_method=method, backend=_backend(config), timeout_s=timeout_s,
        )  # fmt: skip
    except RankError as error:
        if error.exit_code != ConfigError.exit_code and error.traceback:
            notice(error.traceback)
        raise


def _train_rank(config: RunConfig, options: dict[str, Any], log_level: str) -> None:
    from pellucid.parallel.world import get_rank
    from pellucid.registry import load_plugins

    load_plugins(config.plugins)  # a spawned rank has a registry of its own
    layout = f"%(levelname)s rank {get_rank()} %(name)s: %(message)s"
    logging.basicConfig(level=log_level.upper(), format=layout, force=True)
    train(config, **options)


def _backend(config: RunConfig) -> str:
    """What carries the collectives; nccl cannot carry those of a run on cpu."""
    on_cpu = config.train.device.partition(":")[0] == "cpu"
    return "gloo" if on_cpu and config.parallel.backend == "auto" else config.parallel.backend


def _require_mode(config: RunConfig, size: int) -> None:
    if size > 1 and config.parallel.mode == "none":
        raise ConfigError(
            f"parallel.mode is none, which trains on one rank, and there are {size}; choose ddp, zero1 or torch_ddp"
        )


def run_configuration(args: argparse.Namespace) -> RunConfig:
    """The configuration that the arguments mean."""
    settings = dict(args.settings)
    for flag, key in ((args.out, "train.out"), (args.init, "train.init")):
        if flag is not None and settings.get(key, flag) != flag:
            raise ConfigError(
                f"--{key[6:]} is {flag!r} and --{key} is {settings[key]!r}, which mean the same; give one of them"
            )
        if flag is not None:
            settings[key] = flag
    path = args.config
    own = Path(settings.get("train.out", "")) / "config.toml"
    if path is None and args.resume and own.is_file():
        path = own
    config = load_config(path, settings)
    if config.train.init:
        from pellucid.checkpoint.model_folder import find_model, read_config

        config = load_config(path, settings, base_model=read_config(find_model(config.train.init)))
    if not config.train.out:
        raise ConfigError("give the run a folder: --out runs/NAME")
    return config


def train(
    config: RunConfig,
    *,
    resume: bool = False,
    dry_run: bool = False,
    quiet: bool = False,
    callbacks: Sequence["Callback"] = (),
) -> "Trainer":
    """Set up, say what is coming, run, and write ``report.html``. Shared with the demos.

    With several ranks every one calls it, and the first speaks for all.

    Args:
        callbacks: called after those of the configuration.
    """
    from pellucid.cli.progress import TrainProgress
    from pellucid.parallel.world import get_rank
    from pellucid.report import build_report
    from pellucid.report.terminal import format_seconds
    from pellucid.train import Trainer
    from pellucid.train.estimate import estimate
    from pellucid.train.ranks import on_first_rank

    is_first = get_rank() == 0
    progress = TrainProgress(quiet=quiet or not is_first)
    trainer = Trainer(config, callbacks=[progress, *callbacks])
    forecast = on_first_rank(lambda: estimate(trainer.setup), tag="init/estimate")
    if forecast is not None and (not quiet or dry_run):
        notice(forecast.line())
        for note in trainer.setup.notes:
            notice(note)
    on_first_rank(lambda: forecast.refuse_if_too_large() if forecast else None, tag="init/memory")
    if dry_run:
        return trainer
    run = Path(config.train.out)
    try:
        state = trainer.train(resume=resume)
    except ConfigError:  # the folder is somebody else's
        raise
    except BaseException:
        if is_first and (run / "metrics.jsonl").is_file():
            with suppress(PellucidError):  # what went wrong first is what matters
                build_report(run)
        raise
    finally:
        progress.close()
    if is_first:
        build_report(run)
        why = f" ({trainer.stop_reason})" if trainer.stop_reason else ""
        steps = f"step {state.step:,} of {trainer.setup.total_steps:,}"
        print(f"{config.train.out}: {steps}{why} in {format_seconds(progress.seconds)}", flush=True)
    return trainer
