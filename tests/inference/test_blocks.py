"""`BlockPool`: nothing is lost, nothing is given twice, prefixes are found by their tokens and evicted from the leaves."""

import random

import pytest

from pellucid.inference.blocks import BlockPool


def filled(pool, tokens, salt=""):
    """A sequence that has computed ``tokens``: its blocks, known to the pool."""
    blocks = pool.match(tokens, salt)
    new = pool.allocate(-(-len(tokens) // pool.block_size) - len(blocks))
    assert new is not None
    blocks += new
    pool.insert(tokens, blocks, salt)
    return blocks


def test_a_pool_hands_out_each_block_once_and_not_more_than_there_are():
    pool = BlockPool(5, 4)
    first, second = pool.allocate(3), pool.allocate(2)
    assert sorted(first + second) == [1, 2, 3, 4, 5]  # 0 is where padding writes
    assert pool.allocate(1) is None and pool.allocate(0) == []
    pool.release(first)
    assert pool.num_free == 3 and sorted(pool.allocate(3)) == sorted(first)


def test_full_blocks_of_a_common_prefix_are_found_and_partial_ones_are_not():
    pool = BlockPool(10, 4)
    blocks = filled(pool, range(10))
    pool.release(blocks)
    assert pool.num_cached == 2 and pool.num_free == 8
    assert pool.match(list(range(10))) == blocks[:2]
    assert pool.match([0, 1, 2, 3, 4, 5, 6, 99]) == blocks[:1]
    assert pool.match([0, 1, 2]) == [] and pool.match([1, 2, 3, 4]) == []


def test_the_second_block_is_only_found_behind_its_own_first():
    pool = BlockPool(10, 2)
    pool.release(filled(pool, [1, 2, 7, 8]))
    pool.release(filled(pool, [3, 4, 9, 9]))
    assert pool.match([3, 4, 7, 8]) == pool.match([3, 4])


def test_requests_with_different_salts_share_nothing():
    pool = BlockPool(10, 2)
    pool.release(filled(pool, [1, 2, 3, 4], salt="a"))
    assert pool.match([1, 2, 3, 4], "b") == [] and len(pool.match([1, 2, 3, 4], "a")) == 2


def test_the_least_recently_used_leaf_goes_first_and_a_prefix_after_what_builds_on_it():
    pool = BlockPool(4, 1)
    pool.release(filled(pool, [1, 2]))
    pool.release(filled(pool, [1, 3]))
    pool.release(pool.match([1, 2]))  # used again: 3 is the older leaf now
    pool.allocate(2)
    assert len(pool.match([1, 2])) == 2 and len(pool.match([1, 3])) == 1
    pool.check()


def test_what_is_held_is_never_evicted():
    pool = BlockPool(3, 1)
    held = filled(pool, [1, 2])
    pool.release(filled(pool, [5]))
    assert pool.allocate(2) is None
    assert pool.allocate(1) is not None and pool.match([1, 2]) == held and pool.match([5]) == []


def test_two_that_computed_the_same_tokens_end_with_the_same_blocks():
    pool = BlockPool(10, 2)
    first, second = pool.allocate(2), pool.allocate(2)
    pool.insert([1, 2, 3, 4], first)
    pool.insert([1, 2, 3, 4], second)
    assert first == second and pool.num_held == 2 and pool.num_free == 8
    pool.release(second)
    pool.release(first)
    pool.check()
    assert pool.num_held == 0 and pool.num_cached == 2


def test_without_reuse_blocks_come_back_free():
    pool = BlockPool(10, 2, reuse=False)
    pool.release(filled(pool, [1, 2, 3, 4]))
    assert pool.num_free == 10 and pool.match([1, 2, 3, 4]) == []


def test_a_block_is_shared_by_two_holders_or_when_others_may_find_it():
    pool = BlockPool(10, 2)
    alone = pool.allocate(1)
    assert not pool.is_shared(alone[0])
    pool.hold(alone)
    assert pool.is_shared(alone[0])
    assert all(pool.is_shared(block) for block in filled(pool, [1, 2]))


def test_releasing_twice_is_an_error_of_ours_and_caught():
    pool = BlockPool(3, 2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="nobody's"):
        pool.release(blocks)


@pytest.mark.parametrize("seed", range(40))
def test_the_books_agree_after_every_operation(seed):
    rng = random.Random(seed)
    pool = BlockPool(rng.randint(3, 20), rng.randint(1, 4))
    sequences: list[tuple[list[int], list[int]]] = []
    for _ in range(200):
        operation = rng.random()
        some = sequences[rng.randrange(len(sequences))] if sequences else None
        if operation < 0.4:
            tokens = [rng.randint(0, 1) for _ in range(rng.randint(1, 14))]
            found = pool.match(tokens)
            new = pool.allocate(-(-len(tokens) // pool.block_size) - len(found))
            if new is None:
                pool.release(found)
            else:
                sequences.append((tokens, found + new))
        elif operation < 0.7 and some:
            pool.insert(*some)
        elif operation < 0.8 and some:
            pool.hold(some[1])
            sequences.append((some[0], list(some[1])))
        elif operation < 0.82:
            pool.forget()
        elif some:
            sequences.remove(some)
            pool.release(some[1])
        pool.check()
    for _, blocks in sequences:
        pool.release(blocks)
    assert pool.num_held == 0
    pool.forget()
    assert pool.num_free == pool.num_blocks


def test_prefixes_that_are_used_over_and_over_need_no_more_memory():
    pool = BlockPool(5, 1)
    pool.release(filled(pool, [1, 2, 3]))
    pool.release(filled(pool, [4]))
    for _ in range(1000):
        pool.release(pool.match([1, 2, 3]))
    assert len(pool._idle) <= 4 * 5 + 64
    pool.allocate(2)
    assert pool.match([4]) == [] and pool.match([1, 2, 3]) != []
    pool.check()


def test_each_blocks_state_is_told_in_order():
    pool = BlockPool(5, 1)
    first = filled(pool, [1, 2])
    held = pool.allocate(1)
    pool.release(first)
    states = pool.states()
    assert [states[block - 1] for block in (*first, *held)] == ["c", "c", "h"]
    assert (states.count("f"), states.count("c"), states.count("h")) == (2, 2, 1)
    assert (pool.num_free, pool.num_cached, pool.num_held) == (2, 2, 1)
