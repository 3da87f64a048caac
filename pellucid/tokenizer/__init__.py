"""Text to ids and back, conversations to ids and loss masks."""

from pellucid.tokenizer.bpe import Tokenizer, train_bpe

__all__ = ["Tokenizer", "train_bpe"]
