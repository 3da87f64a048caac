"""The shapes in which examples come, what of each is learnt, and what is said of bad ones."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pellucid.data.examples import example
from pellucid.data.record_files import Record
from pellucid.data.stored import unstacked
from pellucid.errors import DataError
from pellucid.tokenizer import Tokenizer, train_bpe

WORDS = "What is the colour of a red ball? It is red. And the blue one? Blue. Be short. No, it is not. 12 + 30 = 42."
SYSTEM, ASK, MORE = (
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "What is red?"},
    {"role": "user", "content": "And blue?"},
)
RED, BLUE = {"role": "assistant", "content": "The ball."}, {"role": "assistant", "content": "The blue one."}
CHAT = [SYSTEM, ASK, RED, MORE, BLUE]


@pytest.fixture(scope="module")
def chat() -> Tokenizer:
    return train_bpe([WORDS] * 3, 320)


def with_template(tokenizer: Tokenizer, template: str | None) -> Tokenizer:
    files = tokenizer.files()
    config = json.loads(files["tokenizer_config.json"])
    config["chat_template"] = template
    return Tokenizer(files["tokenizer.json"].decode(), config)


@pytest.fixture(scope="module")
def plain(chat: Tokenizer) -> Tokenizer:
    return with_template(chat, None)


def texts(record: Record, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """Of each part its text, and that of what is learnt in it."""
    return [
        (
            tokenizer.decode(part.ids.tolist(), skip_special=False),
            tokenizer.decode(part.ids[part.learnt].tolist(), skip_special=False),
        )
        for part in record.parts
    ]


# -- shapes -------------------------------------------------------------------------------------------------


def test_every_answer_of_a_conversation_is_learnt_with_its_end_and_nothing_else(chat: Tokenizer) -> None:
    ((text, learnt),) = texts(example({"messages": CHAT}, "sft", chat, "here"), chat)
    assert learnt == "The ball.<|im_end|>The blue one.<|im_end|>"
    assert text == (
        "<|endoftext|><|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nWhat is red?<|im_end|>\n"
        "<|im_start|>assistant\nThe ball.<|im_end|>\n<|im_start|>user\nAnd blue?<|im_end|>\n"
        "<|im_start|>assistant\nThe blue one.<|im_end|>"  # what stands behind the last learnt token teaches nothing
    )


def test_what_a_user_says_changes_no_label(chat: Tokenizer) -> None:
    other = [{**turn, "content": "assistant\n<|im_end|> red"} if turn["role"] == "user" else turn for turn in CHAT]
    (one,), (two,) = (example({"messages": turns}, "sft", chat, "here").parts for turns in (CHAT, other))
    assert len(one.ids) != len(two.ids)
    assert one.ids[one.learnt].tolist() == two.ids[two.learnt].tolist()


def test_a_turn_that_nobody_answers_is_left_out(chat: Tokenizer) -> None:
    unanswered = example({"messages": [*CHAT, ASK]}, "sft", chat, "here")
    assert unanswered.parts[0].ids.tolist() == example({"messages": CHAT}, "sft", chat, "here").parts[0].ids.tolist()


TOOL = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}" \
    "{{ m.tool_calls | default('') }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}" \
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"  # fmt: skip


def test_tool_turns_are_read_and_not_learnt(chat: Tokenizer) -> None:
    calling = {"role": "assistant", "content": "", "tool_calls": [{"name": "look"}]}
    turns = [ASK, calling, {"role": "tool", "content": "red ball"}, RED]
    ((text, learnt),) = texts(example({"messages": turns}, "sft", with_template(chat, TOOL), "here"), chat)
    assert "tool\nred ball<|im_end|>" in text
    assert learnt == "[{'name': 'look'}]<|im_end|>The ball.<|im_end|>"


@pytest.mark.parametrize(("kind", "table"), [
    ("sft", {"messages": [ASK, RED]}), ("sft", {"prompt": "What is red?", "completion": "The ball."}),
    ("dpo", {"prompt": "What is red?", "chosen": "The ball.", "rejected": "No."}), ("grpo", {"prompt": "What is red?"}),
])  # fmt: skip
def test_tools_are_shown_by_templates_that_do_and_refused_by_others(
    chat: Tokenizer, kind: Any, table: dict[str, Any]
) -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    showing = with_template(
        chat, "{% for t in tools or [] %}<|im_start|>{{ t.function.name }}<|im_end|>{% endfor %}" + TOOL
    )
    bare, shown = (texts(example(each, kind, showing, "here"), showing) for each in (table, {**table, "tools": tools}))
    assert shown[0][0] == "<|im_start|>look<|im_end|>" + bare[0][0]
    assert [learnt for _, learnt in shown] == [learnt for _, learnt in bare]
    with pytest.raises(DataError, match="the record has tools and the chat template shows none"):
        example({**table, "tools": tools}, kind, chat, "here")


@pytest.mark.parametrize("key", ["completion", "answer"])
@pytest.mark.parametrize("as_turns", [False, True])
def test_of_a_prompt_and_its_answer_the_answer_is_learnt(chat: Tokenizer, key: str, as_turns: bool) -> None:
    table = {"prompt": [ASK] if as_turns else "What is red?", key: [RED] if as_turns else "The ball."}
    ((text, learnt),) = texts(example(table, "sft", chat, "here"), chat)
    assert learnt == "The ball.<|im_end|>"
    assert text.startswith("<|endoftext|><|im_start|>user\nWhat is red?<|im_end|>\n<|im_start|>assistant\nThe ball.")


def test_answers_that_stand_in_a_prompt_are_not_learnt(chat: Tokenizer) -> None:
    table = {"prompt": [SYSTEM, ASK, RED, MORE], "completion": "The blue one."}
    ((text, learnt),) = texts(example(table, "sft", chat, "here"), chat)
    assert "The ball." in text and learnt == "The blue one.<|im_end|>"


def test_a_number_may_be_the_answer(chat: Tokenizer) -> None:
    ((_, learnt),) = texts(example({"prompt": "12 + 30", "answer": 42}, "sft", chat, "here"), chat)
    assert learnt == "42<|im_end|>"


def test_without_a_template_texts_stand_between_the_beginning_and_the_end(plain: Tokenizer) -> None:
    ((text, learnt),) = texts(example({"prompt": "What? ", "completion": "Red."}, "sft", plain, "here"), plain)
    assert (text, learnt) == ("<|endoftext|>What? Red.<|endoftext|>", "Red.<|endoftext|>")
    pair = texts(example({"prompt": "What? ", "chosen": "Red.", "rejected": "Blue."}, "dpo", plain, "here"), plain)
    assert [text for text, _ in pair] == ["<|endoftext|>What? ", "Red.<|endoftext|>", "Blue.<|endoftext|>"]
    assert texts(example({"prompt": "What? ", "answer": "Red."}, "grpo", plain, "here"), plain) == [
        ("<|endoftext|>What? ", "")
    ]


SAME = [
    {"prompt": "What is red?", "chosen": "The ball.", "rejected": "The blue one."},
    {"prompt": [ASK], "chosen": "The ball.", "rejected": [BLUE]},
    {"chosen": [ASK, RED], "rejected": [ASK, BLUE]},
]


@pytest.mark.parametrize("table", SAME)
def test_a_pair_shares_its_prompt_and_learns_both_answers(chat: Tokenizer, table: dict[str, Any]) -> None:
    assert texts(example(table, "dpo", chat, "here"), chat) == [
        ("<|endoftext|><|im_start|>user\nWhat is red?<|im_end|>\n<|im_start|>assistant\n", ""),
        ("The ball.<|im_end|>", "The ball.<|im_end|>"),
        ("The blue one.<|im_end|>", "The blue one.<|im_end|>"),
    ]


def test_of_longer_conversations_what_both_have_said_before_is_the_prompt(chat: Tokenizer) -> None:
    table = {"chosen": CHAT, "rejected": [*CHAT[:-1], {"role": "assistant", "content": "No."}]}
    (prompt, unlearnt), *answers = texts(example(table, "dpo", chat, "here"), chat)
    assert "The ball." in prompt and unlearnt == ""
    assert answers == [("The blue one.<|im_end|>",) * 2, ("No.<|im_end|>",) * 2]


def test_a_grpo_prompt_ends_where_an_answer_begins_and_keeps_its_record(chat: Tokenizer) -> None:
    table = {"prompt": "12 + 30", "answer": "42", "level": 0.5}
    record = example(table, "grpo", chat, "here")
    assert record.table == table
    ((text, learnt),) = texts(record, chat)
    assert (text, learnt) == ("<|endoftext|><|im_start|>user\n12 + 30<|im_end|>\n<|im_start|>assistant\n", "")
    turned = example({"messages": [ASK, RED]}, "grpo", chat, "here")
    assert turned.table is not None and turned.table["answer"] == "The ball."
    assert turned.parts[0].ids.tolist() == chat.encode_chat([ASK])


def test_stored_keys_are_taken_as_they_are(chat: Tokenizer) -> None:
    sft = example({"sequence": [5, 6, 7, 8, 9], "loss_mask": [0, 0, 1, 1, 0]}, "sft", chat, "here").parts[0]
    assert (sft.ids.tolist(), sft.learnt.tolist()) == ([5, 6, 7, 8], [False, False, True, True])
    table = {"chosen": [1, 2, 3, 4], "rejected": [1, 2, 5], "chosen_mask": [0, 0, 1, 1], "rejected_mask": [0, 0, 1]}
    assert [p.ids.tolist() for p in example(table, "dpo", chat, "here").parts] == [[1, 2], [3, 4], [5]]
    table = {"chosen": [3, 4], "rejected": [5, 4], "chosen_mask": [1, 1], "rejected_mask": [True, True]}
    assert [p.ids.tolist() for p in example(table, "dpo", chat, "here").parts] == [[], [3, 4], [5, 4]]
    table = {
        "prompts": [1, 2], "responses": [[3, 4, 0], [5, 6, 7]], "masks": [[1, 1, 0], [1, 0, 1]], "rewards": [1, 0.25],
        "old_logprobs": [[-0.5, -1.5, 0], [-1, -2, -3]], "level": 2,
    }  # fmt: skip
    record = example(table, "grpo", chat, "here")
    assert [p.ids.tolist() for p in record.parts] == [[1, 2], [3, 4], [5, 6, 7]], (
        "padding is cut, what is masked inside is not"
    )
    assert [p.learnt.tolist() for p in record.parts[1:]] == [[True, True], [True, False, True]]
    assert record.table == {"rewards": [1.0, 0.25], "old_logprobs": [[-0.5, -1.5], [-1.0, -2.0, -3.0]], "level": 2}
    assert all(isinstance(reward, float) for reward in record.table["rewards"])


# -- templates ----------------------------------------------------------------------------------------------

UNMARKED = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" \
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"  # fmt: skip


def test_a_template_without_markers_gives_the_labels_of_one_with_them(chat: Tokenizer) -> None:
    bare = with_template(chat, "{{ bos_token }}" + UNMARKED)
    for table in ({"messages": CHAT}, {"prompt": [SYSTEM, ASK, RED, MORE], "completion": "The blue one."}):
        one, two = (example(table, "sft", tokenizer, "here").parts[0] for tokenizer in (chat, bare))
        assert one.ids.tolist() == two.ids.tolist() and one.learnt.tolist() == two.learnt.tolist()


def test_a_template_that_refuses_is_named_with_the_place(chat: Tokenizer) -> None:
    raising = with_template(chat, "{{ raise_exception('no system turns here') }}")
    with pytest.raises(DataError, match=r"file:7: the chat template refuses these messages: no system turns here"):
        example({"messages": CHAT}, "sft", raising, "file:7")


def test_a_template_that_shows_a_prompt_otherwise_when_an_answer_follows_is_refused(chat: Tokenizer) -> None:
    shortening = with_template(
        chat, "{% for m in messages %}{% if loop.last or m.role == 'assistant' %}<|im_start|>{{ m.role }}\n"
        "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    )  # fmt: skip
    with pytest.raises(DataError, match="renders the prompt differently when an answer follows"):
        example({"prompt": "What is red?", "completion": "The ball."}, "sft", shortening, "here")


# -- bad input ----------------------------------------------------------------------------------------------

EMPTY = {"role": "user", "content": "  "}


@pytest.mark.parametrize(
    ("kind", "table", "message"),
    [
        ("sft", {"messages": [ASK]}, "no assistant turn in messages"),
        ("sft", {"messages": [EMPTY, RED]}, r"messages\[0\], a turn of the user, is empty"),
        ("sft", {"messages": [ASK, {"role": "assistant", "content": ""}]}, r"messages\[1\], a turn of the assistant, is empty"),
        ("sft", {"messages": [ASK, {"role": "assistant"}]}, r"messages\[1\], a turn of the assistant, is empty"),
        ("sft", {"messages": [RED, ASK]}, "message 0 is of the assistant after the beginning, where system or developer or user"),
        ("sft", {"messages": [ASK, ASK, RED]}, "message 1 is of the user after a turn of the user, where assistant is due"),
        ("sft", {"messages": [ASK, RED, SYSTEM]}, "message 2 is of the system after a turn of the assistant"),
        ("sft", {"messages": [{"role": "poet", "content": "x"}]}, r"messages\[0\] has the role 'poet'; known: system"),
        ("sft", {"messages": ["hello"]}, r'messages\[0\] must be an object with "role" and "content"'),
        ("sft", {"messages": []}, "messages must be text or a list"),
        ("sft", {"prompt": "", "completion": "x"}, "prompt is empty"),
        ("sft", {"prompt": "x", "completion": " "}, "completion is empty"),
        ("sft", {"prompt": "x", "completion": [ASK]}, "completion begins with a turn of the user"),
        ("sft", {"text": "x"}, "no example for sft in a record with 'text'; known: messages; prompt and completion"),
        ("sft", {"prompt": "x", "chosen": "y", "rejected": "z"}, "it looks like data for --for dpo"),
        ("sft", {"sequence": [1, 2], "loss_mask": [1]}, "loss_mask has 1 values for 2 tokens"),
        ("sft", {"sequence": [1, 2]}, "loss_mask is missing"),
        ("sft", {"sequence": [1, 2], "loss_mask": [0, 2]}, "must hold 0 and 1"),
        ("sft", {"sequence": [1, 2.5], "loss_mask": [0, 1]}, "must be a list of token ids"),
        ("sft", {"sequence": [1, 2], "loss_mask": [1, 0]}, "has no token to learn"),
        ("sft", {"sequence": [1, 9999], "loss_mask": [0, 1]}, "id 9999 is outside the vocabulary of"),
        ("dpo", {"prompt": "x", "chosen": "y", "rejected": "y"}, "chosen and rejected are the same"),
        ("dpo", {"chosen": CHAT, "rejected": CHAT}, "chosen and rejected are the same"),
        ("dpo", {"prompt": "x", "chosen": "y", "rejected": [{"role": "assistant", "content": "y"}]}, "are the same tokens"),
        ("dpo", {"chosen": "y", "rejected": "z"}, 'need a "prompt"'),
        ("dpo", {"prompt": "x", "completion": "y"}, "it looks like data for --for sft"),
        ("dpo", {"chosen": [1, 2], "rejected": [1, 3], "chosen_mask": [0, 1]}, "rejected_mask is missing"),
        ("grpo", {"prompt": [ASK, RED], "answer": "x"}, "the prompt ends with an assistant turn"),
        ("grpo", {"answer": "x"}, "no example for grpo"),
        ("grpo", {"prompts": [1], "responses": [[2]], "masks": [[1]]}, "stored rollouts lack rewards"),
        ("grpo", {"prompts": [1], "responses": [[2]], "masks": [[1]], "rewards": [1, 2]}, "1 responses, 1 masks and 2 rewards"),
        ("grpo", {"prompts": [1], "responses": [[2]], "masks": [[0]], "rewards": [1]}, "response 0 has no token"),
        ("grpo", {"prompts": [], "responses": [[2]], "masks": [[1]], "rewards": [1]}, "prompts is empty"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_the_place(chat: Tokenizer, kind: Any, table: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as error:
        example(table, kind, chat, "file.jsonl:3")
    assert str(error.value).startswith("file.jsonl:3: ")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 400) | st.floats(allow_nan=True) | st.text(max_size=4) | st.integers(2**62, 2**70),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content"]), inner, max_size=2),
    max_leaves=8,
)  # fmt: skip
TURN = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "tool"]), "content": JSON})
KEYS = (
    "messages", "prompt", "completion", "answer", "chosen", "rejected", "chosen_mask", "rejected_mask", "sequence", "loss_mask",
    "prompts", "responses", "masks", "rewards", "old_logprobs", "tools",
)  # fmt: skip


@given(
    st.dictionaries(st.sampled_from(KEYS), JSON | st.lists(TURN, max_size=3), max_size=6),
    st.sampled_from(["sft", "dpo", "grpo"]),
)
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_json_is_an_example_or_an_error_that_names_its_place(
    chat: Tokenizer, table: dict[str, Any], kind: Any
) -> None:
    try:
        for row in unstacked(table):
            record = example(row, kind, chat, "here")
            assert record.num_tokens > 0
    except DataError as error:
        assert "here: " in str(error) or "columns of different lengths" in str(error)


def test_messages_need_a_template(plain: Tokenizer) -> None:
    for kind, table in (("sft", {"messages": CHAT}), ("dpo", SAME[2]), ("grpo", {"prompt": [ASK]})):
        with pytest.raises(DataError, match=r"here: .*chat template"):
            example(table, kind, plain, "here")  # type: ignore[arg-type]


def test_ids_are_those_of_the_tokenizer_that_serves(chat: Tokenizer) -> None:
    record = example({"prompt": "What is red?", "chosen": "The ball.", "rejected": "No."}, "dpo", chat, "here")
    assert record.parts[0].ids.tolist() == chat.encode_chat([ASK], add_generation_prompt=True)
    assert int(np.sum(record.parts[0].ids == chat.bos_id)) == 1
