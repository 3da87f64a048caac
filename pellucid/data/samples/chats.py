"""Conversations: a story with questions about it, a request for a story, a sum."""

import re
from functools import cache
from math import log
from random import Random

from pellucid.data.samples import arithmetic
from pellucid.data.samples.grammar import Plot, Step, step
from pellucid.data.samples.stories import Story, distractors, other_slot, tell, wrong_values
from pellucid.data.samples.words import Lexicon

Message = dict[str, str]
Messages = list[Message]

READ = step(
    "{story}\n\n{question}",
    "Read this story.\n\n{story}\n\n{question}",
    "Here is a story: {story}\n\n{question}",
    "{story}\n\nNow answer a question about the story. {question}",
)
REQUEST = step(
    "Tell me a story about {hero} and {a_object}.",
    "Please tell me a story about {hero} and {a_object}.",
    "Can you tell me a story about a {girl} named {hero} and {a_object}?",
    "I would like to hear a story about {hero} and {a_object}.",
    "Write a short story about a {girl} called {hero} and {a_object}.",
    "Make up a story with {hero} and {a_object} in it.",
)
REQUEST_ANY = step("Tell me a story.", "Please tell me a story.", "Can you tell me a story?")
ASK_SUM = step("What is {expression}?", "How much is {expression}?", "Please work out {expression}.")

_REQUESTS_THAT_NAME = 0.85


def user(content: str) -> Message:
    """What the person says."""
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    """What the model should say."""
    return {"role": "assistant", "content": content}


def story_chat(rng: Random) -> tuple[Messages, float]:
    """A conversation about a story, and its nats: half of them give the story, half ask for one."""
    messages, nats = (_reading if rng.random() < 0.5 else _telling)(rng)
    return messages, nats + log(2)


def arithmetic_chat(rng: Random) -> tuple[Messages, float]:
    """One to three questions of arithmetic with their answers, and the nats."""
    messages: Messages = []
    nats = log(3)
    for _ in range(1 + int(rng.random() * 3)):
        expression, value = arithmetic.draw(rng)
        asked = pick(rng, ASK_SUM) % {"expression": expression}
        messages += (user(asked), assistant(f"{expression} = {value}."))
        nats += nats_of(ASK_SUM) + arithmetic.nats_of(expression)
    return messages, nats


def request(rng: Random, story: Story) -> str:
    """A request that names the hero and the object of ``story``."""
    return pick(rng, REQUEST) % story.forms


def pick(rng: Random, choice: Step) -> str:
    """One wording of ``choice``."""
    return choice.wordings[int(rng.random() * len(choice.wordings))]


def nats_of(choice: Step) -> float:
    """What `pick` costs."""
    return log(len(choice.wordings))


def _reading(rng: Random) -> tuple[Messages, float]:
    """The person gives a story and asks one to three questions about it."""
    story = tell(rng)
    messages, nats = _questions(rng, story, 1 + int(rng.random() * 3))
    messages[0] = user(pick(rng, READ) % {"story": story.text, "question": messages[0]["content"]})
    return messages, story.nats + log(3) + nats + nats_of(READ)


def _telling(rng: Random) -> tuple[Messages, float]:
    """The person asks for a story and then up to two questions about it."""
    story = tell(rng)
    if rng.random() < _REQUESTS_THAT_NAME:
        wanted, nats = request(rng, story), nats_of(REQUEST) - log(_REQUESTS_THAT_NAME)
    else:
        wanted, nats = pick(rng, REQUEST_ANY), nats_of(REQUEST_ANY) - log(1 - _REQUESTS_THAT_NAME)
    messages, nats_asked = _questions(rng, story, int(rng.random() * 3))
    return [user(wanted), assistant(story.text), *messages], story.nats + nats + log(3) + nats_asked


def _questions(rng: Random, story: Story, number: int) -> tuple[Messages, float]:
    """``number`` different questions about ``story`` with their answers, and the nats."""
    left = list(story.plot.questions)
    forms = story.forms | distractors(rng, story)
    messages: Messages = []
    nats = 0.0
    for _ in range(number):
        nats += log(len(left))
        question = left.pop(int(rng.random() * len(left)))
        asked, answered = pick(rng, question.ask), pick(rng, question.answer)
        messages += (user(asked % forms), assistant(answered % forms))
        nats += nats_of(question.ask) + nats_of(question.answer) + _nats_of_distractors(story, asked)
    return messages, nats


def _nats_of_distractors(story: Story, asked: str) -> float:
    """What the wrong facts in ``asked`` cost."""
    return sum(log(len(wrong_values(lexicon, story.facts))) for lexicon in _wrong_facts(story.plot, asked))


@cache
def _wrong_facts(plot: Plot, asked: str) -> list[Lexicon]:
    used = set(re.findall(r"%\((\w+)\)s", asked))
    return list(dict.fromkeys(lexicon for slot, lexicon in plot.slots.items() if other_slot(slot) in used))
