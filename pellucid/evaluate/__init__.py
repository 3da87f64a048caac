"""Scores of a trained model."""

from pellucid.evaluate.perplexity import Score, evaluate, text_split
from pellucid.evaluate.task_files import Task, open_tasks, with_shots
from pellucid.evaluate.tasks import evaluate_task

__all__ = ["Score", "Task", "evaluate", "evaluate_task", "open_tasks", "text_split", "with_shots"]
