"""Tokenizers of every kind that a folder may hold, trained here on a page of text: nothing is downloaded."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as HF

TEXT = (
    "The fox ran over the hill, and then it slept. It's 12 o'clock; we'll go home -- they've said so 1,234 times.\n"
    "def run(self, x):\n    if x > 10:\n        return x ** 2\n\n\t# done  \n"
    "Größe, café, naïve; Привет мир, как дела? 你好,世界。今天天气很好。 こんにちは世界 안녕하세요 "
    "مرحبا بالعالم नमस्ते दुनिया 👋🏽 👨‍👩‍👧 ½ ² Ⅷ ٣\n"
)


def write(folder: Path, hf: HF, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    hf.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config}))
    return folder


def wordpiece() -> HF:
    hf = HF(models.WordPiece(unk_token="[UNK]"))
    hf.normalizer = normalizers.BertNormalizer()
    hf.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    hf.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    hf.train_from_iterator(
        [TEXT] * 4, trainers.WordPieceTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    )
    hf.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    hf.enable_truncation(16)  # as sentence encoders are saved; must not cut what we encode
    hf.enable_padding(length=16)
    return hf


def sentencepiece() -> HF:
    """Llama-2's kind: a space put first, byte fallback, and a decoder that takes the space away."""
    hf = HF(models.BPE(unk_token="<unk>", byte_fallback=True))
    hf.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    hf.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    ascii_words = [line for line in TEXT.split("\n") if line.isascii()] * 4
    special = ["<unk>", "<s>", "</s>"]
    hf.train_from_iterator(
        ascii_words,
        trainers.BpeTrainer(vocab_size=260, max_token_length=8, special_tokens=special, show_progress=False),
    )
    description = json.loads(hf.to_str())
    vocab = description["model"]["vocab"]
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    return HF.from_str(json.dumps(description))


def unigram() -> HF:
    """T5's kind: its control tokens are pieces of the model as well."""
    hf = HF(models.Unigram())
    hf.pre_tokenizer = pre_tokenizers.Metaspace()
    hf.decoder = decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=special, unk_token="<unk>", show_progress=False)
    hf.train_from_iterator([TEXT] * 4, trainer)
    return hf


def llama3() -> HF:
    hf = HF(models.BPE())
    split = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    hf.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    hf.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), min_frequency=2, show_progress=False
    )
    hf.train_from_iterator([TEXT] * 4, trainer)
    names = ("begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eot_id")
    hf.add_special_tokens([f"<|{name}|>" for name in names])
    return hf


FOREIGN = {"wordpiece": wordpiece, "sentencepiece": sentencepiece, "unigram": unigram, "llama3": llama3}
FOREIGN_CONFIG: dict[str, dict[str, Any]] = {
    "wordpiece": {
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "mask_token": "[MASK]",
    },
    "sentencepiece": {
        "bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "unk_token": "<unk>",
    },
    "unigram": {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"},
    "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
}
