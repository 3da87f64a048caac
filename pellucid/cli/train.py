"""`pellucid train`."""

import argparse
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pellucid.cli.output import notice
from pellucid.config import RunConfig, load_config
from pellucid.errors import ConfigError, PellucidError

if TYPE_CHECKING:
    from pellucid.train import Trainer


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
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the estimate and stop")
    parser.set_defaults(run=run, takes_settings=True, wants_allocator=True)


def run(args: argparse.Namespace) -> int:
    """Train; also writes the report."""
    train(run_configuration(args), resume=args.resume, dry_run=args.dry_run, quiet=args.quiet)
    return 0


def run_configuration(args: argparse.Namespace) -> RunConfig:
    """The configuration that the arguments mean."""
    settings = dict(args.settings)
    for flag, key in ((args.out, "train.out"), (args.init, "train.init")):
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


def train(config: RunConfig, *, resume: bool = False, dry_run: bool = False, quiet: bool = False) -> "Trainer":
    """Set up, say what is coming, run, and write ``report.html``. Shared with the demo."""
    from pellucid.cli.progress import TrainProgress
    from pellucid.report import build_report
    from pellucid.report.terminal import format_seconds
    from pellucid.train import Trainer
    from pellucid.train.estimate import estimate

    progress = TrainProgress(quiet=quiet)
    trainer = Trainer(config, callbacks=[progress])
    forecast = estimate(trainer.setup)
    if not quiet or dry_run:
        notice(forecast.line())
    forecast.refuse_if_too_large()
    if dry_run:
        return trainer
    run = Path(config.train.out)
    try:
        state = trainer.train(resume=resume)
    except ConfigError:  # the folder is somebody else's
        raise
    except BaseException:
        if (run / "metrics.jsonl").is_file():
            with suppress(PellucidError):  # what went wrong first is what matters
                build_report(run)
        raise
    finally:
        progress.close()
    build_report(run)
    why = f" ({trainer.stop_reason})" if trainer.stop_reason else ""
    print(
        f"{config.train.out}: step {state.step:,} of {trainer.setup.total_steps:,}{why} in {format_seconds(progress.seconds)}"
    )
    return trainer
