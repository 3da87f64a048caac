"""The flags and the loading that `generate` and `chat` share."""

import argparse
from typing import TYPE_CHECKING, Any

from pellucid.cli.output import notice
from pellucid.errors import RequestError

if TYPE_CHECKING:
    from pellucid.checkpoint.model_folder import Loaded
    from pellucid.inference import SamplingParams
    from pellucid.model import Transformer
    from pellucid.tokenizer import Tokenizer


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """MODEL, --device, --dtype and --weights."""
    parser.add_argument("model", metavar="MODEL", help="a model folder, a checkpoint or a run")
    parser.add_argument("--device", default="auto", help="cpu, cuda, mps, ...; auto: cuda where there is one, else cpu")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", "float32", "bfloat16", "float16"],
        help="of the weights; auto: as stored",
    )
    parser.add_argument(
        "--weights",
        choices=["bf16", "int8", "int4"],
        help="pack those of the linear layers as they are loaded, on the CPU: into 8 or 4 bits, or bf16: into the order that "
        "it reads fastest, with the results of bfloat16 to the bit; done anyway where it is the dtype and in hardware",
    )


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """How tokens are drawn; left out ones keep the defaults of `SamplingParams`."""
    parser.add_argument("--temperature", type=float, metavar="T", help="0 takes the most probable token (default 1.0)")
    parser.add_argument("--top-k", type=int, metavar="K", help="keep the K most probable tokens (default 0: all)")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="keep the smallest set with this mass (default 1.0: all)"
    )
    parser.add_argument("--seed", type=int, help="the same seed draws the same tokens")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="new tokens at most (default 256)")


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """How the engine runs; none changes a result but --fast."""
    parser.add_argument(
        "--fast",
        action="store_true",
        help="give up that a result has the same bits whatever runs beside it, for speed",
    )
    parser.add_argument(
        "--speculate", type=int, default=0, metavar="K", help="guess K tokens from the text so far (default 0)"
    )
    parser.add_argument(
        "--explain",
        action="store_true",
        help="the step log on stderr: who got which tokens, reuse, evictions, pre-emptions",
    )


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Of `pellucid.inference.Engine`."""
    from pellucid.cli.steps import step_line

    options: dict[str, Any] = {"exact": not args.fast, "speculate": args.speculate}
    if args.explain:
        options["on_step"] = lambda record: notice(step_line(record))
    return options


def sampling_params(args: argparse.Namespace) -> "SamplingParams":
    """What the flags say; `RequestError` for a value out of range."""
    from pellucid.inference import SamplingParams, update_params

    names = {
        "temperature": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
        "seed": "seed",
        "max_tokens": "max_tokens",
    }
    names |= {"num_samples": "n"}
    given = {name: getattr(args, flag, None) for flag, name in names.items()}
    return update_params(SamplingParams(), {name: value for name, value in given.items() if value is not None})


def load_with_tokenizer(args: argparse.Namespace, *, needed_for: str) -> tuple["Loaded", "Tokenizer"]:
    """The model and its tokenizer.

    Raises:
        CheckpointError: no such model, or its tokenizer does not fit it.
        RequestError: it has no tokenizer.
    """
    loaded = load(args)
    if loaded.tokenizer is None:
        raise RequestError(
            f"{args.model} has no tokenizer.json, which {needed_for} needs; put the model's tokenizer there"
        )
    return loaded, loaded.tokenizer


def pack_bfloat16(model: "Transformer", *, fast: bool, page_size: int = 64) -> None:
    """For multiplying only, where its weights are bfloat16 on a processor that has it; changes speed, never a result.

    With ``fast`` a model stays as it is where a kernel runs its whole forward.
    """
    import torch

    from pellucid.inference.fused import can_be_fused
    from pellucid.model.lora import lora_of
    from pellucid.model.quantize import has_bfloat16, is_quantized, quantize_

    weight = model.model.embed_tokens.weight
    fits = weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and has_bfloat16()
    if not fits or is_quantized(model) or lora_of(model) is not None:
        return
    if not (fast and can_be_fused(model, weight.dtype, page_size, exact=False)):
        quantize_(model, "bf16")


def load(args: argparse.Namespace) -> "Loaded":
    """The model that MODEL names, with its tokenizer if it has one that fits."""
    from pellucid.checkpoint.model_folder import load_model
    from pellucid.text import check_tokenizer

    loaded = load_model(args.model, device=args.device, dtype=args.dtype, weights=args.weights)
    pack_bfloat16(loaded.model, fast=getattr(args, "fast", False))
    if loaded.tokenizer is not None:
        check_tokenizer(loaded.tokenizer, loaded.config)
    return loaded
