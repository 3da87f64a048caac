import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import MemorySplit, random_lengths, windows

from pellucid.data.batches import Loader, Windows, permute
from pellucid.errors import CheckpointError, ConfigError, DataError


@given(st.integers(1, 500), st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_the_order_is_a_permutation_for_every_length_and_key(length, key):
    order = permute(np.arange(length), length, key)
    assert sorted(order.tolist()) == list(range(length))


def test_two_epochs_and_two_seeds_have_different_orders_and_neighbours_are_not_kept():
    n = 1000
    orders = [permute(np.arange(n), n, key) for key in (0, 1, 1 << 32)]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert (orders[a] == orders[b]).mean() < 0.02
    assert (np.diff(orders[0]) == 1).mean() < 0.02
    assert abs(np.corrcoef(np.arange(n), orders[0])[0, 1]) < 0.1


def test_a_permutation_of_a_trillion_needs_no_memory():
    order = permute(np.array([0, 1, 10**12 - 1]), 10**12, 5)
    assert len(set(order.tolist())) == 3 and (order < 10**12).all()


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 17))
@settings(max_examples=100, deadline=None)
def test_each_target_inside_a_document_is_supervised_exactly_once(lengths, context):
    split = MemorySplit(lengths)
    if split.num_tokens < 2:
        return
    w = Windows(split, context)
    counts = np.zeros(split.num_tokens, int)
    for batch in w.batches(3):
        for row, window in enumerate(batch.sample_ids.tolist()):
            for column in torch.nonzero(batch.loss_mask[row]).flatten().tolist():
                position = window * context + column
                counts[position + 1] += 1
                assert batch.tokens[row, column] == split.tokens[position]
                assert batch.targets[row, column] == split.tokens[position + 1]
    starts = np.concatenate([[0], split.ends[:-1]])
    expected = np.ones(split.num_tokens, int)
    expected[starts] = 0  # the first token of a document is nobody's target
    assert counts.tolist() == expected.tolist()


@given(st.integers(1, 16), st.integers(1, 16))
@settings(max_examples=60, deadline=None)
def test_overlapping_windows_scored_once_give_each_target_once(context, stride):
    split = MemorySplit(random_lengths(9))
    if stride > context:
        with pytest.raises(ConfigError, match="skip"):
            Windows(split, context, stride)
        return
    w = Windows(split, context, stride, score_once=True)
    total = sum(int(batch.loss_mask.sum()) for batch in w.batches(4))
    assert total == split.num_tokens - split.num_documents


def test_positions_restart_and_document_ids_change_at_each_document():
    split = MemorySplit([3, 5, 4])
    batch = Windows(split, 8).batch([0, 1])
    assert batch.document_ids[0].tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    assert batch.positions[0].tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert batch.loss_mask[0].tolist() == [True, True, False, True, True, True, True, False]
    assert batch.document_ids[1].tolist() == [2, 2, 2, 2, -1, -1, -1, -1]
    assert batch.loss_mask[1].tolist() == [True, True, True, False, False, False, False, False]
    assert batch.packed


def test_a_batch_of_single_documents_is_not_packed():
    assert not Windows(MemorySplit([100]), 8).batch([0, 3]).packed


@given(st.integers(1, 40), st.sampled_from([(4, 1), (4, 2), (4, 4), (8, 4), (8, 2)]), st.sampled_from([1, 2, 4]))
@settings(max_examples=60, deadline=None)
def test_every_window_comes_once_an_epoch_and_ranks_share_each_step(documents, batches, world_size):
    global_batch, micro_batch = batches
    if global_batch % (micro_batch * world_size):
        return
    w = windows(documents, context=8)
    args = dict(global_batch=global_batch, micro_batch=micro_batch, seed=5)
    one = Loader(w, **args)
    ranks = [Loader(w, **args, rank=rank, world_size=world_size) for rank in range(world_size)]
    seen = []
    for _ in range(one.steps_per_epoch):
        alone = [i for b in one.next_window() for i in b.sample_ids.tolist() if i >= 0]
        shares = [loader.next_window() for loader in ranks]
        assert len({len(share) for share in shares}) == 1, "ranks must run equally many micro-batches"
        assert all(b.tokens.shape == (micro_batch, 8) for share in shares for b in share)
        together = [i for share in shares for b in share for i in b.sample_ids.tolist() if i >= 0]
        assert together == alone
        seen += alone
    assert sorted(seen) == list(range(len(w)))
    assert one.samples == len(w) and one.epoch == 0


def test_the_next_epoch_has_another_order():
    loader = Loader(windows(), global_batch=4, micro_batch=4, seed=0)
    epochs = [
        [
            i
            for _ in range(loader.steps_per_epoch)
            for b in loader.next_window()
            for i in b.sample_ids.tolist()
            if i >= 0
        ]
        for _ in range(2)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) and epochs[0] != epochs[1]


def test_a_loader_continues_at_a_saved_cursor_with_the_same_samples():
    a = Loader(windows(), global_batch=4, micro_batch=2, seed=1)
    for _ in range(a.steps_per_epoch + 3):
        a.next_window()
    b = Loader(windows(), global_batch=4, micro_batch=4, seed=1)
    b.load_state_dict(a.state_dict())
    for _ in range(5):
        ids = [[i for m in loader.next_window() for i in m.sample_ids.tolist()] for loader in (a, b)]
        assert ids[0] == ids[1]


@pytest.mark.parametrize("change", [dict(seed=2), dict(windows=windows(60))])
def test_a_cursor_of_other_data_is_refused(change):
    args = dict(windows=windows(), global_batch=4, micro_batch=2, seed=1)
    with pytest.raises(CheckpointError, match="cursor"):
        Loader(**(args | change)).load_state_dict(Loader(**args).state_dict())


def test_a_global_batch_that_ranks_cannot_share_is_refused():
    with pytest.raises(ConfigError, match="multiple"):
        Loader(windows(), global_batch=4, micro_batch=4, seed=0, world_size=2)


def test_a_split_without_a_target_is_refused():
    with pytest.raises(DataError, match="at least 2"):
        Windows(MemorySplit([1]), 8)


def test_repeated_steps_get_the_same_samples_and_resume_among_them():
    def loader(**changes):
        return Loader(windows(num_documents=9), global_batch=4, micro_batch=2, seed=5, **changes)

    plain, thrice = loader(), loader(repeats=3)
    assert thrice.steps_per_epoch == 3 * plain.steps_per_epoch
    ids = [batch.sample_ids.tolist() for _ in range(plain.steps_per_epoch + 1) for batch in plain.next_window()]
    seen = []
    for step in range(thrice.steps_per_epoch + 1):
        seen.append([batch.sample_ids.tolist() for batch in thrice.next_window()])
        assert thrice.repeat == (step + 1) % 3
    assert seen[0] == seen[1] == seen[2] != seen[3]
    assert [one for window in seen[::3] for one in window] == ids
    half, rest = loader(repeats=3), loader(repeats=3)
    for _ in range(4):
        half.next_window()
    rest.load_state_dict(half.state_dict())
    after = [[batch.sample_ids.tolist() for batch in rest.next_window()] for _ in range(3)]
    assert after == seen[4:7] and "repeat" not in plain.state_dict()
