"""Scores of a trained model."""

from pellucid.evaluate.perplexity import Score, evaluate, text_split

__all__ = ["Score", "evaluate", "text_split"]
