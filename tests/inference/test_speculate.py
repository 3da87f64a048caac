"""Prompt lookup: fewer forwards, never another result."""

import random
import re
from itertools import cycle, islice

import pytest
from tiny_engine import bits, engine, prompt, random_requests, tiny

from pellucid.inference.constraints import GrammarConstraint, Vocabulary
from pellucid.inference.request import Request, SamplingParams
from pellucid.inference.sequence import Sequence
from pellucid.inference.speculate import PromptLookup


def sequence(tokens, room=20):
    params = SamplingParams(max_tokens=room)
    return Sequence(Request("a", tuple(tokens), params), 0, 0, room, 0, list(tokens))


def by_searching(tokens, count):
    """What followed the last place of the last three tokens, else of the last two; by looking everywhere."""
    for length in (3, 2):
        places = [i for i in range(len(tokens) - length) if tokens[i : i + length] == tokens[-length:]]
        if len(tokens) > length and places:
            return list(islice(cycle(tokens[places[-1] + length :]), count))
    return []


def test_what_followed_the_same_tokens_is_guessed():
    assert PromptLookup(3)(sequence([1, 2, 3, 4, 5, 1, 2, 3])) == [4, 5, 1]
    assert PromptLookup(3)(sequence([1, 2, 9, 4, 5, 1, 2])) == [9, 4, 5]  # two of them are enough
    assert PromptLookup(3)(sequence([9, 2, 7, 1, 2, 8, 1, 2])) == [8, 1, 2]  # the last place
    assert PromptLookup(5)(sequence([7, 1, 2, 1, 2])) == [1, 2, 1, 2, 1]  # and round from there
    assert (
        PromptLookup(3)(sequence([1, 2, 3, 4]))
        == PromptLookup(3)(sequence([1, 1]))
        == PromptLookup(3)(sequence([1]))
        == []
    )


def test_the_last_token_is_drawn_and_never_guessed():
    assert PromptLookup(9)(sequence([1, 2, 3, 4, 1, 2], room=3)) == [3, 4]
    assert PromptLookup(9)(sequence([1, 2, 3, 4, 1, 2], room=1)) == []


@pytest.mark.parametrize("seed", range(20))
def test_what_is_remembered_is_what_a_search_would_find(seed):
    rng = random.Random(seed)
    one, lookup = sequence([rng.randrange(4)], room=1000), PromptLookup(4)
    for _ in range(80):
        one.tokens += [rng.randrange(4) for _ in range(rng.choice([1, 1, 1, 3]))]
        assert lookup(one) == by_searching(one.tokens, 4)


def test_a_text_that_repeats_itself_takes_fewer_forwards():
    model = tiny(initializer_range=0.02)
    params = SamplingParams(temperature=0, max_tokens=60, repetition_penalty=1.0)
    tokens = prompt(1, 12)
    records = []
    plain, guessing = engine(model), engine(model, speculate=6, on_step=records.append)
    assert list(map(bits, guessing.generate([tokens], params))) == list(map(bits, plain.generate([tokens], params)))
    stats = guessing.stats()
    assert plain.stats().forwards == 60 and stats.forwards <= 20
    assert stats.drafted >= stats.accepted == 60 - stats.forwards and stats.decoded == 60
    computed = sum(count for record in records for *_, count in record.chunks)
    assert computed == 12 + (stats.forwards - 1) + stats.drafted  # what was guessed right is not computed again


@pytest.mark.parametrize("options", [{}, {"blocks": 24, "token_budget": 12, "max_running": 6}])
def test_results_are_the_same_with_every_setting(options):
    model, requests = tiny(), random_requests(4, 16)
    rng = random.Random(1)
    requests += [(prompt(i, 6) * 4, SamplingParams(temperature=0.3, seed=i, max_tokens=24, frequency_penalty=0.2,
                                                   stop_ids=(rng.randrange(97),))) for i in range(6)]  # fmt: skip
    prompts, params = [t for t, _ in requests], [p for _, p in requests]
    plain, guessing = engine(model), engine(model, speculate=4, **options)
    assert list(map(bits, guessing.generate(prompts, params))) == list(map(bits, plain.generate(prompts, params)))
    assert guessing.stats().accepted > 0
    guessing.pool.check()
    assert guessing.stats().held == 0


def test_a_constraint_is_kept_and_a_guess_that_it_forbids_is_not_taken():
    pytest.importorskip("llguidance")
    model = tiny(vocab_size=97)
    letters = [bytes([i + 32]) if i < 95 else None for i in range(97)]
    vocabulary = Vocabulary(letters, lambda text: [ord(c) - 32 for c in text])
    constraint = GrammarConstraint("regex", "(ab|cd){8,20};", vocabulary)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=50, constraint=constraint, n=2)
    tokens = [ord(c) - 32 for c in "abcdabcdabab"]
    plain, guessing = engine(model), engine(model, speculate=5)
    expected, found = plain.generate([tokens], params), guessing.generate([tokens], params)
    assert list(map(bits, found)) == list(map(bits, expected))
    assert guessing.stats().accepted > 0 and guessing.stats().forwards < plain.stats().forwards
    for result in found:
        text = "".join(chr(i + 32) for i in result.ids)
        assert re.fullmatch("(ab|cd){8,20};", text) and result.finish_reason == "stop"
