"""Folders of encoders: our own kind, and BERT-type ones as transformers and sentence-transformers write them.

A decoder's folder is `pellucid.checkpoint.model_folder`'s. Which of the two a folder is stands in config.json as
``model_type``, and each opener names the other's folders when it gets one.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pellucid.checkpoint.huggingface import ENCODERS
from pellucid.checkpoint.model_folder import dtype_of, find_model, load_weights, read_weights, weights_of, write_model
from pellucid.checkpoint.sentence import embed_files, read_embed, read_table
from pellucid.config import ModelConfig, build
from pellucid.errors import CheckpointError, ConfigError, RequestError
from pellucid.model import BertConfig, BertEncoder, EmbedConfig, Encoder
from pellucid.parallel.parts import weight_shapes
from pellucid.parallel.world import resolve_device
from pellucid.registry import nearest
from pellucid.tokenizer import Tokenizer
from pellucid.tokenizer.wordpiece import Frame, frame_of, load_encoder_tokenizer
from pellucid.version import __version__

OWN, BERT = ENCODERS

_HARMLESS = {
    "architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "use_cache", "bos_token_id",
    "eos_token_id", "pad_token_id", "_name_or_path", "name_or_path", "_attn_implementation", "attn_implementation",
    "return_dict", "id2label", "label2id", "problem_type", "chunk_size_feed_forward", "output_hidden_states",
    "output_attentions", "classifier_dropout", "gradient_checkpointing", "tie_word_embeddings", "directionality",
}  # fmt: skip
"""Keys that say nothing about hidden states."""

_ONLY: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("absolute", None),
    "is_decoder": (False, None),
    "add_cross_attention": (False, None),
    "is_encoder_decoder": (False, None),
}
"""Keys of BERT's that change the model, and the values that leave it the one we compute."""

_NO_MEANING = ("tie_word_embeddings", "sliding_window", "max_window_layers", "attend")
"""Fields of ModelConfig that an encoder has no choice in."""


class LoadedEncoder(NamedTuple):
    """An encoder ready for use, in evaluation mode."""

    encoder: Encoder | BertEncoder
    tokenizer: Tokenizer | None
    """None where the folder has neither tokenizer.json nor vocab.txt."""
    frame: Frame
    """What stands around each text."""

    def encode(self, text: str, *, truncate: bool = False) -> list[int]:
        """The ids of a text, those around it included. Text never becomes a control token, however it is spelt.

        Args:
            truncate: cut the end of a text that is too long, not refuse it.

        Raises:
            RequestError: no tokenizer, nothing in the text to embed, or it is too long.
        """
        if self.tokenizer is None:
            raise RequestError(
                "the encoder has no tokenizer.json or vocab.txt, which text needs; put its tokenizer there"
            )
        ids = self.tokenizer.encode(text)
        if not ids:
            raise RequestError("the text is empty or has only what the tokenizer drops; there is nothing to embed")
        ids = self.frame.around(ids, most=self.encoder.max_tokens if truncate else None)
        self.encoder.check(ids, "the text")
        return ids

    def embed(self, texts: Sequence[str], *, batch_size: int = 32, truncate: bool = False) -> Tensor:
        """The vectors ``[len(texts), D]``, float32 on the CPU, in the order given; as `encode` and `embed_ids` have it."""
        return self.encoder.embed_ids([self.encode(text, truncate=truncate) for text in texts], batch_size=batch_size)


def load_encoder(path: str | Path, *, device: str = "auto", dtype: str = "auto") -> LoadedEncoder:
    """Load an encoder's folder.

    Of a BERT-type folder the pooler and the heads of pretraining are left out: vectors come from the hidden states.

    Args:
        device: "auto" is cuda where there is one, else cpu.
        dtype: of the weights: "float32", "bfloat16", "float16", or "auto" as stored.

    Raises:
        CheckpointError: the folder, its config or a weight file is missing, damaged or of another shape; missing,
            extra and misshaped tensors are named.
        ConfigError: a decoder's folder, what we cannot represent, or an unknown device or dtype; names file and key.
        DataError: the tokenizer is broken.
    """
    folder = find_model(path)
    target, wanted = resolve_device(device), dtype_of(dtype)
    encoder = read_encoder(folder)
    tensors = read_weights(folder)
    if isinstance(encoder, BertEncoder):
        tensors = _bert_weights(tensors, folder)
    tensors = {name: tensor.to(target, wanted) for name, tensor in tensors.items()}
    load_weights(encoder, tensors, source=folder, assign=True)
    tokenizer = load_encoder_tokenizer(folder)
    if tokenizer is not None and tokenizer.vocab_size > encoder.vocab_size:
        raise CheckpointError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size:,} ids and the embedding {encoder.vocab_size:,} rows; "
            "they do not belong together"
        )
    frame = frame_of(tokenizer) if tokenizer is not None else Frame()
    return LoadedEncoder(encoder.to(target).eval(), tokenizer, frame)


def is_encoder(folder: Path) -> bool:
    """Whether a folder's config.json is an encoder's."""
    return read_table(folder / "config.json").get("model_type") in ENCODERS


def read_encoder(folder: Path) -> Encoder | BertEncoder:
    """The encoder that a folder's config.json describes, on "meta"."""
    path = folder / "config.json"
    table = read_table(path)
    kind = table.get("model_type")
    if kind not in ENCODERS:
        raise ConfigError(
            f"{path}: model_type {kind!r} is no encoder that can be read (known: {', '.join(ENCODERS)}); "
            "a decoder, which writes text, is opened with pellucid.load_model or `pellucid generate`"
        )
    try:
        if kind == OWN:
            return _own(table)
        config = build(BertConfig, _bert_keys(table), "")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return BertEncoder(config, read_embed(folder, width=config.hidden_size), device="meta")


def save_encoder(path: str | Path, encoder: Encoder | BertEncoder, tokenizer: Tokenizer | None = None) -> None:
    """Write a folder that `load_encoder` opens as the same class; an earlier model there is replaced at once.

    A BERT-type one opens in transformers (``BertModel``, whose unused pooler is then drawn anew) and has
    sentence-transformers' files for pooling, normalisation and length.

    Raises:
        ConfigError: ``path`` is a file, or a folder with something else in it.
        StorageError: it could not be written; what was there is untouched.
    """
    shapes, weights = weight_shapes(encoder), weights_of(encoder)
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    contents: dict[str, bytes] = {}
    if isinstance(encoder, BertEncoder):
        table = {"architectures": ["BertModel"], "model_type": BERT, **dataclasses.asdict(encoder.config)}
        table |= {"position_embedding_type": "absolute"}
        contents |= embed_files(encoder.embed, width=encoder.width)
    else:
        shape = {key: x for key, x in dataclasses.asdict(encoder.config).items() if key not in _NO_MEANING}
        table = {"architectures": ["PellucidEncoder"], "model_type": OWN, **shape, **dataclasses.asdict(encoder.embed)}
    if tokenizer is not None:
        table["pad_token_id"] = tokenizer.pad_id
        contents |= tokenizer.files(model_max_length=encoder.max_tokens)
    contents["config.json"] = (json.dumps(table | {"dtype": dtype}, indent=2, ensure_ascii=False) + "\n").encode()
    contents["README.md"] = _card(encoder).encode()
    write_model(path, contents, shapes, ((name, weights[name]) for name in shapes))


def _own(table: dict[str, Any]) -> Encoder:
    embed_keys = {f.name for f in dataclasses.fields(EmbedConfig)}
    shape = {key: x for key, x in table.items() if key not in embed_keys and key not in _HARMLESS}
    known = {f.name for f in dataclasses.fields(ModelConfig)} - set(_NO_MEANING)
    for key in shape:
        if key in _NO_MEANING:
            raise ConfigError(f"key {key} has no meaning in an encoder; remove it")
        if key not in known:
            raise ConfigError(
                f"unknown key {key}{nearest(key, sorted(known | embed_keys))}; remove it if it changes nothing"
            )
    embed = build(EmbedConfig, {key: x for key, x in table.items() if key in embed_keys}, "")
    return Encoder(build(ModelConfig, shape, ""), embed, device="meta")


def _bert_keys(table: dict[str, Any]) -> dict[str, Any]:
    """The keys that are fields of `BertConfig`; ConfigError for one that we cannot honour."""
    for key, known in _ONLY.items():
        if key in table and table[key] not in known:
            raise ConfigError(f"{key} is {table[key]!r}; only {known[0]!r} is supported")
    return {key: x for key, x in table.items() if key not in _HARMLESS and key not in _ONLY}


def _bert_weights(tensors: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """The tensors under the names of ``BertModel``, without its pooler, pretraining heads and position numbers."""
    if any(name.startswith("bert.") for name in tensors):  # saved with a head
        tensors = {name.removeprefix("bert."): x for name, x in tensors.items() if not name.startswith("cls.")}
    renamed = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}  # before 2019
    for old, new in renamed.items():
        tensors = {name.replace(old, new): x for name, x in tensors.items()}
    numbers = tensors.get("embeddings.position_ids")
    if numbers is not None and not torch.equal(numbers.flatten().long(), torch.arange(numbers.numel())):
        raise CheckpointError(
            f"{folder}: embeddings.position_ids is not 0, 1, 2, ...; other positions are not supported"
        )
    ignored = {"embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias"}
    return {name: x for name, x in tensors.items() if name not in ignored}


def _card(encoder: Encoder | BertEncoder) -> str:
    config = encoder.config
    rows = {
        "kind": "BERT" if isinstance(encoder, BertEncoder) else "pellucid encoder",
        "parameters": f"{sum(p.numel() for p in encoder.parameters()):,}",
        "layers × hidden": f"{config.num_hidden_layers} × {config.hidden_size}",
        "vocabulary": f"{config.vocab_size:,}",
        "longest text": f"{encoder.max_tokens:,} tokens",
        "vectors": f"{encoder.embed.pooling} pooling{', L2 normalised' if encoder.embed.normalize else ''}",
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    head = f"---\nlibrary_name: pellucid\n---\n\n# Model card\n\nAn encoder, saved by pellucid {__version__}."
    return f"{head}\n\n| | |\n|---|---|\n{table}\n"
