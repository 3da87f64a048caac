"""From what a client asks to what an engine runs: the prompt's ids, the sampling settings, and who reads the answer."""

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pellucid.errors import ConfigError, RequestError
from pellucid.inference import Engine, Request, SamplingParams
from pellucid.inference.request import TokenEvent, window_of
from pellucid.model_config import ModelConfig
from pellucid.server.answer_grammar import call_rules, compose, constraint
from pellucid.server.drawn_text import prompt_tokens
from pellucid.server.emission import Emitter, Rules
from pellucid.server.errors import ContextLengthError
from pellucid.server.generation import Generation, Grammar, TokenText, Tool
from pellucid.server.reasoning import Markers, Where, find_markers, where_prompt_ends
from pellucid.server.tool_prompt import definitions, explain, spell_out
from pellucid.server.tools import ToolFormat, find_format
from pellucid.text import check_tokenizer, decode, encode_prompt
from pellucid.tokenizer import Tokenizer

_MORE_ENDS = ("<|eom_id|>",)
"""Tokens that end an answer with a tool call in some families, beside those of `Tokenizer.stop_ids`."""
_TAIL = 16
"""Ids at the prompt's end that are looked at for a marker of reasoning."""


@dataclass(frozen=True, slots=True)
class Served:
    """A model under the name by which clients know it, and what its files say about answers."""

    name: str
    tokenizer: Tokenizer
    engine: Engine
    window: int
    """The most tokens that prompt and answer may have: the model's window, or the whole cache where that is smaller."""
    end_ids: tuple[int, ...]
    tool_format: ToolFormat
    markers: Markers | None
    """Of reasoning."""

    @classmethod
    def of(cls, name: str, loaded: tuple[Any, Tokenizer | None, ModelConfig], engine: Engine) -> "Served":
        """Of a `pellucid.checkpoint.model_folder.Loaded`.

        Raises:
            ConfigError: it has no tokenizer.
            CheckpointError: the tokenizer does not fit the model.
        """
        _, tokenizer, config = loaded
        if tokenizer is None:
            raise ConfigError(
                f"model {name} has no tokenizer.json, so it cannot be served; put its tokenizer beside it"
            )
        check_tokenizer(tokenizer, config)
        more = [tokenizer.special_tokens[token] for token in _MORE_ENDS if token in tokenizer.special_tokens]
        return cls(
            name,
            tokenizer,
            engine,
            min(window_of(config), engine.pool.num_blocks * engine.pool.block_size),
            tuple(dict.fromkeys([*tokenizer.stop_ids, *more])),
            find_format(tokenizer.chat_template),
            find_markers(tokenizer),
        )


class Admitted(NamedTuple):
    """One prompt, ready to run. Events of sample i go to ``emitters[i]``."""

    request: Request
    emitters: list[Emitter]
    prompt: tuple[int, ...]
    tokenizer: Tokenizer

    def echo(self, event: TokenEvent | None = None) -> tuple[str, tuple[TokenText, ...]]:
        """The prompt as text and, from the request's first event where that tells them, as tokens with log-probabilities.

        Control tokens have no text. Nothing predicts the first token: its log-probability is NaN.
        """
        told = event.prompt_logprobs if event is not None else None
        if told is None:
            return decode(self.tokenizer, self.prompt), ()
        return prompt_tokens(self.tokenizer, self.prompt, told)


def admit(generation: Generation, served: Served, *, request_id: str | None = None, salt: str = "") -> list[Admitted]:
    """What the engine is to run, one for each prompt. Pure: it may be called in any thread, and nothing has begun then.

    Choice i of prompt p has the index ``p * n + i`` in pieces.

    Args:
        request_id: begins the ids of the engine's requests; None draws one.
        salt: only requests with the same one, and the same ``cache_salt``, share what was computed.

    Raises:
        ContextLengthError: a prompt fills the window.
        RequestError: the template refuses the messages, in its words; a grammar or schema cannot be used; or as
            `Engine.submit`.
    """
    name = request_id or secrets.token_hex(12)
    salt = json.dumps([salt, generation.cache_salt]) if salt or generation.cache_salt else ""
    if generation.messages is not None:
        prompts = [tuple(encode_messages(generation, served))]
        _check_length(generation, served, prompts[0])  # before grammars are made, which may take longer
        answer = _chat_answer(generation, served, prompts[0])
    else:
        prompts = [_prompt_ids(prompt, served.tokenizer) for prompt in generation.prompts]
        answer = _Answer(generation.grammar)
    found = []
    for i, prompt in enumerate(prompts):
        params, rules = _settings(generation, served, answer, prompt)
        request = Request(name if len(prompts) == 1 else f"{name}-{i}", prompt, params, salt)
        served.engine.check(request)
        emitters = [Emitter(rules, i * params.n + choice) for choice in range(params.n)]
        found.append(Admitted(request, emitters, prompt, served.tokenizer))
    return found


def _check_length(generation: Generation, served: Served, prompt: Sequence[int]) -> None:
    """ContextLengthError: there is no room for an answer."""
    if len(prompt) > served.window or (len(prompt) == served.window and generation.params.max_tokens):
        raise ContextLengthError(len(prompt), served.window)


def encode_messages(generation: Generation, served: Served) -> list[int]:
    """The ids of a conversation, up to where the answer begins; what `/v1/messages/count_tokens` counts.

    A last message of the assistant's is continued. The ids begin with the tokenizer's beginning token, once, where it has one.

    Raises:
        RequestError: the template refuses it, in its words, or the last message cannot be continued.
    """
    ids = _render(generation, served, add_generation_prompt=True)
    bos = served.tokenizer.prefix_id
    return ids if bos is None or ids[:1] == [bos] else [bos, *ids]


def _render(generation: Generation, served: Served, *, add_generation_prompt: bool) -> list[int]:
    messages, tools = list(generation.messages or ()), _told_tools(generation)
    native = served.tool_format.in_template
    if not native:
        text = explain(tools, parallel=generation.tool_choice.parallel) if tools else None
        messages = spell_out(messages, text)
    return served.tokenizer.encode_chat(
        messages,
        add_generation_prompt=add_generation_prompt,
        continue_last=_continued(generation) is not None,
        tools=(definitions(tools) or None) if native else None,
        options=generation.template_options,
    )


def _told_tools(generation: Generation) -> Sequence[Tool]:
    choice, tools = generation.tool_choice, generation.tools
    if choice.kind in ("required", "named") and not tools:
        raise RequestError(f"tool_choice is {choice.kind} and there are no tools; list some, or leave tool_choice out")
    if choice.kind == "named" and choice.name not in {tool.name for tool in tools}:
        raise RequestError(f"tool_choice names {choice.name!r}, which is none of the tools; add it to tools")
    return () if choice.kind == "none" else tools


def _continued(generation: Generation) -> str | None:
    """What the assistant has begun to say, where the last message is its; None: its turn is yet to begin."""
    last = (generation.messages or ({},))[-1]
    if last.get("role") != "assistant":
        return None
    if last.get("tool_calls"):
        raise RequestError("the last message calls tools; answer each call with a message of role tool")
    content = last.get("content")
    return content if isinstance(content, str) else None


def _prompt_ids(prompt: str | tuple[int, ...], tokenizer: Tokenizer) -> tuple[int, ...]:
    return tuple(encode_prompt(tokenizer, prompt)) if isinstance(prompt, str) else prompt


# -- what the answer looks like -----------------------------------------------------------------------------


class _Answer(NamedTuple):
    """The grammar that it must satisfy, markers of reasoning and where it begins, form and names of calls."""

    grammar: Grammar | None = None
    reasoning: tuple[Markers, Where] | None = None
    tools: tuple[ToolFormat, frozenset[str]] | None = None


def _chat_answer(generation: Generation, served: Served, prompt: Sequence[int]) -> _Answer:
    reasoning = None
    if served.markers is not None and (where := _where(generation, served, prompt, served.markers)) != "after":
        reasoning = served.markers, where
    tools, choice = _told_tools(generation), generation.tool_choice
    if choice.kind == "named":
        tools = [tool for tool in tools if tool.name == choice.name]
    names = frozenset(tool.name for tool in tools)
    grammar = _grammar(generation, served, tools, reasoning)
    return _Answer(grammar, reasoning, (served.tool_format, names) if tools else None)


def _where(generation: Generation, served: Served, prompt: Sequence[int], markers: Markers) -> Where:
    """Where the answer begins: the template, or what the assistant has begun to say, may have opened the reasoning."""
    begun = _continued(generation)
    if begun:
        return "inside" if begun.rfind(markers.open) > begun.rfind(markers.close) else "after"
    where = _where_after(prompt, served.tokenizer, markers)
    last = str((generation.messages or ({},))[-1].get("content")).rstrip()
    if where != "before" and last.endswith(tuple(markers)):  # is it the template that says it, or the user?
        said = _render(generation, served, add_generation_prompt=False)
        return "before" if _where_after(said, served.tokenizer, markers) == where else where
    return where


def _where_after(prompt: Sequence[int], tokenizer: Tokenizer, markers: Markers) -> Where:
    return where_prompt_ends(tokenizer.decode(prompt[-_TAIL:], skip_special=False), markers)


def _grammar(
    generation: Generation, served: Served, tools: Sequence[Tool], reasoning: tuple[Markers, Where] | None
) -> Grammar | None:
    """What must be forced; None: nothing.

    Where a call must come the answer is calls, whatever ``grammar`` says of texts; else it is a text of that grammar, or calls.
    """
    choice, tokenizer, text = generation.tool_choice, served.tokenizer, generation.grammar
    forced = choice.kind in ("required", "named")
    if text is None and not forced:
        return None
    if reasoning is not None and set(reasoning[0]) & tokenizer.special_tokens.keys():
        if reasoning[1] == "inside":
            raise RequestError(
                f"{'tool_choice' if forced else 'response_format'} cannot be kept here: the chat template begins with "
                f"reasoning, whose end {reasoning[0].close} is a control token of this model, which no grammar can ask for; "
                "switch the reasoning off (chat_template_kwargs), or leave it out"
            )
        reasoning = None  # it answers without
    if text is not None and not forced:
        constraint(text.kind, text.text, tokenizer)  # what is wrong with it is told in its own terms
        if not tools and reasoning is None:
            return text
    rules = call_rules(tools, served.tool_format, tokenizer)
    separator = served.tool_format.separator if choice.parallel else None
    return compose(None if forced else text, rules, separator=separator, reasoning=reasoning)


def _settings(
    generation: Generation, served: Served, answer: _Answer, prompt: tuple[int, ...]
) -> tuple[SamplingParams, Rules]:
    """How tokens are drawn and how they are read. ContextLengthError: there is no room for one."""
    _check_length(generation, served, prompt)
    params, window = generation.params, served.window
    limit = min(params.max_tokens, window - len(prompt))
    end_ids = () if generation.ignore_eos else served.end_ids
    grammar = answer.grammar
    drawn = replace(
        params,
        max_tokens=limit,
        min_tokens=min(params.min_tokens, limit),
        stop_ids=tuple(dict.fromkeys([*params.stop_ids, *end_ids])),
        constraint=None if grammar is None else constraint(grammar.kind, grammar.text, served.tokenizer),
    )
    rules = Rules(
        tokenizer=served.tokenizer,
        end_ids=frozenset(end_ids),
        stop_ids=frozenset(params.stop_ids),
        stop=generation.stop,
        min_tokens=params.min_tokens,
        reasoning=answer.reasoning,
        tools=answer.tools,
        parallel=generation.tool_choice.parallel,
        logprobs=generation.logprobs,
        length_reason="context" if params.max_tokens > limit else "length",
        follows=prompt if generation.messages is None else (),
    )
    return drawn, rules
