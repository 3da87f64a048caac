"""`pellucid generate`: text on stdout, records in order, resumed by id, bad input named."""

import json
from pathlib import Path
from typing import Any

import pytest
from small_models import make_folder, make_tokenizer, spoil

from pellucid.checkpoint.model_folder import load_model
from pellucid.cli import main
from pellucid.inference import SamplingParams, generate
from pellucid.text import encode_prompt, generate_text

GREEDY = ["--temperature", "0", "--max-tokens", "8", "--quiet"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("models") / "small")


def write_lines(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


REQUESTS: list[dict[str, Any]] = [
    {"id": "a", "prompt": "the fox"},
    {"prompt": "the hen asked"},
    {"id": 7, "messages": [{"role": "user", "content": "hello"}]},
    {"ids": [5, 6, 7], "params": {"max_tokens": 3}},
    {"id": "e", "prompt": "", "params": {"temperature": 1.0, "seed": 4}},
]


def test_a_prompt_is_continued_on_stdout(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaded = load_model(model)
    assert loaded.tokenizer is not None
    params = SamplingParams(temperature=0, max_tokens=8)
    (text,) = generate_text(loaded.model, loaded.tokenizer, "the fox asked", params)
    assert main(["generate", str(model), "--prompt", "the fox asked", *GREEDY]) == 0
    assert capsys.readouterr().out == text + "\n"
    assert text.strip()


def test_json_gives_one_object_with_every_sample(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--prompt",
        "the owl",
        "--seed",
        "3",
        "--num-samples",
        "3",
        "--max-tokens",
        "5",
        "--logprobs",
        "--json",
    ]
    assert main(["generate", str(model), *arguments]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [r["sample"] for r in results] == [0, 1, 2]
    assert len({tuple(r["ids"]) for r in results}) == 3
    loaded = load_model(model)
    tokens = encode_prompt(make_tokenizer(), "the owl")
    expected = generate(
        loaded.model, [tokens], SamplingParams(seed=3, n=3, max_tokens=5, stop_ids=make_tokenizer().stop_ids)
    )
    assert [r["ids"] for r in results] == [r.ids for r in expected]
    assert results[0]["logprobs"] == pytest.approx(expected[0].logprobs)
    assert results[0]["text"] == make_tokenizer().decode(results[0]["ids"])
    size = len(results[0]["ids"])
    usage = {"prompt_tokens": len(tokens), "completion_tokens": size, "total_tokens": len(tokens) + size}
    assert results[0]["usage"] == usage


def test_records_come_out_in_input_order_with_their_own_params(model: Path, tmp_path: Path) -> None:
    source, out = write_lines(tmp_path / "in.jsonl", REQUESTS), tmp_path / "out.jsonl"
    assert (
        main(["generate", str(model), "--prompts", str(source), "--out", str(out), "--batch-size", "2", *GREEDY]) == 0
    )
    records = read_lines(out)
    assert [r["id"] for r in records] == ["a", 2, 7, 4, "e"]
    assert list(records[0]) == ["id", "text", "ids", "finish_reason", "usage"]
    assert len(records[3]["ids"]) == 3
    loaded, tokenizer = load_model(model), make_tokenizer()
    params = SamplingParams(temperature=0, max_tokens=8, stop_ids=tokenizer.stop_ids)
    chat = tokenizer.encode_chat(REQUESTS[2]["messages"])
    assert records[2]["ids"] == generate(loaded.model, [chat], params)[0].ids


def test_an_interrupted_file_is_resumed_and_its_torn_line_dropped(model: Path, tmp_path: Path) -> None:
    source, out = write_lines(tmp_path / "in.jsonl", REQUESTS), tmp_path / "out.jsonl"
    command = ["generate", str(model), "--prompts", str(source), "--out", str(out), *GREEDY]
    assert main(command) == 0
    whole = out.read_bytes()
    lines = whole.splitlines(keepends=True)
    marked = lines[0].replace(b'"text": "', b'"text": "kept ')
    for torn in (b"", lines[2][:9], lines[2][:-1]):
        out.write_bytes(marked + lines[1] + torn)
        assert main(command) == 0
        assert out.read_bytes() == marked + b"".join(lines[1:])
    assert main(command) == 0  # nothing left to do
    assert out.read_bytes() == marked + b"".join(lines[1:])


def test_resuming_adds_only_missing_samples_and_new_requests_in_order(model: Path, tmp_path: Path) -> None:
    source, out = write_lines(tmp_path / "in.jsonl", REQUESTS[1:]), tmp_path / "out.jsonl"
    flags = ["--num-samples", "2", "--seed", "5", "--max-tokens", "4", "--quiet"]
    command = ["generate", str(model), "--prompts", str(source), "--out", str(out), *flags]
    write_lines(source, [{"id": r.get("id", i), **r} for i, r in enumerate(REQUESTS)])
    assert main(command) == 0
    whole = out.read_bytes()
    lines = whole.splitlines(keepends=True)
    assert len(lines) == 10
    out.write_bytes(b"".join(lines[4:7]))
    assert main(command) == 0
    assert out.read_bytes() == whole


def test_without_out_records_go_to_stdout(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_lines(tmp_path / "in.jsonl", REQUESTS[:2])
    assert main(["generate", str(model), "--prompts", str(source), *GREEDY]) == 0
    captured = capsys.readouterr()
    assert [json.loads(line)["id"] for line in captured.out.splitlines()] == ["a", 2]
    assert "2 results" in captured.err


def test_the_summary_is_one_object(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = write_lines(tmp_path / "in.jsonl", REQUESTS[:2]), tmp_path / "out.jsonl"
    assert main(["generate", str(model), "--prompts", str(source), "--out", str(out), "--json", *GREEDY]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["results"], summary["kept"], summary["failed"]) == (2, 0, 0)


def test_a_line_separator_inside_a_prompt_is_not_a_line_end(model: Path, tmp_path: Path) -> None:
    source, out = write_lines(tmp_path / "in.jsonl", [{"prompt": "the fox\u2028and\x85"}]), tmp_path / "out.jsonl"
    assert main(["generate", str(model), "--prompts", str(source), "--out", str(out), *GREEDY]) == 0
    assert len(read_lines(out)) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": ', "in.jsonl:2: not JSON"),
        ("[1, 2]", "in.jsonl:2: a line must be a JSON object, got list"),
        ('{"text": "x"}', 'in.jsonl:2: give one of "prompt", "messages" and "ids"; the record has text'),
        ('{"prompt": "x", "ids": [1]}', 'in.jsonl:2: give one of "prompt"'),
        ('{"prompt": 3}', 'in.jsonl:2: "prompt" must be text, got 3'),
        ('{"ids": "abc"}', 'in.jsonl:2: "ids" must be a list of token ids'),
        ('{"ids": []}', "in.jsonl:2: prompt is empty"),
        ('{"ids": [99999]}', "in.jsonl:2: prompt holds the token id 99999"),
        ('{"messages": "hi"}', 'in.jsonl:2: "messages" must be a list'),
        (
            '{"prompt": "x", "params": {"temprature": 1}}',
            "in.jsonl:2: unknown sampling parameter temprature; did you mean",
        ),
        ('{"prompt": "x", "params": {"top_p": 7}}', "in.jsonl:2: top_p must be in [0, 1], got 7"),
        ('{"prompt": "x", "params": 3}', 'in.jsonl:2: "params" must be an object'),
        ('{"id": "a", "prompt": "x"}', "in.jsonl:2: id 'a' is that of"),
        ('{"id": [1], "prompt": "x"}', 'in.jsonl:2: "id" must be text or a whole number'),
        (
            '{"id": "\\ud800", "prompt": "x"}',
            """in.jsonl:2: "id" '\\ud800' has a lone surrogate, which no file can hold""",
        ),
        pytest.param("[" * 100_000, "in.jsonl:2: not JSON (maximum recursion depth", id="nested"),
        ('{"prompt": "x", "param": {}}', 'in.jsonl:2: unknown key "param"; did you mean "params"?'),
        ('{"promtp": "x"}', 'in.jsonl:2: unknown key "promtp"; did you mean "prompt"?'),
        ('{"ID": 5, "prompt": "x"}', 'in.jsonl:2: unknown key "ID"; did you mean "id"?'),
        ('{"prompt": "x", "max_tokens": 1}', 'in.jsonl:2: "max_tokens" is a sampling parameter; put it in "params"'),
        ('{"prompt": "x", "n": 1}', 'in.jsonl:2: "n" is a sampling parameter; put it in "params"'),
        (
            '{"prompt": "x", "max_new_tokens": 1}',
            'in.jsonl:2: unknown key "max_new_tokens"; did you mean "max_tokens", in "p',
        ),
        ('{"prompt": "x", "params": {"n": 100000}}', "in.jsonl:2: n must be in [1, 1024], got 100000"),
        (json.dumps({"ids": [5] * 64}), "in.jsonl:2: prompt has 64 tokens and the model's window is 64; shorten it"),
    ],
)
def test_a_bad_record_is_named_and_nothing_is_written(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(f'{{"id": "a", "prompt": "the fox"}}\n{line}\n')
    assert main(["generate", str(model), "--prompts", str(source), "--out", str(out), *GREEDY]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_an_out_file_of_something_else_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = write_lines(tmp_path / "in.jsonl", REQUESTS[:2]), tmp_path / "out.jsonl"
    command = ["generate", str(model), "--prompts", str(source), "--out", str(out), *GREEDY]
    result = '"text": "", "ids": [1], "finish_reason": "stop", "usage": {"prompt_tokens": 3}'
    alien = ":1: not a result of this command; give another --out"
    for content, message in [
        ("poems\n\n", alien),
        ("my notes", alien),
        ("my notes\rof two days", alien),
        ('{"id": "a", "prompt": "the fox"}', alien),  # a copy of what is read
        ('{"id": "a", "prompt": "the fox"}\n{"pro', alien),
        ('{"id": "z", "text": "", "ids"', alien),
        ('{"id": [1]}\n', alien),
        ('{"id": "a", "sample": {}}\n', alien),
        ("[" * 100_000 + "\n", alien),
        (f'{{"id": "z", {result}}}\n', ":1: id 'z' (sample 0) is not asked for"),
    ]:
        out.write_text(content)
        assert main(command) == 2
        assert message in capsys.readouterr().err
        assert out.read_bytes() == content.encode()


def test_the_file_that_is_read_is_not_written_to(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, other = write_lines(tmp_path / "in.jsonl", REQUESTS), tmp_path / "other.jsonl"
    source.write_bytes(whole := source.read_bytes().removesuffix(b"\n"))
    other.symlink_to(source)
    for out in (source, other):
        assert main(["generate", str(model), "--prompts", str(source), "--out", str(out), *GREEDY]) == 2
        assert f"--out {out} is the file that --prompts reads; give another --out" in capsys.readouterr().err
        assert source.read_bytes() == whole


def test_a_first_line_that_was_torn_is_ours(model: Path, tmp_path: Path) -> None:
    source, out = write_lines(tmp_path / "in.jsonl", [{"id": "ä", "prompt": "the fox"}]), tmp_path / "out.jsonl"
    command = ["generate", str(model), "--prompts", str(source), "--out", str(out), "--seed", "3", *GREEDY]
    for flags in ([], ["--num-samples", "2"]):
        out.unlink(missing_ok=True)
        assert main([*command, *flags]) == 0
        whole = out.read_bytes()
        for size in (1, 9, 25, whole.index(b"\n")):
            out.write_bytes(whole[:size])
            assert main([*command, *flags]) == 0
            assert out.read_bytes() == whole


def test_results_of_other_prompts_or_flags_are_not_kept(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = write_lines(tmp_path / "in.jsonl", REQUESTS[:2]), tmp_path / "out.jsonl"
    command = ["generate", str(model), "--prompts", str(source), "--out", str(out), *GREEDY]
    assert main(command) == 0
    whole = out.read_bytes()
    way_out = "; give another --out or delete the file"
    assert main([*command, "--logprobs"]) == 2
    assert f"out.jsonl:1: id 'a' is there already and has no logprobs, which --logprobs asks for{way_out}" in (
        capsys.readouterr().err
    )
    write_lines(source, [REQUESTS[0], {"prompt": "the hen asked the cat"}])
    assert main(command) == 2
    told = f"out.jsonl:2: id 2 is there already and is the answer to a prompt of 4 tokens, and the prompt has 6 now{way_out}"
    assert told in capsys.readouterr().err
    assert out.read_bytes() == whole
    out.unlink()
    assert main([*command, "--logprobs"]) == 0
    assert main(command) == 0  # logprobs that nobody asks for do no harm
    assert all("logprobs" in record for record in read_lines(out))


def test_keys_of_ones_own_are_left_alone(model: Path, tmp_path: Path) -> None:
    own = ("idx", "_id", "uid", "prompt_id", "source", "meta", "text", "num_tokens", "usage")
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "the fox", **dict.fromkeys(own, 1)}])
    assert main(["generate", str(model), "--prompts", str(source), *GREEDY]) == 0


def test_results_can_go_to_a_device(model: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", REQUESTS)
    assert main(["generate", str(model), "--prompts", str(source), "--out", "/dev/null", *GREEDY]) == 0


def test_a_prompt_without_finite_logits_fails_alone_and_is_tried_again(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = spoil(make_folder(tmp_path / "broken"))
    source, out = write_lines(tmp_path / "in.jsonl", REQUESTS[:3]), tmp_path / "out.jsonl"
    command = ["--prompts", str(source), "--out", str(out), *GREEDY]
    assert main(["generate", str(broken), *command]) == 1
    captured = capsys.readouterr()
    assert (
        f"{source}:2: the model's logits are not finite (a NaN, +inf, or nothing but -inf) after 0 new tokens"
        in captured.err
    )
    assert out.read_text() == ""
    assert main(["generate", str(model), *command]) == 0
    assert len(read_lines(out)) == 3
    assert main(["generate", str(broken), "--prompt", "x", *GREEDY]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and "--prompt: the model's logits are not finite" in captured.err


def test_a_model_that_cannot_be_used_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    no_weights = make_folder(tmp_path / "no-weights")
    (no_weights / "model.safetensors").unlink()
    bare = make_folder(tmp_path / "bare", tokenizer=False)
    narrow = make_folder(tmp_path / "narrow", vocab_size=290)
    for folder, message in [
        (tmp_path / "nowhere", "nowhere: no such model"),
        (no_weights, "no model.safetensors"),
        (bare, 'has no tokenizer.json, which "prompt" needs'),
        (narrow, "ids and the model's embedding 290 rows"),
    ]:
        assert main(["generate", str(folder), "--prompt", "the fox", *GREEDY]) == 2
        assert message in capsys.readouterr().err


def test_a_model_without_tokenizer_still_continues_ids(tmp_path: Path) -> None:
    bare = make_folder(tmp_path / "bare", tokenizer=False)
    source, out = write_lines(tmp_path / "in.jsonl", [{"ids": [1, 2, 3]}]), tmp_path / "out.jsonl"
    assert main(["generate", str(bare), "--prompts", str(source), "--out", str(out), *GREEDY]) == 0
    (record,) = read_lines(out)
    assert record["text"] is None and len(record["ids"]) == 8


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt", "x", "--out", "y"], "--out goes with --prompts"),
        (["--prompt", "x", "--batch-size", "0"], "--batch-size must be in [1, 65536], got 0"),
        (["--prompt", "x", "--batch-size", "65537"], "--batch-size must be in [1, 65536], got 65537"),
        (["--prompt", "x", "--top-p", "1.5"], "top_p must be in [0, 1], got 1.5"),
        (["--prompt", "x", "--num-samples", "0"], "--num-samples must be in [1, 1024], got 0"),
        (["--prompt", "x", "--num-samples", "1025"], "--num-samples must be in [1, 1024], got 1025"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
    ],
)
def test_flags_out_of_range_are_refused(
    model: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main(["generate", str(model), *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_full_disk_keeps_what_was_written(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_lines(tmp_path / "in.jsonl", REQUESTS)
    assert main(["generate", str(model), "--prompts", str(source), "--out", "/dev/full", *GREEDY]) == 1
    assert "/dev/full: cannot be written" in capsys.readouterr().err
