"""Records as batches: each once an epoch, whole or cut as asked, the same for any number of ranks and after a stop."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from records import MemoryRecords, conversations, pairs, part
from support import TINY

from pellucid.config import ModelConfig
from pellucid.data.batches import Batch, Loader
from pellucid.data.index import write_index
from pellucid.data.record_files import Record, RecordData, RecordWriter
from pellucid.data.records import PackedRecords, Pairs, PreferenceBatch, Prompts, RolloutBatch, Rollouts, open_records
from pellucid.errors import CheckpointError, DataError
from pellucid.model import Transformer
from pellucid.train.losses import cross_entropy_sum


def seen(batch: Batch) -> dict[int, tuple[list[int], list[int], list[bool], list[int]]]:
    """Of each record in a batch its ids, targets, mask and positions, whichever rows it stands in."""
    out = {}
    for number in batch.document_ids.unique().tolist():
        if number >= 0:
            at = batch.document_ids == number
            values = (batch.tokens, batch.targets, batch.loss_mask, batch.positions)
            out[number] = tuple(value[at].tolist() for value in values)
    return out  # type: ignore[return-value]


def wanted(ids: Any, learnt: Any) -> tuple[list[int], list[int], list[bool], list[int]]:
    return ids[:-1].tolist(), ids[1:].tolist(), learnt[1:].tolist(), list(range(len(ids) - 1))


# -- conversations ------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(0, 5), st.integers(13, 50))
@settings(max_examples=40, deadline=None)
def test_each_record_stands_whole_in_one_row_in_every_epoch(num: int, seed: int, context: int) -> None:
    samples = conversations(num, seed=seed, context=context)
    records = samples.split.records  # type: ignore[attr-defined]
    for key in (None, 1, 2**40):
        epoch = samples if key is None else samples.for_epoch(key)
        assert len(epoch) == len(samples)
        found: dict[int, Any] = {}
        for batch in epoch.batches(3):
            assert batch.tokens.shape == (3, context)
            for number, values in seen(batch).items():
                assert number not in found, "a record came twice"
                found[number] = values
                assert int((batch.document_ids == number).any(1).sum()) == 1, "a record stands in one row"
        assert found == {i: wanted(r.parts[0].ids, r.parts[0].learnt) for i, r in enumerate(records)}


def test_padding_has_no_document_and_no_label_and_sample_ids_are_rows() -> None:
    samples = conversations(5, context=40)
    batch = samples.batch([0, 1][: len(samples)], 4)
    free = batch.document_ids < 0
    assert free.any() and not batch.loss_mask[free].any()
    assert batch.sample_ids.tolist() == [*range(len(samples)), *[-1] * (4 - len(samples))]
    assert batch.packed


def test_epochs_pack_other_records_together_in_the_same_number_of_rows() -> None:
    samples = conversations(200, context=40)

    def together(epoch: PackedRecords) -> set[frozenset[int]]:
        return {frozenset(seen(batch)) for batch in epoch.batches(1)}

    one, again, other = (together(samples.for_epoch(key)) for key in (7, 7, 8))
    assert one == again
    assert len(one & other) < len(one) / 2


def test_what_a_neighbour_says_changes_no_loss_not_even_in_the_last_bit() -> None:
    model = Transformer(
        ModelConfig(**(TINY | {"max_position_embeddings": 40})), generator=torch.Generator().manual_seed(0)
    )
    samples = conversations(6, context=40)
    batch = samples.batch([0])
    numbers = sorted(seen(batch))
    assert len(numbers) > 1
    changed = numbers[0]
    other = batch.tokens.clone()
    other[batch.document_ids == changed] = (other[batch.document_ids == changed] + 7) % 61

    def loss(tokens: torch.Tensor, number: int) -> float:
        with torch.no_grad():
            logits = model(tokens, batch.positions, model.make_attend(batch.document_ids)).logits
        return float(cross_entropy_sum(logits, batch.targets, batch.loss_mask & (batch.document_ids == number)))

    assert loss(batch.tokens, changed) != loss(other, changed)
    for number in numbers[1:]:
        assert loss(batch.tokens, number) == loss(other, number)


# -- the loader ---------------------------------------------------------------------------------------------


def ids_of(step: list[Any]) -> list[int]:
    return [i for batch in step for i in batch.sample_ids.tolist() if i >= 0]


@pytest.mark.parametrize("make", [lambda: conversations(60, context=30), lambda: pairs(37), lambda: prompts(41)])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_share_each_step_and_an_epoch_visits_everything_once(make: Any, world_size: int) -> None:
    samples = make()
    one = Loader(samples, global_batch=8, micro_batch=2, seed=3)
    ranks = [
        Loader(samples, global_batch=8, micro_batch=2, seed=3, rank=r, world_size=world_size) for r in range(world_size)
    ]
    for _ in range(2):
        visited = []
        for _ in range(one.steps_per_epoch):
            alone = ids_of(one.next_window())
            shares = [loader.next_window() for loader in ranks]
            assert len({len(share) for share in shares}) == 1
            assert [i for share in shares for i in ids_of(share)] == alone
            visited += alone
        kept = samples._kept.tolist() if not isinstance(samples, PackedRecords) else range(len(samples))
        assert sorted(visited) == sorted(kept)


def test_each_epoch_of_a_run_packs_other_records_together() -> None:
    loader = Loader(conversations(80, context=30), global_batch=4, micro_batch=1, seed=1)
    epochs = [
        {frozenset(seen(batch)) for _ in range(loader.steps_per_epoch) for batch in loader.next_window()}
        for _ in range(2)
    ]
    assert len(epochs[0] & epochs[1]) < len(epochs[0]) / 2


def test_a_stopped_run_goes_on_with_the_same_rows_holding_the_same_records() -> None:
    unbroken = Loader(conversations(60, context=30), global_batch=4, micro_batch=2, seed=1)
    for _ in range(unbroken.steps_per_epoch + 2):
        unbroken.next_window()
    resumed = Loader(conversations(60, context=30), global_batch=4, micro_batch=4, seed=1)
    resumed.load_state_dict(unbroken.state_dict())
    for _ in range(unbroken.steps_per_epoch):
        one, two = unbroken.next_window(), resumed.next_window()
        assert ids_of(one) == ids_of(two)
        merged: dict[int, Any] = {}
        for batch in one:
            merged |= seen(batch)
        assert merged == seen(two[0])
    with pytest.raises(CheckpointError, match="resume with the data"):
        Loader(conversations(90, context=30), global_batch=4, micro_batch=2, seed=1).load_state_dict(
            unbroken.state_dict()
        )


# -- pairs --------------------------------------------------------------------------------------------------


def test_a_pair_is_two_rows_that_begin_with_the_same_prompt() -> None:
    samples = pairs(9)
    batch = samples.batch([4, 0, 7], 4)
    assert isinstance(batch, PreferenceBatch)
    assert batch.pair_ids.tolist() == [4, 0, 7, -1]
    assert batch.tokens.shape == (8, 16) and not batch.packed
    for place, number in enumerate([4, 0, 7]):
        prompt, *answers = samples.split.record(number).parts
        for row, answer in zip((place, 4 + place), answers, strict=True):
            ids = np.concatenate([prompt.ids, answer.ids])
            learnt = np.concatenate([prompt.learnt, answer.learnt])
            at = batch.document_ids[row] == number
            found = [
                value[row][at].tolist() for value in (batch.tokens, batch.targets, batch.loss_mask, batch.positions)
            ]
            assert tuple(found) == wanted(ids, learnt)
            assert int(batch.loss_mask[row].sum()) == len(answer.ids)
    assert not batch.loss_mask[[3, 7]].any() and (batch.document_ids[[3, 7]] == -1).all()


def test_rows_of_pairs_are_as_long_as_the_longest_needs_and_no_longer_than_the_context() -> None:
    records = [Record((part(range(n), False), part([1, 2], True), part([3], True))) for n in (5, 20, 40)]
    samples = Pairs(MemoryRecords(records), 41, "right")  # type: ignore[arg-type]
    assert [samples.batch([i]).tokens.shape[1] for i in range(3)] == [16, 32, 41]


# -- too long -----------------------------------------------------------------------------------------------


def conversation(prompt: int, answer: int) -> Record:
    return Record((part(range(prompt + answer), [False] * prompt + [True] * answer),))


def test_a_record_that_just_fits_is_not_cut_and_one_more_token_is() -> None:
    samples = PackedRecords(MemoryRecords([conversation(3, 6)]), 8, "refuse")  # type: ignore[arg-type]
    assert seen(samples.batch([0]))[0][1] == list(range(1, 9))
    with pytest.raises(DataError, match=r"record 0 of split 'train' has 9 tokens and 8 have room; raise data.context"):
        PackedRecords(MemoryRecords([conversation(3, 6)]), 7, "refuse")  # type: ignore[arg-type]


def test_the_side_that_is_cut_is_the_one_asked_for_and_a_cut_answer_stays_learnt() -> None:
    records = [conversation(6, 6), conversation(2, 2), conversation(11, 3)]
    right = PackedRecords(MemoryRecords(records), 8, "right")  # type: ignore[arg-type]
    found = {number: values for batch in right.batches(1) for number, values in seen(batch).items()}
    assert found[0][1] == list(range(1, 9)) and found[0][2] == [False] * 5 + [True] * 3
    assert set(found) == {0, 1}, "of record 2 the whole answer is behind the cut"
    assert right.notes[:2] == [
        "train: 1 of 3 records are longer than 9 tokens and cut on the right",
        "train: 1 of 3 records are left out: cut on the right to 9 tokens they teach nothing",
    ]
    left = PackedRecords(MemoryRecords(records), 8, "left")  # type: ignore[arg-type]
    found = {number: values for batch in left.batches(1) for number, values in seen(batch).items()}
    assert set(found) == {0, 1, 2}
    assert found[2][1] == list(range(6, 14)) and found[2][2] == [False] * 5 + [True] * 3
    assert found[2][3] == list(range(8)), "positions begin at 0"
    assert left.notes[0] == "train: 2 of 3 records are longer than 9 tokens and cut on the left"


def test_a_prompt_longer_than_the_window_leaves_nothing_to_learn() -> None:
    with pytest.raises(DataError, match=r"no record of split 'train' can be used; .*left out.*raise data.context"):
        PackedRecords(MemoryRecords([conversation(20, 3)]), 8, "right")  # type: ignore[arg-type]


def pair(prompt: int, chosen: list[int], rejected: list[int]) -> Record:
    return Record((part(range(100, 100 + prompt), False), part(chosen, True), part(rejected, True)))


def test_both_answers_of_a_pair_see_the_same_prompt_however_it_is_cut() -> None:
    records = [pair(10, [1, 2, 3], [4]), pair(2, [1, 2], [3]), pair(3, [1] * 9 + [2], [1] * 9 + [3])]
    left = Pairs(MemoryRecords(records), 8, "left")  # type: ignore[arg-type]
    assert left._kept.tolist() == [0, 1], "an answer is never cut on the left"
    batch = left.batch([0])
    assert batch.tokens[0, :6].tolist() == batch.tokens[1, :6].tolist() == list(range(104, 110))
    assert [batch.targets[row][batch.loss_mask[row]].tolist() for row in (0, 1)] == [[1, 2, 3], [4]]
    right = Pairs(MemoryRecords([*records, pair(5, [1, 2, 3, 4, 5, 6], [7])]), 8, "right")  # type: ignore[arg-type]
    assert right._kept.tolist() == [1, 3], "of 0 no answer is left, of 2 only what both say alike"
    assert right.batch([1]).targets[0][right.batch([1]).loss_mask[0]].tolist() == [1, 2, 3, 4]
    with pytest.raises(DataError, match=r"record 0 .* has 13 tokens and 9 have room"):
        Pairs(MemoryRecords(records), 8, "refuse")  # type: ignore[arg-type]


def test_an_answer_that_fills_the_window_or_keeps_nothing_to_learn_is_left_out() -> None:
    filling = pair(4, list(range(9)), [1])
    half = Record((part(range(4), False), part(range(8), True), part(range(9), [False] * 6 + [True] * 3)))
    fine = pair(1, [1], [2])
    for truncate in ("left", "right"):
        samples = Pairs(MemoryRecords([filling, half, fine]), 8, truncate)  # type: ignore[arg-type]
        assert samples._kept.tolist() == {"left": [2], "right": [0, 2]}[truncate]


# -- prompts and rollouts -----------------------------------------------------------------------------------


def prompts(num: int, *, truncate: Any = "right", answer_tokens: int = 4) -> Prompts:
    records = [Record((part(range(1 + i % 9), False),), {"answer": str(i)}) for i in range(num)]
    return Prompts(MemoryRecords(records), 10, truncate, answer_tokens)  # type: ignore[arg-type]


def test_prompts_come_with_their_records_and_are_their_groups() -> None:
    batch = prompts(5).batch([3, 1], 3)
    assert batch.prompts == [[0, 1, 2, 3], [0, 1], []]
    assert batch.records == [{"answer": "3"}, {"answer": "1"}, {}]
    assert batch.group_ids.tolist() == batch.sample_ids.tolist() == [3, 1, -1]


def test_a_prompt_leaves_room_for_its_answer_and_is_never_cut_at_its_end() -> None:
    right = prompts(9)
    assert len(right) == 6 and right.notes == [
        "train: 3 of 9 records are left out: cut on the right to 6 tokens they teach nothing"
    ]
    left = prompts(9, truncate="left")
    assert len(left) == 9
    assert left.batch([8]).prompts == [[3, 4, 5, 6, 7, 8]]
    with pytest.raises(DataError, match=r"record 6 .* has 7 tokens and 6 have room"):
        prompts(9, truncate="refuse")


def group(prompt: list[int], answers: list[list[int]], rewards: list[float], **extra: Any) -> Record:
    return Record((part(prompt, False), *(part(answer, True) for answer in answers)), {"rewards": rewards, **extra})


def test_stored_groups_come_whole_with_their_rewards_and_log_probabilities() -> None:
    records = [
        group([9], [[1, 2]], [3.0], old_logprobs=[[-1.0, -2.0]]),
        group([7, 8], [[1], [2, 3, 4]], [0.5, -0.5], old_logprobs=[[-0.25], [-1.0, -2.0, -3.0]]),
    ]
    batch = Rollouts(MemoryRecords(records), 16, "right").batch([1, 0], 3)  # type: ignore[arg-type]
    assert isinstance(batch, RolloutBatch)
    assert batch.group_ids.tolist() == [1, 1, 0, -1] and batch.rewards.tolist() == [0.5, -0.5, 3.0, 0.0]
    assert batch.tokens.shape == (4, 16) and batch.rewards.dtype == torch.float64
    learnt = [batch.targets[row][batch.response_mask[row]].tolist() for row in range(4)]
    assert learnt == [[1], [2, 3, 4], [1, 2], []]
    assert batch.old_logprobs is not None
    kept = [batch.old_logprobs[row][batch.response_mask[row]].tolist() for row in range(4)]
    assert kept == [[-0.25], [-1.0, -2.0, -3.0], [-1.0, -2.0], []]
    assert float(batch.old_logprobs.sum()) == -9.25


def test_what_an_answer_masks_inside_is_not_learnt_and_no_log_probabilities_are_none() -> None:
    record = Record((part([5], False), part([1, 2, 3], [True, False, True])), {"rewards": [1.0]})
    batch = Rollouts(MemoryRecords([record]), 16, "right").batch([0])  # type: ignore[arg-type]
    assert batch.targets[0][batch.response_mask[0]].tolist() == [1, 3]
    assert batch.old_logprobs is None and batch.to(torch.device("cpu")).old_logprobs is None


# -- from a folder ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "rollouts", "record", "wanted"),
    [
        ("sft", False, conversation(3, 3), PackedRecords),
        ("dpo", False, pair(2, [1], [2]), Pairs),
        ("grpo", False, Record((part([1, 2], False),), {"answer": "x"}), Prompts),
        ("grpo", True, group([1], [[2], [3]], [0.0, 1.0]), Rollouts),
    ],
)
def test_the_kind_of_the_data_decides(tmp_path: Path, kind: str, rollouts: bool, record: Record, wanted: type) -> None:
    writer = RecordWriter(tmp_path, "train", "uint16", 100, tables=kind == "grpo")
    for _ in range(3):
        writer.add(record)
    write_index(
        tmp_path, dtype="uint16", vocab_size=300, tokenizer_sha256="", splits={"train": writer.finish()}, sources=[],
        kind=kind, rollouts=rollouts,
    )  # fmt: skip
    samples = open_records(RecordData.open(tmp_path), "train", context=16)
    assert type(samples) is wanted and samples.split.num_documents == 3
    batches = list(samples.batches(2))
    assert sum(len(set(ids_of([batch]))) for batch in batches) == len(samples)
