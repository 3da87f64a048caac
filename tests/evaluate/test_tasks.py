"""Tasks against sums and answers recomputed without the engine, token by token; files and options that are refused."""

import json
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from pellucid.config import ModelConfig
from pellucid.errors import ConfigError, DataError, PellucidError, RequestError
from pellucid.evaluate import Task, evaluate_task, open_tasks, with_shots
from pellucid.evaluate.task_files import Choices, Question
from pellucid.evaluate.tasks import best, choice_sums, completions, encode_choice
from pellucid.inference import Engine, engine_for
from pellucid.model import Transformer
from pellucid.tokenizer import Tokenizer, train_bpe

torch.set_num_threads(1)

DOCUMENT = Path(__file__).resolve().parents[2] / "docs/evaluation.md"
TEXTS = [f"the {a} asked the {b} for tea and said hello" for a in ("fox", "hen", "owl") for b in ("cat", "dog")] * 3


@cache
def make_tokenizer() -> Tokenizer:
    return train_bpe(TEXTS, 300)


def make_model(**changes: Any) -> Transformer:
    config: dict[str, Any] = {
        "vocab_size": make_tokenizer().vocab_size, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96, "initializer_range": 0.3,
    }  # fmt: skip
    return Transformer(ModelConfig(**(config | changes)), generator=torch.Generator().manual_seed(2)).eval()


def uniform_model() -> Transformer:
    """Every token is as likely as any other, whatever stands before it."""
    model = make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


@pytest.fixture(scope="module")
def model() -> Transformer:
    return make_model()


def choices_task(*examples: tuple[str, list[str], int]) -> Task:
    return Task("t", tuple(Choices(f"t.jsonl:{i}", p, tuple(c), a) for i, (p, c, a) in enumerate(examples, start=1)))


EXAMPLES = choices_task(
    ("the fox asked the", [" cat", " dog for tea", " hen said hello"], 0),
    ("the fox asked the", [" owl and", " cat for tea and said"], 1),
    ("the hen said ", ["hello", "tea for the owl"], 1),
    ("th", ["e owl", " fox"], 0),  # a token spans the border of the first
    ("", ["the cat", "hello"], 0),
    ("the owl asked the dog for tea and said hello and the fox asked the hen for tea", [" and", " xyz"], 1),
)


@torch.no_grad()
def by_hand(model: Transformer, prompt: list[int], following: list[int]) -> float:
    logprobs = model(torch.tensor([prompt + following])).logits[0].double().log_softmax(-1)
    return sum(float(logprobs[len(prompt) + i - 1, id_]) for i, id_ in enumerate(following))


@torch.no_grad()
def said_by_hand(model: Transformer, prompt: list[int], max_tokens: int) -> str:
    tokenizer, ids = make_tokenizer(), list(prompt)
    while len(ids) < len(prompt) + max_tokens and (len(ids) == len(prompt) or ids[-1] not in tokenizer.stop_ids):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return tokenizer.decode(ids[len(prompt) :])


def write(path: Path, *lines: Any) -> str:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return str(path)


# -- multiple choice ----------------------------------------------------------------------------------------


def test_sums_are_those_of_the_plain_forward(model: Transformer) -> None:
    tokenizer = make_tokenizer()
    sums = list(choice_sums(model, tokenizer, EXAMPLES.examples, batch_size=3))
    wanted = [[by_hand(model, *encode_choice(tokenizer, e.prompt, c)) for c in e.choices] for e in EXAMPLES.examples]
    for got, hand in zip(sums, wanted, strict=True):
        assert got == pytest.approx(hand, rel=1e-5)
    score = evaluate_task(model, tokenizer, EXAMPLES)
    lengths = [[len(choice.strip()) for choice in e.choices] for e in EXAMPLES.examples]
    norms = [[s / n for s, n in zip(row, sizes, strict=True)] for row, sizes in zip(wanted, lengths, strict=True)]
    answers = [example.answer for example in EXAMPLES.examples]
    assert score == {
        "acc": sum(row.index(max(row)) == a for row, a in zip(wanted, answers, strict=True)) / 6,
        "acc_norm": sum(row.index(max(row)) == a for row, a in zip(norms, answers, strict=True)) / 6,
        "n": 6,
    }


def test_an_example_scores_the_same_bits_whatever_runs_beside_it(model: Transformer) -> None:
    tokenizer = make_tokenizer()
    together = list(choice_sums(model, tokenizer, EXAMPLES.examples, batch_size=16))
    assert together == list(choice_sums(model, tokenizer, EXAMPLES.examples, batch_size=1))
    assert together == [next(choice_sums(model, tokenizer, [example])) for example in EXAMPLES.examples]
    assert together[::-1] == list(choice_sums(model, tokenizer, EXAMPLES.examples[::-1]))


def test_prompts_are_read_once_and_choices_in_one_forward_each(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[Engine] = []

    def kept(*args: Any, **options: Any) -> Engine:
        engines.append(engine_for(*args, **options))
        return engines[0]

    monkeypatch.setattr("pellucid.evaluate.tasks.engine_for", kept)
    tokenizer, prompt = make_tokenizer(), "xyz " * 12
    examples = choices_task((prompt, ["the fox asked the hen", "the owl asked the dog for tea"], 0)).examples
    (ids, first), (_, second) = (encode_choice(tokenizer, prompt, choice) for choice in examples[0].choices)
    next(choice_sums(model, tokenizer, examples))
    stats = engines[0].stats()
    pages = (len(ids) - 1) // 16 * 16  # a token is read anew for its logits
    assert pages >= 32 and stats.reused == pages and stats.prefilled == 2 * len(ids) - pages
    assert stats.forwards <= 4 and stats.drafted == stats.accepted == len(first) - 2 + len(second) - 2 >= 6


def test_a_choice_is_counted_for_each_character_that_it_has() -> None:
    tokenizer, uniform = make_tokenizer(), uniform_model()
    words = " cat for tea and said hello"
    tokens = [len(encode_choice(tokenizer, "the", choice)[1]) for choice in (" xq", words, "éé", "xq")]
    assert tokens == [3, 6, 4, 2] or tokens[0] < tokens[1] < len(words) / 4
    [[short, long]] = choice_sums(uniform, tokenizer, choices_task(("the", [" xq", words], 1)).examples)
    assert short == pytest.approx(-tokens[0] * math.log(tokenizer.vocab_size)) and long < short
    assert evaluate_task(uniform, tokenizer, choices_task(("the", [" xq", words], 1))) == {
        "acc": 0, "acc_norm": 1, "n": 1,
    }  # fmt: skip
    # characters, not bytes: four tokens of four bytes would tie with two of two, and the first count
    assert evaluate_task(uniform, tokenizer, choices_task(("the", ["éé", "xq"], 1))) == {
        "acc": 1, "acc_norm": 1, "n": 1,
    }  # fmt: skip
    # without the space around it: 3 tokens of 2 characters lose to 2 tokens of 2
    assert evaluate_task(uniform, tokenizer, choices_task(("the", ["xq", "   xq "], 0)))["acc_norm"] == 1


def test_of_equal_choices_the_first_counts() -> None:
    tokenizer, uniform = make_tokenizer(), uniform_model()
    for answer in (0, 1):
        score = evaluate_task(uniform, tokenizer, choices_task(("the", ["x", "q", "z"], answer)))
        assert score == {"acc": 1 - answer, "acc_norm": 1 - answer, "n": 1}
    assert best([-3.0, -1.0, -1.0]) == 1


def test_prompt_and_choice_are_encoded_as_one_text_where_that_can_be() -> None:
    tokenizer = make_tokenizer()
    begin, encode = [tokenizer.prefix_id], tokenizer.encode
    assert encode_choice(tokenizer, "the fox", " asked") == (begin + encode("the fox"), encode(" asked"))
    # the space goes with the word that follows it
    assert encode_choice(tokenizer, "the fox ", "asked") == encode_choice(tokenizer, "the fox", " asked")
    assert encode_choice(tokenizer, " ", "asked") == (begin, encode(" asked"))
    whole = encode("the")
    assert whole[: len(encode("th"))] != encode("th"), "a token spans the border"
    assert encode_choice(tokenizer, "th", "e") == (begin + encode("th"), encode("e"))


def test_a_prompt_and_a_choice_that_do_not_fit_the_window_are_named(model: Transformer) -> None:
    tokenizer = make_tokenizer()
    room = 96 - len(encode_choice(tokenizer, "the", "x")[0])
    fits, longer = choices_task(("the", ["x" * room, "x"], 1)), choices_task(("the", ["x", "x" * (room + 1)], 1))
    assert evaluate_task(model, tokenizer, fits)["n"] == 1
    with pytest.raises(
        RequestError, match=r"t.jsonl:1: choice 1: prompt and choice have 97 tokens and .* window is 96"
    ):
        evaluate_task(model, tokenizer, longer)
    long_question = Task("q", (Question("q.jsonl:7", "x" * 200, ("y",)),))
    with pytest.raises(RequestError, match=r"q.jsonl:7: prompt has 201 tokens and the model's window is 96"):
        evaluate_task(model, tokenizer, long_question)


def test_output_that_is_not_finite_is_an_error_of_the_example() -> None:
    broken = make_model()
    with torch.no_grad():
        broken.model.norm.weight[3] = torch.nan
    for task, where in (
        (EXAMPLES, "t.jsonl:1: choice 0"),
        (Task("q", (Question("q.jsonl:1", "the", ("y",)),)), "q.jsonl:1"),
    ):
        with pytest.raises(
            PellucidError, match=rf"{where}: the model's logits are not finite.*--dtype float32"
        ) as caught:
            evaluate_task(broken, make_tokenizer(), task)
        assert caught.value.exit_code == 1


# -- generation ---------------------------------------------------------------------------------------------


def test_an_answer_is_right_if_it_is_one_of_those_given(model: Transformer) -> None:
    tokenizer = make_tokenizer()
    prompts = ["the fox asked", "the hen said", "the owl"]
    messages = [{"role": "user", "content": "the cat"}]
    said = [said_by_hand(model, [tokenizer.prefix_id or 0, *tokenizer.encode(p)], 6) for p in prompts]
    said.append(said_by_hand(model, tokenizer.encode_chat(messages), 6))
    assert all(text.strip() for text in said) and len(set(said)) == 4
    questions = [
        Question("q:1", prompts[0], (said[0].strip(),)),
        Question("q:2", prompts[1], ("no", said[1].strip())),
        Question("q:3", prompts[2], (said[2].strip() + "x",)),
        Question("q:4", messages, (said[3].strip(),)),
    ]
    assert list(completions(model, tokenizer, questions, max_tokens=6)) == said
    task = Task("q", tuple(questions))
    for size in (1, 16):
        assert evaluate_task(model, tokenizer, task, max_tokens=6, batch_size=size) == {"exact_match": 0.75, "n": 4}


def test_worked_examples_come_before_each_prompt_and_never_itself(model: Transformer, tmp_path: Path) -> None:
    lines = [{"prompt": f"{i} +", "choices": [" a", f" b{i}"], "answer": 1} for i in range(4)]
    [task] = open_tasks([write(tmp_path / "c.jsonl", *lines)])
    prompts = [example.prompt for example in with_shots(task, 2).examples]
    assert prompts == [
        "1 + b1\n\n2 + b2\n\n0 +", "0 + b0\n\n2 + b2\n\n1 +", "0 + b0\n\n1 + b1\n\n2 +", "0 + b0\n\n1 + b1\n\n3 +",
    ]  # fmt: skip
    assert with_shots(task, 0) == task and with_shots(task, 2).examples[0].choices == (" a", " b0")
    lines = [{"prompt": f"{i} ={space}", "answer": [f"a{i}", "b"]} for i, space in enumerate(("", " ", ""))]
    [task] = open_tasks([write(tmp_path / "g.jsonl", *lines)])
    shown = with_shots(task, 2)
    assert shown.examples[2].prompt == "0 = a0\n\n1 = a1\n\n2 =" and shown.end == "\n\n" and task.end is None
    with pytest.raises(ConfigError, match=r"--shots 3 needs more than 3 examples, and g has 3"):
        with_shots(task, 3)
    chat = {"messages": [{"role": "user", "content": "x"}], "answer": "y"}
    [task] = open_tasks([write(tmp_path / "m.jsonl", chat, chat)])
    with pytest.raises(ConfigError, match=r"m.jsonl:1: --shots go before a prompt, not before messages"):
        with_shots(task, 1)


def test_an_answer_ends_where_the_next_worked_example_would_begin(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pellucid.evaluate.tasks.completions", lambda *a, **k: iter(["64\n\n12 + 1", "64\n1"]))
    questions = Question("q:1", "", ("64",)), Question("q:2", "", ("64",))
    assert evaluate_task(model, make_tokenizer(), Task("q", questions))["exact_match"] == 0
    assert evaluate_task(model, make_tokenizer(), Task("q", questions, end="\n\n"))["exact_match"] == 0.5


# -- files and names ----------------------------------------------------------------------------------------

GOOD = {"prompt": "p", "choices": [" a", " b"], "answer": 1}
ASKED = {"prompt": "p", "answer": "a"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[]", "a line must be a JSON object, got list"),
        ({**GOOD, "choises": []}, "unknown key 'choises'; did you mean choices"),
        ({"promt": "p", "answer": "a"}, "unknown key 'promt'; did you mean prompt"),
        ({"prompt": "p", "target": "a"}, 'the example has no "answer", it has prompt, target'),
        ({**GOOD, "id": 1.5}, '"id" must be text or a whole number, got 1.5'),
        ({**GOOD, "choices": [" a"]}, '"choices" must be a list of two texts or more'),
        ({**GOOD, "choices": [" a", ""]}, '"choices" must be a list of two texts or more, none empty'),
        ({**GOOD, "choices": " a b"}, '"choices" must be a list of two texts or more'),
        ({**GOOD, "answer": 2}, '"answer" must be the index of a choice, 0 to 1, got 2'),
        ({**GOOD, "answer": -1}, '"answer" must be the index of a choice, 0 to 1, got -1'),
        ({**GOOD, "answer": True}, '"answer" must be the index of a choice, 0 to 1, got True'),
        ({**GOOD, "answer": " a"}, '"answer" must be the index of a choice, 0 to 1, got'),
        ({**GOOD, "prompt": 3}, 'beside "choices" there must be a "prompt" that is text'),
        ({**GOOD, "messages": []}, 'there must be a "prompt" that is text, and no "messages"'),
        ({**ASKED, "answer": 3}, '"answer" must be text, or a list of texts, none blank, got 3'),
        ({**ASKED, "answer": []}, '"answer" must be text, or a list of texts'),
        ({**ASKED, "answer": ["a", " "]}, '"answer" must be text, or a list of texts, none blank'),
        ({**ASKED, "prompt": ["p"]}, '"prompt" must be text'),
        ({**ASKED, "messages": []}, 'give one of "prompt" and "messages"; the example has prompt, answer, messages'),
        ({"answer": "a"}, 'give one of "prompt" and "messages"'),
        ({"messages": "hello", "answer": "a"}, '"messages" must be a list of objects'),
        (ASKED, r"generation, and .*bad.jsonl:1 is multiple choice; a task has one form"),
    ],
)
def test_a_bad_line_is_refused_by_number_and_key(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(DataError, match=rf"bad.jsonl:3: .*{message}"):
        open_tasks([write(tmp_path / "bad.jsonl", GOOD, "", line)])


def test_keys_that_are_near_none_of_ours_may_stand_beside_them(tmp_path: Path) -> None:
    [task] = open_tasks(
        [write(tmp_path / "a.b.jsonl", {**GOOD, "id": "x", "source": "s", "idx": 3}, {**GOOD, "id": 2})]
    )
    assert task.name == "a.b" and len(task.examples) == 2 and not task.generates
    assert task.examples[0] == Choices(f"{tmp_path}/a.b.jsonl:1", "p", (" a", " b"), 1)


def test_files_and_names_that_mean_no_task_are_refused(tmp_path: Path) -> None:
    one, empty = write(tmp_path / "a.jsonl", GOOD), write(tmp_path / "empty.jsonl", "")
    (tmp_path / "other").mkdir()
    same, text = write(tmp_path / "other" / "a.jsonl", GOOD), write(tmp_path / "a.txt", GOOD)
    for texts, error, message in [
        ([one, same], ConfigError, r"other/a.jsonl and .*a.jsonl would both be called 'a'; rename one"),
        ([empty], DataError, "empty holds no example"),
        ([text], DataError, r"a.txt: a task is read from a .jsonl file"),
        (["nowhere.jsonl"], DataError, "nowhere.jsonl: no such file"),
        ([str(tmp_path)], DataError, "no such file"),
        (["arithmetics"], ConfigError, "arithmetics: no such file, and no task of that name; did you mean arithmetic"),
        (["arithmetic,sise=3"], ConfigError, "unknown key arithmetic.sise; did you mean arithmetic.size"),
        (["arithmetic,3"], ConfigError, "'3' is no option=value"),
        (["arithmetic,size=0"], ConfigError, r"arithmetic.size must be in \[1, \d+\], got 0"),
    ]:
        with pytest.raises(error, match=message):
            open_tasks(texts)


def test_arithmetic_asks_what_is_held_out() -> None:
    from pellucid.data.samples.arithmetic import is_held_out

    [three, other] = open_tasks(["arithmetic,size=3", "arithmetic,size=3,seed=1"])
    assert three.name == "arithmetic,size=3" and three.generates and three.examples != other.examples
    for example in three.examples:
        assert isinstance(example, Question) and isinstance(example.prompt, str)
        expression = example.prompt.removesuffix(" = ")
        assert is_held_out(expression) and re.fullmatch(r"\d\d [+-] \d\d", expression)
        assert example.answers == (str(eval(expression)),)


def test_the_documented_lines_are_examples(tmp_path: Path) -> None:
    blocks = re.findall(r"^```json\n(.*?)^```$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    for number, block in enumerate(blocks):
        [task] = open_tasks([write(tmp_path / f"{number}.jsonl", *block.splitlines())])
        assert task.generates == (number == 1) and len(task.examples) == len(block.splitlines())
