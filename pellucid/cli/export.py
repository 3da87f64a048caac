"""`pellucid export`."""

import argparse
from pathlib import Path

from pellucid.errors import ConfigError


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "export",
        help="make a model folder or a GGUF file of a checkpoint",
        description="Write the model of a checkpoint, of a run (its finished model, else its newest checkpoint) or of a model "
        "folder as a model folder of its own, which transformers opens too, or as a GGUF file, which llama.cpp opens. One "
        "tensor is in memory at a time. An adapter is merged into its base; --to adapter writes it alone, for PEFT.",
    )
    parser.add_argument("source", metavar="CHECKPOINT")
    parser.add_argument(
        "--out",
        required=True,
        metavar="MODEL",
        help="folder to write (an earlier model there is replaced), or new GGUF file",
    )
    parser.add_argument(
        "--to", default="model", choices=["model", "gguf", "adapter"], help="what to write (default model)"
    )
    parser.add_argument("--type", choices=["f32", "f16", "q8_0"], help="of the matrices in a GGUF file (default f16)")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", "float32", "bfloat16", "float16"],
        help="of the weights of a model folder; auto: as saved",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Export."""
    if args.to == "gguf":
        return _to_gguf(args)
    if args.type is not None:
        raise ConfigError(f"--type {args.type} is for --to gguf; a model folder has --dtype")
    if Path(args.out).suffix.lower() == ".gguf":
        raise ConfigError(
            f"--out {args.out} is the name of a GGUF file and --to {args.to} writes a folder; add --to gguf"
        )
    if args.to == "adapter":
        return _to_adapter(args)
    from pellucid.checkpoint.model_folder import export_model, open_weights

    folder = export_model(args.source, args.out, dtype=args.dtype)
    saved = open_weights(Path(args.out))
    types = sorted({str(saved.dtype(name)).removeprefix("torch.") for name in saved.keys()})  # noqa: SIM118
    print(f"exported {folder} to {args.out}: {len(saved.keys())} tensors, {', '.join(types)}")
    return 0


def _to_adapter(args: argparse.Namespace) -> int:
    if args.dtype != "auto":
        raise ConfigError(f"--dtype {args.dtype} is for a model folder; an adapter is written as it is")
    from pellucid.checkpoint.model_folder import export_adapter

    print(f"exported the adapter of {export_adapter(args.source, args.out)} to {args.out}")
    return 0


def _to_gguf(args: argparse.Namespace) -> int:
    if args.dtype != "auto":
        raise ConfigError(f"--dtype {args.dtype} is for a model folder; a GGUF file has --type")
    from pellucid.checkpoint.gguf_export import export_gguf

    kind = args.type or "f16"
    folder = export_gguf(args.source, args.out, kind=kind)
    print(f"exported {folder} to {args.out}: {kind}, {Path(args.out).stat().st_size:,} bytes")
    return 0
