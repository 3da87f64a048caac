"""The built-in corpus ``sample:stories``: a seeded grammar that tells little stories, talks about them and does sums.

Everything that it says was written for Pellucid; there is nothing to download and no licence to ask about. The same
grammar recognises its stories again (`check_story`), so how well a model has learnt can be counted.
"""

from pellucid.data.samples.arithmetic import arithmetic_problem
from pellucid.data.samples.check import Prompt, Verdict, check_story, held_out_prompts
from pellucid.data.samples.corpus import Entropy, Sample, entropy_nats, stories

__all__ = [
    "Entropy",
    "Prompt",
    "Sample",
    "Verdict",
    "arithmetic_problem",
    "check_story",
    "entropy_nats",
    "held_out_prompts",
    "stories",
]
