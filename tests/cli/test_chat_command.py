"""`pellucid chat` from a script: the model's template, several turns, what is said on which stream, interruptions."""

import io
from pathlib import Path
from typing import Any

import pytest
from small_models import make_folder, make_tokenizer, spoil

from pellucid.checkpoint.model_folder import load_model
from pellucid.cli import chat as chat_command
from pellucid.cli import main
from pellucid.errors import RequestError
from pellucid.inference import SamplingParams
from pellucid.model import Transformer
from pellucid.text import generate_text, stream_text

PARAMS = SamplingParams(temperature=0, max_tokens=6)
FLAGS = ["--temperature", "0", "--max-tokens", "6"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("models") / "small", max_position_embeddings=128)


@pytest.fixture(scope="module")
def model(folder: Path) -> Transformer:
    return load_model(folder).model


def talk(folder: Path, lines: str | bytes, monkeypatch: pytest.MonkeyPatch, *flags: str) -> int:
    data = lines.encode() if isinstance(lines, str) else lines
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
    return main(["chat", str(folder), *FLAGS, *flags])


def answer(model: Transformer, messages: list[dict[str, str]], params: SamplingParams = PARAMS) -> str:
    tokenizer = make_tokenizer()
    return "".join(stream_text(model, tokenizer, tokenizer.encode_chat(messages), params))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_turns_follow_the_template_and_are_remembered(
    folder: Path, model: Transformer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(folder, "hello fox\nand the hen\n", monkeypatch, "--system", "be kind") == 0
    system = {"role": "system", "content": "be kind"}
    first = answer(model, [system, user("hello fox")])
    second = answer(model, [system, user("hello fox"), {"role": "assistant", "content": first}, user("and the hen")])
    assert capsys.readouterr().out == f"{first}\n{second}\n"
    assert second != answer(model, [system, user("and the hen")])


def test_reset_forgets_and_exit_ends(
    folder: Path, model: Transformer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(folder, "hello\n\n/reset\nthe hen\n/exit\nnever said\n", monkeypatch) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{answer(model, [user('hello')])}\n{answer(model, [user('the hen')])}\n"
    assert "starts over" in captured.err


def test_a_model_without_template_continues_text_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = make_folder(tmp_path / "plain", template=False)
    assert talk(plain, "the fox asked\nthe fox asked\n", monkeypatch) == 0
    captured = capsys.readouterr()
    (text,) = generate_text(load_model(plain).model, make_tokenizer(), "the fox asked", PARAMS)
    assert captured.out == f"{text}\n{text}\n"
    assert "no chat template: completion mode" in captured.err
    assert talk(plain, "x\n", monkeypatch, "--system", "be kind") == 2


def test_a_long_conversation_drops_its_oldest_turns_with_a_notice(
    model: Transformer, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = chat_command.Chat(model, make_tokenizer(), PARAMS, "be kind")
    said: list[str] = []
    turns = [f"the fox asked the hen for tea at {n} and said hello" for n in range(5)]
    for turn in turns:
        chat.say(turn, said.append)
        assert chat.messages[0]["content"] == "be kind" and chat.messages[-2]["content"] == turn
        assert [m["role"] for m in chat.messages[1:]] == ["user", "assistant"] * (len(chat.messages) // 2)
        assert len(make_tokenizer().encode_chat(chat.messages[:-1])) <= 128 - 6
    assert len(chat.messages) < 11
    assert "longer than the model's window of 128 tokens: dropped the 2 oldest messages" in capsys.readouterr().err


def test_a_turn_that_cannot_fit_is_refused_and_forgotten(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(folder, "hello\n" + "fox " * 400 + "\n", monkeypatch) == 2
    captured = capsys.readouterr()
    assert "and the model's window is 128; shorten it" in captured.err
    assert len(captured.out.splitlines()) >= 1


def test_a_line_that_is_no_text_is_refused_alone(
    folder: Path, model: Transformer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(folder, b"hello fox\r\nand \xff\xfe\nand the hen", monkeypatch) == 2
    captured = capsys.readouterr()
    first = answer(model, [user("hello fox")])
    second = answer(model, [user("hello fox"), {"role": "assistant", "content": first}, user("and the hen")])
    assert captured.out == f"{first}\n{second}\n"
    assert "pellucid: the line is no utf-8 text (byte 5: 0xff); it is left out" in captured.err


def test_the_refused_turn_leaves_no_trace(model: Transformer) -> None:
    chat = chat_command.Chat(model, make_tokenizer(), PARAMS)
    chat.say("hello", lambda piece: None)
    before = list(chat.messages)
    with pytest.raises(RequestError):
        chat.say("fox " * 400, lambda piece: None)
    assert chat.messages == before


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(
    model: Transformer, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = chat_command.Chat(model, make_tokenizer(), SamplingParams(temperature=0, max_tokens=40))
    heard: list[str] = []

    def interrupt(piece: str) -> None:
        heard.append(piece)
        if len(heard) == 4:
            raise KeyboardInterrupt

    chat.say("hello", interrupt)
    assert chat.messages[-1] == {"role": "assistant", "content": "".join(heard[:4])}
    assert "(stopped)" in capsys.readouterr().err
    chat.say("again", lambda piece: None)
    assert len(chat.messages) == 4


def test_ctrl_c_at_the_prompt_ends_with_130(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(interactive: bool) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(chat_command, "read_line", interrupt)
    assert main(["chat", str(folder), *FLAGS]) == 130


def test_the_answer_streams_piece_by_piece(model: Transformer) -> None:
    events: list[Any] = []
    step = model.forward_hidden

    def watched(*args: Any, **kwargs: Any) -> Any:
        events.append("forward")
        return step(*args, **kwargs)

    model.forward_hidden = watched  # type: ignore[method-assign]
    chat = chat_command.Chat(model, make_tokenizer(), PARAMS)
    try:
        chat.say("hello", events.append)
    finally:
        del model.forward_hidden
    assert events[0] == "forward" and events[1] != "forward"  # a piece is out before the next token is computed
    assert events.count("forward") <= 6


def test_bad_models_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = make_folder(tmp_path / "bare", tokenizer=False)
    assert talk(bare, "x\n", monkeypatch) == 2
    assert "bare has no tokenizer.json, which a chat needs" in capsys.readouterr().err
    broken = spoil(make_folder(tmp_path / "broken"))
    assert talk(broken, "x\n", monkeypatch) == 1
    assert "the answer: the model's logits are not finite" in capsys.readouterr().err
