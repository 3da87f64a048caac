"""Outputs of random models under a grammar, judged by Python's own json and re."""

import json
import math
import random
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models

from pellucid.config import ModelConfig
from pellucid.errors import ConfigError, RequestError
from pellucid.inference import Request, SamplingParams, TokenEvent, check_request, generate, update_params
from pellucid.inference.constraints import Constraint, GrammarConstraint, Vocabulary
from pellucid.inference.request import Row
from pellucid.inference.sample import sample
from pellucid.inference.schema import check_finite
from pellucid.model import Transformer
from pellucid.text import decode, with_stop_ids
from pellucid.text_constraints import make_constraint, vocabulary
from pellucid.tokenizer import Tokenizer, train_bpe

torch.set_num_threads(1)

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["naïve", "東京", 'a "quote"', None, 3]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": 120}, "maxItems": 3},
        "on": {"type": "boolean"},
        "inner": {
            "type": "object",
            "properties": {"x": {"const": "é"}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    text = 'the fox asked {"name": "東京", "kind": null, "sizes": [1, 23], "on": true} naïve café 2024-01-31 '
    return train_bpe([text * 3, json.dumps(SCHEMA, ensure_ascii=False) * 2], 420)


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> Transformer:
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size + 5, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=512, initializer_range=0.5,
    )  # fmt: skip
    return Transformer(config, generator=torch.Generator().manual_seed(0)).eval()


def outputs(
    model: Transformer, tokenizer: Tokenizer, constraint: Constraint, n: int, **params: Any
) -> list[tuple[str, str]]:
    """Text and finish reason of ``n`` samples at temperature 2."""
    # a random model hardly ever ends what may go on
    wanted = {"temperature": 2.0, "seed": 1, "n": n, "max_tokens": 300, "logit_bias": {tokenizer.eos_id: 4.0}} | params
    sampling = with_stop_ids(SamplingParams(constraint=constraint, **wanted), tokenizer)
    [*results] = generate(model, [[5, 6, 7]], sampling, batch_size=64)
    assert not [r.error for r in results if r.error]
    return [(decode(tokenizer, r.ids), r.finish_reason) for r in results]


def fits_the_schema(value: Any) -> bool:
    """`SCHEMA` written out by hand."""
    if not isinstance(value, dict) or not {"name", "kind", "sizes"} <= value.keys() <= SCHEMA["properties"].keys():
        return False
    sizes = value["sizes"]
    return (
        isinstance(value["name"], str)
        and len(value["name"]) <= 6
        and value["kind"] in ["naïve", "東京", 'a "quote"', None, 3]
        and isinstance(sizes, list)
        and len(sizes) <= 3
        and all(type(size) is int and -9 <= size <= 120 for size in sizes)
        and isinstance(value.get("on", True), bool)
        and value.get("inner", {"x": "é"}) == {"x": "é"}
    )


def test_every_output_under_a_schema_is_json_that_fits_it(model: Transformer, tokenizer: Tokenizer) -> None:
    found = outputs(model, tokenizer, make_constraint("json_schema", json.dumps(SCHEMA), tokenizer), 60)
    assert {reason for _, reason in found} == {"stop"}
    values = [json.loads(text) for text, _ in found]
    assert all(map(fits_the_schema, values))
    assert len({json.dumps(value) for value in values}) > 40  # it is a random model
    assert {"naïve", "東京"} & {value["kind"] for value in values}
    try:
        import jsonschema
    except ImportError:
        return
    for value in values:
        jsonschema.validate(value, SCHEMA)


def test_a_json_object_is_any_object_and_nothing_else(model: Transformer, tokenizer: Tokenizer) -> None:
    found = outputs(model, tokenizer, make_constraint("json_object", None, tokenizer), 40, max_tokens=60)
    ended = [text for text, reason in found if reason == "stop"]
    assert len(ended) > 5 and all(isinstance(json.loads(text), dict) for text in ended)
    assert all(text.startswith("{") for text, _ in found)


@pytest.mark.parametrize(
    "pattern",
    [
        r"[0-9]{4}-[01][0-9]-[0-3][0-9]",
        r"(foo|naïve|東京)+!",
        r"é{2,5}",
        r"[^a-z]{1,4}",
        r"(?:a|bc){0,6}",
        r"[0-9]+(\.[0-9]{1,2})? (kg|m)",
    ],
)
def test_every_output_under_a_regular_expression_matches_it(
    pattern: str, model: Transformer, tokenizer: Tokenizer
) -> None:
    found = outputs(model, tokenizer, make_constraint("regex", pattern, tokenizer), 60, max_tokens=60)
    ended = [text for text, reason in found if reason == "stop"]
    assert len(ended) > 30 and len(set(ended)) > 2
    assert all(re.fullmatch(pattern, text) for text in ended)


def test_every_output_under_a_lark_grammar_is_a_sentence_of_it(model: Transformer, tokenizer: Tokenizer) -> None:
    grammar = 'start: "(" start ")" | NUMBER\nNUMBER: /[1-9][0-9]?/'
    found = outputs(model, tokenizer, make_constraint("lark", grammar, tokenizer), 100)
    depths = set()
    for text, reason in found:
        depth = text.count("(")
        assert reason == "stop" and re.fullmatch(rf"\({{{depth}}}[1-9][0-9]?\){{{depth}}}", text)
        depths.add(depth)
    assert len(depths) > 1


@given(seed=st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_something_may_always_follow_or_the_output_may_end(tokenizer: Tokenizer, seed: int) -> None:
    draws = random.Random(seed)
    state = make_constraint("json_schema", json.dumps(SCHEMA), tokenizer).start()
    data: list[int] = []
    for _ in range(400):
        ids = state.mask().nonzero()[:, 0].tolist()
        assert ids or state.may_end
        assert state.finished == (not ids)
        if not ids:
            break
        data.append(draws.choice(ids))
        state.accept(data[-1])
    assert state.finished and fits_the_schema(json.loads(decode(tokenizer, data)))


def test_stop_ids_are_allowed_exactly_where_the_grammar_may_end(tokenizer: Tokenizer) -> None:
    constraint = make_constraint("regex", "ab*", tokenizer)
    a, b = tokenizer.encode("a")[0], tokenizer.encode("b")[0]
    stops = (tokenizer.eos_id, b)  # a stop id may be text as well
    logits = torch.zeros(1, tokenizer.vocab_size + 9)
    logits[0, list(stops)] = 5.0
    state = constraint.start()
    params = SamplingParams(constraint=constraint, stop_ids=stops, temperature=0)
    assert not state.may_end
    assert sample(logits, [Row(params, 0, 0, 1, [a], [], state)]).tokens.tolist() == [a]
    state.accept(a)
    assert state.may_end and not state.finished
    assert sample(logits, [Row(params, 0, 0, 2, [a], [a], state)]).tokens.tolist() == [tokenizer.eos_id]


def test_an_output_ends_where_nothing_may_follow_without_a_stop_id(model: Transformer, tokenizer: Tokenizer) -> None:
    params = SamplingParams(constraint=make_constraint("regex", "(yes|no)", tokenizer), n=20, seed=2, max_tokens=9)
    for result in generate(model, [[5, 6]], params):
        assert result.finish_reason == "stop" and decode(tokenizer, result.ids) in ("yes", "no")
        assert tokenizer.eos_id not in result.ids


def test_control_tokens_and_ids_beyond_the_tokenizer_are_never_text(tokenizer: Tokenizer) -> None:
    constraint = make_constraint("regex", r"(?s:.*)", tokenizer)
    mask = constraint.start().mask()
    assert constraint.vocab_size == len(mask) == tokenizer.vocab_size
    assert not mask[list(tokenizer.special_tokens.values())].any() and int(mask.sum()) > 100
    logits = torch.full((1, tokenizer.vocab_size + 9), 0.0)
    logits[0, tokenizer.vocab_size :] = 50.0
    row = Row(SamplingParams(constraint=constraint, temperature=0), 0, 0, 0, [], [], constraint.start())
    assert int(sample(logits, [row]).tokens) < tokenizer.vocab_size


def test_a_grammar_that_names_ids_gets_no_control_token(tokenizer: Tokenizer) -> None:
    [control, *_] = tokenizer.special_tokens.values()
    letter = tokenizer.encode("a")[0]
    mask = make_constraint("lark", f"start: <[{control}]> | <[{letter}]>", tokenizer).start().mask()
    assert mask.nonzero()[:, 0].tolist() == [letter]
    with pytest.raises(RequestError, match="lark cannot be used: no token of the vocabulary"):
        make_constraint("lark", f"start: <[{control}]>", tokenizer)


def test_copies_go_their_own_ways(tokenizer: Tokenizer) -> None:
    state = make_constraint("regex", "(ab|ba)c", tokenizer).start()
    a, b, c = (tokenizer.encode(x)[0] for x in "abc")
    other = state.copy()
    state.accept(a)
    other.accept(b)
    third = state.copy()
    assert bool(state.mask()[b]) and not state.mask()[a]
    assert bool(other.mask()[a]) and not other.mask()[b]
    state.accept(b)
    state.accept(c)
    assert state.finished and not third.may_end and not other.may_end
    with pytest.raises(AssertionError, match="does not allow the token"):
        third.accept(a)


def test_samples_of_one_request_do_not_disturb_each_other(model: Transformer, tokenizer: Tokenizer) -> None:
    constraint = make_constraint("json_schema", json.dumps(SCHEMA), tokenizer)
    whole = outputs(model, tokenizer, constraint, 6)
    assert outputs(model, tokenizer, constraint, 3) == whole[:3]
    assert len(set(whole)) == 6


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("json_schema", "{", "json_schema is not JSON"),
        ("json_schema", "[1]", "json_schema must be a JSON object, got [1]"),
        ("json_schema", '{"type": "foo"}', "json_schema cannot be used: Invalid type: foo"),
        ("json_schema", "false", "Unsatisfiable schema: schema is false"),
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', "minimum (5) is greater than maximum (3)"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', 'Unimplemented keys: ["uniqueItems"]'),
        ("json_schema", '{"uniqueItems": true, "type": "array", "x-guidance": {"lenient": true}}', "Unimplemented keys"),
        ("json_schema", '{"$ref": "#/nowhere"}', "Pointer '/nowhere' does not exist"),
        ("json_schema", '{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}', "no instance that ends"),
        ("json_schema", '{"const": NaN}', "json_schema is not JSON"),
        ("json_schema", '{"allOf": [' * 3000 + "{}" + "]}" * 3000, "json_schema is nested too deeply"),
        ("json_schema", None, "json_schema must be given as text, got None"),
        ("json_object", "{}", "json_object takes no text"),
        ("regex", "(", "unclosed group"),
        ("regex", "a(?=b)", "look-around"),
        ("regex", r"[^\x00-\x{10FFFF}]", "regex cannot be used"),
        ("lark", "start: x", "unknown name"),
        ("lark", "", "Empty grammar"),
        ("yaml", "a", "unknown kind of grammar 'yaml'"),
    ],
)  # fmt: skip
def test_what_is_malformed_or_cannot_be_satisfied_is_refused(
    kind: Any, text: str | None, words: str, tokenizer: Tokenizer
) -> None:
    with pytest.raises(RequestError) as caught:
        make_constraint(kind, text, tokenizer)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "ends"),
    [
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, False),
        ({"type": "array", "items": {"$ref": "#"}}, True),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, False),
        ({"anyOf": [{"type": "null"}, {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}]}, True),
        ({"type": "object", "additionalProperties": {"$ref": "#"}, "required": ["a"]}, False),
        ({"type": "object", "properties": {"next": {"$ref": "#"}}}, True),
        ({"allOf": [{"$ref": "#/$defs/x~1y"}], "$defs": {"x/y": {"type": "string"}}}, True),
    ],
)  # fmt: skip
def test_a_schema_that_requires_itself_over_and_over_is_told_apart(schema: Any, ends: bool) -> None:
    if ends:
        check_finite(schema)
    else:
        with pytest.raises(RequestError, match="no instance that ends"):
            check_finite(schema)


def test_json_has_little_white_space_in_one_place(tokenizer: Tokenizer) -> None:
    state = make_constraint("json_object", None, tokenizer).start()
    state.accept(tokenizer.encode("{")[0])
    space, line, tab = (tokenizer.encode(character)[0] for character in " \n\t")
    assert state.mask()[space] and state.mask()[line] and not state.mask()[tab]
    state.accept(space)
    assert not state.mask()[space] and not state.mask()[line] and state.mask().any()


def test_a_schema_of_thousands_of_references_is_judged_in_little_time_or_refused() -> None:
    def chain(names: list[str], last: Any) -> dict[str, Any]:
        steps = [{"$ref": f"#/$defs/{name}"} for name in names]
        return {"$defs": dict(zip(names, [*steps[1:], last], strict=True)), **steps[0]}

    began = time.process_time()
    check_finite(chain([f"d{i}" for i in range(4000)], {"type": "null"}))
    with pytest.raises(RequestError, match="no instance that ends"):
        check_finite(chain([f"d{i}" for i in range(4000)], {"$ref": "#"}))
    with pytest.raises(RequestError, match=r"refers to 6,\d{3} places, at most 5,000"):
        check_finite(chain([f"d{i}" for i in range(6000)], {"type": "null"}))
    mixed = chain([f"d{i}" for i in range(4000)], {"type": "null"})
    mixed["$defs"] = dict(reversed(mixed["$defs"].items()))  # each look at all of them settles one
    with pytest.raises(RequestError, match="too often to be checked"):
        check_finite(mixed)
    assert time.process_time() - began < 5


def test_a_grammar_of_too_many_symbols_is_refused(tokenizer: Tokenizer) -> None:
    def wide(count: int) -> str:
        properties = {f"p{i}": {"type": "integer"} for i in range(count)}
        return json.dumps({"type": "object", "properties": properties, "required": list(properties)})

    make_constraint("json_schema", wide(500), tokenizer)
    with pytest.raises(RequestError, match="json_schema cannot be used: grammar size"):
        make_constraint("json_schema", wide(15_000), tokenizer)


def test_text_that_a_grammar_forces_is_cut_as_the_tokenizer_cuts_it(tokenizer: Tokenizer) -> None:
    state = make_constraint("regex", "the fox asked", tokenizer).start()
    ids: list[int] = []
    while not state.finished:
        ids.append(int(state.mask().nonzero()[0, 0]))
        state.accept(ids[-1])
    assert ids == tokenizer.encode("the fox asked")


def test_what_goes_wrong_in_a_grammar_is_told_where_the_next_token_is_asked_for(tokenizer: Tokenizer) -> None:
    state = make_constraint("regex", "ab*", tokenizer).start()
    state.accept(tokenizer.encode("a")[0])
    state._matcher.consume_token(tokenizer.encode("c")[0])  # as if a limit of the library had been reached
    assert not state.may_end and not state.finished
    for again in (state, state.copy()):
        again._mask = None
        with pytest.raises(RequestError, match="doesn't satisfy the grammar"):
            again.mask()


def test_a_constraint_that_fails_ends_its_own_row_alone() -> None:
    class Broken:
        may_end = finished = False

        def mask(self) -> torch.Tensor:
            raise RequestError("the grammar is too complex")

        def accept(self, token: int) -> None: ...

        def copy(self) -> "Broken":
            return self

    class Source:
        vocab_size = 4

        def start(self) -> Broken:
            return Broken()

    constraint = Source()
    rows = [
        Row(SamplingParams(temperature=0), 0, 0, 0),
        Row(SamplingParams(temperature=0, constraint=constraint), 0, 0, 0, constraint=constraint.start()),
    ]
    drawn = sample(torch.tensor([[0.0, 2.0, 1.0, 0.0]]).repeat(2, 1), rows)
    assert drawn.tokens.tolist() == [1, 0] and drawn.errors == [None, "the grammar is too complex"]


# -- tokenizers of other kinds --------------------------------------------------------------------------------------


def sentence_piece() -> Tokenizer:
    """Pieces as in Llama's tokenizer: spaces as U+2581, bytes spelt out, and the first space stripped when decoded."""
    words = [
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁yes",
        "yes",
        "▁no",
        "no",
        "▁é",
        "é",
        "o",
    ]
    raw = RawTokenizer(models.Unigram([(word, -1.0) for word in words], unk_id=0, byte_fallback=True))
    raw.add_special_tokens(["<s>", "</s>"])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(raw.to_str(), {"bos_token": "<s>", "eos_token": "</s>"})


@pytest.mark.parametrize("pattern", ["(yes|no)( (yes|no|é|東)){0,3}", "( yes|no)"])
def test_pieces_with_marked_spaces_and_byte_tokens_give_the_text_that_was_asked_for(pattern: str) -> None:
    tokenizer = sentence_piece()
    constraint = make_constraint("regex", pattern, tokenizer)
    draws = random.Random(0)
    texts = set()
    for _ in range(100):
        state, ids = constraint.start(), []
        while not state.finished and not (state.may_end and draws.random() < 0.3):
            ids.append(draws.choice(state.mask().nonzero()[:, 0].tolist()))
            state.accept(ids[-1])
        texts.add(tokenizer.decode(ids))
    assert all(re.fullmatch(pattern, text) for text in texts)
    assert len(texts) > 5 or pattern == "( yes|no)"


def test_a_decoder_that_looks_at_several_tokens_is_refused() -> None:
    raw = RawTokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    raw.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="grammars need a tokenizer with a byte-level or byte-fallback decoder"):
        make_constraint("regex", "a", Tokenizer(raw.to_str(), {}))


def test_a_vocabulary_is_made_once_for_a_tokenizer(tokenizer: Tokenizer) -> None:
    assert vocabulary(tokenizer) is vocabulary(tokenizer)
    assert isinstance(make_constraint("regex", "a", tokenizer), Constraint)


def test_a_missing_library_is_told_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r'needs llguidance: install it with pip install "pellucid\[serve\]"'):
        Vocabulary([b"a"], lambda text: [0])


# -- requests -------------------------------------------------------------------------------------------------------


def test_constraints_are_checked_with_the_request(tokenizer: Tokenizer) -> None:
    constraint = make_constraint("regex", "a", tokenizer)
    params = SamplingParams(constraint=constraint)
    with pytest.raises(RequestError, match="constraint was made for a tokenizer of"):
        check_request(Request("a", (1,), params), ModelConfig(vocab_size=tokenizer.vocab_size - 1))
    assert check_request(Request("a", (1,), params), ModelConfig(vocab_size=tokenizer.vocab_size + 1)) == 255
    with pytest.raises(RequestError, match="allowed_ids and constraint both say what may be drawn"):
        SamplingParams(constraint=constraint, allowed_ids=[1])  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="constraint must be a Constraint, got 'json'"):
        SamplingParams(constraint="json")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="constraint holds objects and cannot be given in a table"):
        update_params(SamplingParams(), {"constraint": "json"})


def test_generation_tells_the_error_of_a_processor_and_goes_on_with_the_others(model: Transformer) -> None:
    def third_time(ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        return logits if len(ids) < 4 else logits * math.nan

    events: list[TokenEvent] = []
    each = [SamplingParams(temperature=0, max_tokens=5), SamplingParams(max_tokens=5, logits_processors=(third_time,))]
    fine, failed = generate(model, [[1, 2], [1, 2]], each, on_event=events.append)
    assert (fine.finish_reason, len(fine.ids), fine.error) == ("length", 5, None)
    assert (failed.finish_reason, len(failed.ids)) == ("error", 2)
    assert failed.error == "the logits processor third_time returned NaN, +inf or nothing but -inf"
    [last] = [event for event in events if event.finish_reason == "error"]
    assert (last.token, last.error) == (None, failed.error)


def test_generation_tells_alternatives_and_the_prompts_logprobs(model: Transformer) -> None:
    prompt = [3, 9, 4, 4, 60]
    params = SamplingParams(temperature=0, max_tokens=4, top_logprobs=2, prompt_logprobs=1)
    plain, told = generate(model, [prompt, prompt], [SamplingParams(temperature=0, max_tokens=4), params])
    assert plain.top_logprobs is None and plain.prompt_logprobs is None and plain.ids == told.ids
    with torch.no_grad():
        whole = model(torch.tensor([prompt + told.ids])).logits[0].log_softmax(-1)
    assert told.prompt_logprobs is not None and told.top_logprobs is not None
    first, *others = told.prompt_logprobs
    assert first is None and len(others) == 4
    for i, one in enumerate(others):
        assert one is not None and one.logprob == pytest.approx(float(whole[i, prompt[i + 1]]), abs=1e-4)
        assert one.top[0][0] == int(whole[i].argmax())
    for i, top in enumerate(told.top_logprobs):
        assert top[0] == (told.ids[i], told.logprobs[i])
        assert [id_ for id_, _ in top] == whole[4 + i].topk(2).indices.tolist()


def test_no_tokens_asked_for_are_no_tokens_given(model: Transformer) -> None:
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    events: list[TokenEvent] = []
    [result] = generate(model, [[1, 2, 3]], params, on_event=events.append)
    assert (result.ids, result.finish_reason) == ([], "length")
    assert [(event.token, event.finish_reason) for event in events] == [(None, "length")]
    assert result.prompt_logprobs is not None and len(result.prompt_logprobs) == 3


def test_the_grammar_is_the_one_that_was_given(tokenizer: Tokenizer) -> None:
    constraint = make_constraint("regex", "a", tokenizer)
    assert isinstance(constraint, GrammarConstraint) and constraint.kind == "regex"
