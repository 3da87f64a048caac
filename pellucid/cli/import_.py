"""`pellucid import`."""

import argparse
from pathlib import Path

from pellucid.errors import ConfigError


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "import",
        help="make a model folder of a GGUF file",
        description="Write the model and the tokenizer of a GGUF file (llama architecture, any quantisation) as a model "
        "folder that every command and transformers open. One tensor is in memory at a time.",
    )
    parser.add_argument("source", metavar="FILE.gguf")
    parser.add_argument("--out", required=True, metavar="MODEL", help="folder to write; it must not be in use")
    parser.add_argument(
        "--dtype", default="float32", choices=["float32", "bfloat16"], help="of the weights (default float32)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Import."""
    if (Path(args.source) / "config.json").is_file():
        raise ConfigError(
            f"{args.source} is a model folder already; every command opens it as it is, nothing is imported"
        )
    from pellucid.checkpoint.gguf_import import import_gguf

    done = import_gguf(args.source, args.out, dtype=args.dtype)
    types = ", ".join(f"{count} {name}" for name, count in done.types.items())
    print(f"imported {args.source} to {args.out}: {done.num_parameters:,} parameters in {args.dtype} (from {types})")
    if done.tokenizer is None:
        print("the file has no tokenizer: only token ids can be put in")
    else:
        template = "with" if done.tokenizer.chat_template is not None else "without"
        print(f"tokenizer: {done.tokenizer.vocab_size:,} tokens, {template} a chat template")
    return 0
