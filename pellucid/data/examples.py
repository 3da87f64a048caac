"""One JSON object -> one record: the shapes in which examples for post-training come, and what is wrong with some.

A *turn* is a message {"role", "content"}. Prompts and answers may be texts or lists of turns. Texts become a user's and an
assistant's turn where the tokenizer has a chat template; without one they stand as they are, between the beginning token
and the end token. A key "tools" beside them is shown by templates that do so.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from pellucid.data.documents import Message
from pellucid.data.record_files import MAX_PARTS, Part, Record, part
from pellucid.data.shards import IntArray
from pellucid.errors import DataError, RequestError

if TYPE_CHECKING:
    from pellucid.tokenizer import Tokenizer

Kind: TypeAlias = Literal["sft", "dpo", "grpo"]
Turns: TypeAlias = list[dict[str, Any]]

SHAPES: dict[Kind, str] = {
    "sft": "messages; prompt and completion (or answer); sequence and loss_mask",
    "dpo": "prompt, chosen and rejected; chosen and rejected (conversations); chosen, rejected, chosen_mask and rejected_mask",
    "grpo": "prompt and answer; messages; prompts, responses, masks and rewards",
}
"""The keys that a record of each kind may have."""

_FOLLOWS = {
    "start": ("system", "developer", "user"),
    "system": ("user",),
    "developer": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}
"""Which roles may come after each."""


def example(table: dict[str, Any], kind: Kind, tokenizer: "Tokenizer", location: str) -> Record:
    """The record that a JSON object stands for.

    Raises:
        DataError: names ``location`` and what is wrong: keys that are no shape of ``kind``, an empty turn, roles out of order,
            no answer, chosen equal to rejected, messages that the template refuses, ids outside the vocabulary.
    """
    build = {"sft": _conversation, "dpo": _pair, "grpo": _group}[kind]
    try:
        record = build(table, tokenizer)
    except (DataError, RequestError) as error:
        raise DataError(f"{location}: {error}") from error
    for piece in record.parts:
        if len(piece.ids) and not 0 <= int(piece.ids.min()) <= int(piece.ids.max()) < tokenizer.vocab_size:
            bad = piece.ids[(piece.ids < 0) | (piece.ids >= tokenizer.vocab_size)][0]
            raise DataError(f"{location}: id {bad} is outside the vocabulary of {tokenizer.vocab_size:,} tokens")
    return record


# -- the three kinds ----------------------------------------------------------------------------------------


def _conversation(table: dict[str, Any], tokenizer: "Tokenizer") -> Record:
    if "sequence" in table:
        return Record((_learnable(part(*_stored(table, "sequence", "loss_mask"))),))
    if "messages" in table:
        turns = _turns(table["messages"], "messages")
        if all(turn["role"] != "assistant" for turn in turns):
            raise DataError("no assistant turn in messages, so there is nothing to learn")
        return Record((_learnable(part(*_chat(turns, tokenizer, _tools(table, tokenizer)))),))
    key = "completion" if "completion" in table else "answer"
    if "prompt" not in table or key not in table:
        raise _unknown(table, "sft")
    ids, learnt = _answered(table["prompt"], table[key], key, tokenizer, _tools(table, tokenizer))
    return Record((_learnable(part(ids, learnt)),))


def _pair(table: dict[str, Any], tokenizer: "Tokenizer") -> Record:
    if not {"chosen", "rejected"} <= table.keys():
        raise _unknown(table, "dpo")
    both = ("chosen", "rejected")
    if "chosen_mask" in table or "rejected_mask" in table:
        sides = [_stored(table, key, f"{key}_mask") for key in both]
    else:
        prompt, answers = _prompt_and_answers(table)
        if answers[0] == answers[1]:
            raise DataError("chosen and rejected are the same, so there is nothing to prefer")
        tools = _tools(table, tokenizer)
        sides = [_answered(prompt, answer, key, tokenizer, tools) for answer, key in zip(answers, both, strict=True)]
    chosen, rejected = (_learnable(part(*side), key) for side, key in zip(sides, both, strict=True))
    if np.array_equal(chosen.ids, rejected.ids):
        raise DataError("chosen and rejected are the same tokens, so there is nothing to prefer")
    shared = min(_shared(chosen.ids, rejected.ids), *(int(np.argmax(side.learnt)) for side in (chosen, rejected)))
    halves = (Part(side.ids[shared:], side.learnt[shared:]) for side in (chosen, rejected))
    return Record((Part(chosen.ids[:shared], chosen.learnt[:shared]), *halves))


def _group(table: dict[str, Any], tokenizer: "Tokenizer") -> Record:
    if "responses" in table:
        return _stored_group(table)
    if "prompt" in table:
        turns = _as_turns(table["prompt"], "prompt", "user")
    elif "messages" in table:
        turns = _turns(table["messages"], "messages")
        if turns[-1]["role"] == "assistant":
            table = {"answer": turns[-1]["content"], **table}
            turns = turns[:-1]
    else:
        raise _unknown(table, "grpo")
    if isinstance(table.get("prompt"), str) and tokenizer.chat_template is None:
        return Record((part(_plain(table["prompt"], tokenizer)),), table)
    if turns and turns[-1]["role"] == "assistant":
        raise DataError("the prompt ends with an assistant turn; it must end where an answer begins")
    _check_order(turns)
    ids = tokenizer.encode_chat(turns, add_generation_prompt=True, tools=_tools(table, tokenizer))
    return Record((part(ids),), table)


def _stored_group(table: dict[str, Any]) -> Record:
    """Answers that were given and rewarded before: prompts [P], responses [G][L], masks [G][L], rewards [G]."""
    missing = {"prompts", "responses", "masks", "rewards"} - table.keys()
    if missing:
        raise DataError(f"stored rollouts lack {', '.join(sorted(missing))}")
    responses, masks, rewards = _rows(table, "responses"), _rows(table, "masks"), _numbers(table["rewards"], "rewards")
    logprobs = _rows(table, "old_logprobs") if table.get("old_logprobs") is not None else None
    sizes = {len(responses), len(masks), len(rewards)} | ({len(logprobs)} if logprobs is not None else set())
    if len(sizes) != 1:
        raise DataError(
            f"{len(responses)} responses, {len(masks)} masks and {len(rewards)} rewards; each response needs one of each"
        )
    if not 1 <= len(responses) < MAX_PARTS:
        raise DataError(f"a group has {len(responses)} responses; 1 to {MAX_PARTS - 1} can be stored")
    prompt = _ids(table, "prompts")
    if not prompt:
        raise DataError("prompts is empty; a response needs a token before it")
    parts, kept = [part(prompt)], []
    for i in range(len(responses)):
        ids, mask = _stored({"responses": responses[i], "masks": masks[i]}, "responses", "masks")
        length = max((at for at, is_real in enumerate(mask, 1) if is_real), default=0)  # what follows is padding
        if not length:
            raise DataError(f"response {i} has no token that its mask keeps")
        parts.append(part(ids[:length], mask[:length]))
        if logprobs is not None:
            said = _numbers(logprobs[i], "old_logprobs")
            if len(said) < length:
                raise DataError(f"response {i} has {length} tokens and {len(said)} old_logprobs")
            kept.append(said[:length])
    stored = {"rewards": rewards} | ({"old_logprobs": kept} if logprobs is not None else {})
    extra = {key: value for key, value in table.items() if key not in ("prompts", "responses", "masks")}
    return Record(tuple(parts), extra | stored)


# -- texts and turns -> ids ---------------------------------------------------------------------------------


def _prompt_and_answers(table: dict[str, Any]) -> tuple[Any, tuple[Any, Any]]:
    """The prompt and the two answers; without a key "prompt" it is the turns with which both conversations begin."""
    chosen, rejected = table["chosen"], table["rejected"]
    if "prompt" in table:
        return table["prompt"], (chosen, rejected)
    if not (isinstance(chosen, list) and isinstance(rejected, list)):
        raise DataError('chosen and rejected need a "prompt", or must be whole conversations (lists of messages)')
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    if shared == len(chosen) == len(rejected):
        raise DataError("chosen and rejected are the same, so there is nothing to prefer")
    return chosen[:shared], (chosen[shared:], rejected[shared:])


def _answered(
    prompt: Any, answer: Any, key: str, tokenizer: "Tokenizer", tools: Turns | None
) -> tuple[list[int], list[bool]]:
    """The ids of a prompt and its answer, of which what the assistant says in the answer is learnt."""
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
        answer = str(answer)
    if tokenizer.chat_template is None and isinstance(prompt, str) and isinstance(answer, str):
        _refuse_empty(answer, key)
        front, back = _plain(prompt, tokenizer), tokenizer.encode(answer)
        back += [] if tokenizer.eos_id is None else [tokenizer.eos_id]
        return front + back, [False] * len(front) + [True] * len(back)
    before, after = _as_turns(prompt, "prompt", "user"), _as_turns(answer, key, "assistant")
    if after[0]["role"] != "assistant":
        raise DataError(f"{key} begins with a turn of the {after[0]['role']}; it must be what the assistant says")
    ids, learnt = _chat([*before, *after], tokenizer, tools)
    asked = tokenizer.encode_chat(before, add_generation_prompt=True, tools=tools)
    same = _shared(np.asarray(ids, np.int64), np.asarray(asked, np.int64))
    if same < len(asked) - 1:  # the last token may differ where an answer's first letters join it
        raise DataError(
            "the chat template renders the prompt differently when an answer follows, so the answer cannot be told apart; "
            "put it into messages"
        )
    return ids, [False] * same + learnt[same:]


def _chat(turns: Turns, tokenizer: "Tokenizer", tools: Turns | None) -> tuple[list[int], list[bool]]:
    if tokenizer.chat_template is None:
        raise DataError("messages need a tokenizer with a chat template; give --chat-template FILE")
    _check_order(turns)
    return tokenizer.encode_chat_with_mask(turns, tools=tools)


def _tools(table: dict[str, Any], tokenizer: "Tokenizer") -> Turns | None:
    """What the assistant may call, for templates that show it."""
    tools = table.get("tools")
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"tools must be a list of objects, got {_short(tools)}")
    if "tools" not in (tokenizer.chat_template or ""):
        raise DataError(
            "the record has tools and the chat template shows none; give --chat-template FILE with one that does"
        )
    return tools


def _plain(prompt: Any, tokenizer: "Tokenizer") -> list[int]:
    assert isinstance(prompt, str)
    _refuse_empty(prompt, "prompt")
    return ([] if tokenizer.prefix_id is None else [tokenizer.prefix_id]) + tokenizer.encode(prompt)


def _as_turns(value: Any, key: str, role: str) -> Turns:
    if isinstance(value, str):
        _refuse_empty(value, key)
        return [{"role": role, "content": value}]
    return _turns(value, key)


def _turns(value: Any, key: str) -> Turns:
    """``value`` as a list of turns, each with something in it."""
    if not isinstance(value, list) or not value:
        raise DataError(f'{key} must be text or a list of {{"role": ..., "content": ...}}, got {_short(value)}')
    for i, turn in enumerate(value):
        role = turn.get("role") if isinstance(turn, dict) else None
        if not isinstance(role, str):
            raise DataError(f'{key}[{i}] must be an object with "role" and "content"')
        if role not in _FOLLOWS or role == "start":
            raise DataError(
                f"{key}[{i}] has the role {role!r}; known: {', '.join(r for r in _FOLLOWS if r != 'start')}"
            )
        content = turn.get("content")
        if role == "assistant" and turn.get("tool_calls"):
            continue  # says nothing but calls
        if not isinstance(content, (str, list)) or not content or (isinstance(content, str) and content.isspace()):
            raise DataError(f"{key}[{i}], a turn of the {role}, is empty")
    return value


def _check_order(turns: Sequence[Message | dict[str, Any]]) -> None:
    last = "start"
    for i, turn in enumerate(turns):
        if turn["role"] not in _FOLLOWS[last]:
            before = "the beginning" if last == "start" else f"a turn of the {last}"
            raise DataError(
                f"roles out of order: message {i} is of the {turn['role']} after {before}, where "
                f"{' or '.join(_FOLLOWS[last])} is due"
            )
        last = turn["role"]


# -- small checks -------------------------------------------------------------------------------------------


def _learnable(whole: Part, key: str = "") -> Part:
    """``whole`` up to its last learnt token: what stands behind teaches nothing."""
    targets = np.flatnonzero(whole.learnt[1:])
    if not len(targets):
        raise DataError(f"{key or 'the record'} has no token to learn")
    stop = int(targets[-1]) + 2
    return Part(whole.ids[:stop], whole.learnt[:stop])


def _shared(a: IntArray, b: IntArray) -> int:
    """How many ids two rows begin with alike."""
    size = min(len(a), len(b))
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if len(different) else size


def _stored(table: dict[str, Any], key: str, mask_key: str) -> tuple[list[int], list[bool]]:
    """Ids and the mask beside them."""
    ids = _ids(table, key)
    if mask_key not in table:
        raise DataError(f"{mask_key} is missing beside the ids it belongs to")
    mask = _array(table[mask_key], mask_key)
    if len(mask) != len(ids):
        raise DataError(f"{mask_key} has {len(mask)} values for {len(ids)} tokens; each token needs one")
    if not np.isin(mask, (0, 1)).all():
        raise DataError(f"{mask_key} must hold 0 and 1, or false and true")
    return ids, mask.astype(bool).tolist()


def _ids(table: dict[str, Any], key: str) -> list[int]:
    ids = _array(table[key], key)
    if ids.size and ids.dtype.kind not in "iu":
        raise DataError(f"{key} must be a list of token ids, got {_short(table[key])}")
    out: list[int] = ids.tolist()
    return out


def _numbers(value: Any, key: str) -> list[float]:
    numbers = _array(value, key)
    if not np.isfinite(numbers).all():
        raise DataError(f"{key} must be finite, got {_short(value)}")
    out: list[float] = numbers.astype(float).tolist()
    return out


def _array(value: Any, key: str) -> npt.NDArray[Any]:
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):  # ragged, or beyond 64 bits
        array = np.empty(0, object)
    if (
        not isinstance(value, list)
        or array.ndim != 1
        or (array.size and array.dtype.kind not in "biuf")
        or array.dtype == object
    ):
        raise DataError(f"{key} must be a list of numbers, got {_short(value)}")
    return array


def _rows(table: dict[str, Any], key: str) -> list[Any]:
    rows = table[key]
    if not isinstance(rows, list):
        raise DataError(f"{key} must be a list of lists, got {_short(rows)}")
    return rows


def _refuse_empty(text: str, key: str) -> None:
    if not text or text.isspace():
        raise DataError(f"{key} is empty")


def _unknown(table: dict[str, Any], kind: Kind) -> DataError:
    others = [other for other in SHAPES if other != kind and _fits(table, other)]
    hint = f"; it looks like data for --for {others[0]}" if others else ""
    return DataError(
        f"no example for {kind} in a record with {', '.join(map(repr, table)) or 'no keys'}{hint}; known: {SHAPES[kind]}"
    )


def _fits(table: dict[str, Any], kind: Kind) -> bool:
    wanted = {"sft": ("messages", "completion", "sequence"), "dpo": ("chosen",), "grpo": ("answer", "responses")}[kind]
    return any(key in table for key in wanted)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{type(value).__name__} {text[:30]}..."
