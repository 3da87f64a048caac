"""Text -> token shards on disk -> batches.

Nothing is imported here: preparing (`pellucid.data.prepare` and the worker processes it starts) does without torch,
which `pellucid.data.batches` needs.
"""
