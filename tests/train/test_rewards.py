import pytest

from pellucid.errors import ConfigError, DataError
from pellucid.registry import lookup


def test_the_answer_alone_is_worth_one():
    answer = lookup("reward", "exact_match").target
    worths = [answer("1 + 2 =", said, {"answer": 3}) for said in ("3", " 3\n", "4", "33", "")]
    assert worths == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_a_record_without_an_answer_is_refused_with_what_it_has():
    with pytest.raises(DataError, match='no "answer", it has question'):
        lookup("reward", "exact_match").target("", "", {"question": "?"})


def test_an_unknown_reward_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="unknown reward 'exact_mach'; did you mean exact_match"):
        lookup("reward", "exact_mach")
