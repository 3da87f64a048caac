"""Layouts hold every parameter once, close where they should, and share the work out evenly."""

from fractions import Fraction
from itertools import chain, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pellucid.parallel.bucket import Bucket, Reducer
from pellucid.parallel.comm import Pending
from pellucid.parallel.layout import (
    ALIGNMENT,
    MIB,
    ParameterInfo,
    assign_whole,
    chunks,
    group_by_size,
    parameter_infos,
    replicated_layout,
    sharded_layout,
    sharded_layouts,
)

KB = 1024


def info(name, *shape, **kwargs):
    return ParameterInfo(name, shape, **kwargs)


def layers(num, numel=256, **kwargs):
    """Parameters of 1 kB each, in a model's order."""
    return [info(f"p{i}", numel, **kwargs) for i in range(num)]


def names(groups):
    return [[one.name for one in group] for group in groups]


# -- where a bucket closes ----------------------------------------------------------------------------------


def test_buckets_hold_parameters_from_the_last_to_the_first_and_close_with_the_tensor_that_reaches_the_cap():
    assert names(group_by_size(layers(7), 3 * KB)) == [["p6", "p5", "p4"], ["p3", "p2", "p1"], ["p0"]]
    assert names(group_by_size(layers(7), 3 * KB - 1)) == names(group_by_size(layers(7), 3 * KB))
    assert names(group_by_size(layers(7), 3 * KB + 1)) == [["p6", "p5", "p4", "p3"], ["p2", "p1", "p0"]]
    assert names(group_by_size([info("a", 256), info("large", 99, 256), info("b", 256)], 2 * KB)) == [
        ["b", "large"],
        ["a"],
    ]


def test_the_first_bucket_closes_at_a_mebibyte_so_that_communication_starts_early():
    quarter = MIB // 4 // 4  # elements of a quarter of a MiB
    sizes = [len(group) for group in group_by_size(layers(40, quarter), 5 * MIB)]
    assert sizes == [4, 20, 16]
    assert [len(group) for group in group_by_size(layers(9, quarter), MIB // 2)] == [2, 2, 2, 2, 1]  # the cap is lower


def test_types_devices_and_ways_of_sharding_do_not_mix():
    mixed = [
        info("a", 256),
        info("b", 256, dtype=torch.bfloat16),
        info("c", 256, device="cuda:0"),
        info("d", 256, elementwise=False),
        info("e", 256),
    ]
    assert names(group_by_size(mixed, 8 * KB)) == [["e", "a"], ["d"], ["c"], ["b"]]
    assert names(group_by_size(mixed[:2] + mixed[4:], 8 * KB, dtype=torch.float32)) == [["e", "b", "a"]]


def test_a_bucket_of_a_reduction_in_another_type_closes_by_what_it_sends():
    half = layers(8, 256, dtype=torch.bfloat16)
    assert [len(group) for group in group_by_size(half, 2 * KB)] == [4, 4]
    assert [len(group) for group in group_by_size(half, 2 * KB, dtype=torch.float32)] == [2, 2, 2, 2]


# -- layouts ------------------------------------------------------------------------------------------------


def test_a_replicated_bucket_has_no_gaps():
    layout = replicated_layout(3, [info("a", 5, 3), info("scalar"), info("none", 0, 4), info("b", 2)], torch.float32)
    assert [(s.info.name, s.offset, s.stop) for s in layout.slots] == [
        ("a", 0, 15), ("scalar", 15, 16), ("none", 16, 16), ("b", 16, 18),
    ]  # fmt: skip
    assert (layout.index, layout.numel, layout.num_bytes, layout.padding_bytes) == (3, 18, 72, 0)


def test_a_sharded_bucket_is_cut_at_multiples_of_64_elements():
    layout = sharded_layout(0, [info("a", 70), info("b", 300), info("c", 1)], 3)
    assert [(s.info.name, s.offset) for s in layout.slots] == [("a", 0), ("b", 128), ("c", 448)]
    assert layout.numel == 3 * 192 and layout.padding_bytes == 4 * (3 * 192 - 371)


def test_whole_tensors_lie_within_one_part():
    layout = sharded_layout(
        0, [info(n, size, elementwise=False) for n, size in zip("abc", (100, 30, 40), strict=True)], 2
    )
    assert layout.numel == 2 * 128
    assert {s.info.name: s.offset for s in layout.slots} == {"a": 0, "b": 128, "c": 158}


SHAPES = st.lists(st.lists(st.integers(0, 40), max_size=2).map(tuple), min_size=1, max_size=25)
KINDS = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])


def parts(layout, num):
    """Elements of each part that belong to a parameter, with the gap up to the next multiple of 64."""
    size = layout.numel // num
    used = [0] * num
    for slot in layout.slots:
        stop = -(-slot.stop // ALIGNMENT) * ALIGNMENT if slot.info.elementwise else slot.stop
        for r in range(num):
            used[r] += max(0, min(stop, (r + 1) * size) - max(slot.offset, r * size))
    return used


def check_holds_once(layout, group):
    assert sorted(layout.names) == sorted(one.name for one in group) and layout.dtype == group[0].dtype
    slots = sorted((s for s in layout.slots if s.info.numel), key=lambda s: s.offset)
    assert all(a.stop <= b.offset for a, b in pairwise(slots))
    assert all(s.stop <= layout.numel for s in slots)
    assert layout.padding_bytes >= 0


def check_shards(layout, num):
    part = layout.numel // num
    assert layout.numel == part * num and part % ALIGNMENT == 0
    elementwise = layout.slots[0].info.elementwise
    used, largest = parts(layout, num), max(slot.info.numel for slot in layout.slots)
    assert max(used) - Fraction(sum(used), num) <= (ALIGNMENT if elementwise else largest)
    for slot in layout.slots:
        if elementwise:
            assert slot.offset % ALIGNMENT == 0
        elif slot.info.numel:
            assert slot.offset // part == (slot.stop - 1) // part, "cut in two"


def excess(layouts, num):
    """Of whole tensors, over all buckets: bytes that the most loaded owner has above the mean, and of the largest tensor."""
    whole = [layout for layout in layouts if not layout.slots[0].info.elementwise]
    sizes = [[numel * layout.dtype.itemsize for numel in parts(layout, num)] for layout in whole]
    loads = [sum(of_rank) for of_rank in zip(*sizes, strict=True)] or [0]
    largest = max((slot.info.num_bytes for layout in whole for slot in layout.slots), default=0)
    return max(loads) - Fraction(sum(loads), num), largest


@settings(max_examples=150)
@given(SHAPES, st.data(), st.integers(1, 9), st.integers(1, 20_000))
def test_every_layout_holds_every_parameter_once_and_shares_it_out_evenly(shapes, data, num, cap):
    infos = [
        info(f"p{i}", *shape, dtype=data.draw(KINDS), elementwise=data.draw(st.booleans()))
        for i, shape in enumerate(shapes)
    ]
    groups = group_by_size(infos, cap, num_shards=num)
    assert sorted(chain(*names(groups))) == sorted(one.name for one in infos)
    layouts = sharded_layouts(infos, cap, num)
    for i, (group, sharded) in enumerate(zip(groups, layouts, strict=True)):
        assert len({(one.dtype, one.elementwise) for one in group}) == 1
        if group[0].elementwise:
            assert sum(one.num_bytes for one in group[:-1]) < cap  # it was open before the last one came
        check_holds_once(replicated_layout(i, group), group)
        check_holds_once(sharded, group)
        check_shards(sharded, num)
    above, largest = excess(layouts, num)
    assert above <= largest


@pytest.mark.parametrize("num", [2, 3, 4, 8])
def test_large_tensors_that_stay_whole_wait_for_others_to_fill_every_part(num):
    """Each fills a bucket by itself, and would move W times its bytes, to the same owner again and again."""
    shapes = [(64, 64), (16, 64), (16, 64), (64, 64), (256, 64), (256, 64), (64, 256)]
    infos = [info(f"{layer}.{i}", *s, elementwise=False) for layer in range(16) for i, s in enumerate(shapes)]
    layouts = sharded_layouts(infos, 10 * KB, num)
    assert len(layouts) >= 4 and sum(one.numel for one in layouts) < 1.13 * sum(one.numel for one in infos)
    assert excess(layouts, num)[0] < 64 * 256 * 4
    assert [len(group) for group in group_by_size(infos, 10 * KB)] != [len(layout.slots) for layout in layouts]


@given(st.lists(st.integers(0, 10_000), max_size=40), st.integers(1, 12), st.data())
def test_whole_tensors_are_shared_out_within_the_largest_of_the_mean(sizes, num, data):
    load = data.draw(st.none() | st.lists(st.integers(0, 3), min_size=num, max_size=num))
    owners = assign_whole(sizes, num, None if load is None else list(load))
    assert sorted(chain(*owners)) == list(range(len(sizes)))
    assert all(mine == sorted(mine) for mine in owners)
    loads = [sum(sizes[i] for i in mine) + (load[r] if load else 0) for r, mine in enumerate(owners)]
    assert max(loads) - Fraction(sum(loads), num) <= max([*sizes, *(load or [0])], default=0)


def test_the_largest_are_shared_out_first():
    assert assign_whole([1, 1, 2], 2) == [[2], [0, 1]]
    assert assign_whole([5, 6, 7, 8], 2) == [[0, 3], [1, 2]]


def test_loads_count_on_over_several_assignments():
    load = [0, 0, 0]
    owners = [assign_whole([7], 3, load) for _ in range(4)]
    assert owners == [[[0], [], []], [[], [0], []], [[], [], [0]], [[0], [], []]] and load == [14, 7, 7]


@pytest.mark.parametrize("num", [2, 3, 8])
def test_one_dominant_embedding_is_cut_where_it_may_be_and_otherwise_leaves_the_rest_to_others(num):
    rest = [info(f"w{i}", 64, 64) for i in range(12)]
    cut = sharded_layout(0, [info("embedding", 5000, 64), *rest], num)
    assert max(parts(cut, num)) - min(parts(cut, num)) <= num * ALIGNMENT
    whole = [info(one.name, *one.shape, elementwise=False) for one in (info("embedding", 5000, 64), *rest)]
    used = sorted(parts(sharded_layout(0, whole, num), num))
    assert used[-1] == 5000 * 64 and sum(used[:-1]) == 12 * 64 * 64
    assert used[-2] - used[0] <= 64 * 64


def test_layouts_are_the_same_wherever_they_are_computed():
    infos = [info(f"p{i}", 7 * i % 50, 11) for i in range(20)]
    assert sharded_layouts(infos, 8 * KB, 4) == sharded_layouts(list(infos), 8 * KB, 4)


def test_chunks_keep_types_apart_and_close_before_the_limit():
    tensors = [
        torch.empty(4 * MIB),
        torch.empty(2, dtype=torch.int64),
        torch.empty(2 * MIB),
        torch.empty(0),
        torch.empty(1 * MIB),
    ]
    assert list(chunks(tensors)) == [[0, 2], [4], [1]]  # 24 MiB, and 4 more would be 28
    assert list(chunks([torch.empty(9 * MIB)])) == [[0]]


# -- what a layout is told of a model -----------------------------------------------------------------------


def test_infos_are_those_of_the_parameters_in_order_each_once_and_say_which_are_frozen():
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False))
    model[2].weight = model[0].weight
    model[1].bias.requires_grad_(False)
    infos = parameter_infos(model.to(torch.bfloat16))
    assert [(one.name, one.shape, one.num_bytes, one.unit, one.trainable) for one in infos] == [
        ("0.weight", (7, 4), 56, "", True), ("1.weight", (4, 4), 32, "1", True), ("1.bias", (4,), 8, "1", False),
    ]  # fmt: skip
    assert all(one.elementwise for one in infos)


class Rotates(torch.optim.SGD):
    """Looks at whole matrices, as far as anybody knows."""


def test_an_optimizer_that_nobody_vouches_for_keeps_its_tensors_whole():
    model = nn.Linear(4, 3)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "elementwise": True}]
    assert [one.elementwise for one in parameter_infos(model, Rotates(groups, lr=1.0))] == [False, True]
    assert [one.elementwise for one in parameter_infos(model, torch.optim.SGD(groups, lr=1.0))] == [True, True]
    groups[0]["elementwise"] = False
    assert [one.elementwise for one in parameter_infos(model, torch.optim.AdamW(groups))] == [False, True]


# -- when a bucket leaves -----------------------------------------------------------------------------------


class Launches(list):
    def __call__(self, bucket):
        self.append(bucket.layout.index)
        return Pending()


def reducer(model, cap=1):
    launched = Launches()
    groups = group_by_size(parameter_infos(model), cap)
    buckets = [Bucket(replicated_layout(i, group), dict(model.named_parameters())) for i, group in enumerate(groups)]
    return Reducer(buckets, launched), launched


def gradient_of(model, *parts):
    """A backward that reaches these parts, the last of them first."""
    total = torch.zeros(())
    for part in parts:
        total = (total + 1) * model[part].weight.sum()
    total.backward()


def test_a_bucket_waits_for_those_before_it_whatever_the_order_of_gradients():
    model = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(4))
    ready, launched = reducer(model)
    arrived = []
    for bucket in ready.buckets:
        bucket.parameters[0].register_post_accumulate_grad_hook(
            lambda p, i=bucket.layout.index: arrived.append((i, list(launched)))
        )
    ready.expect()
    gradient_of(model, 0, 2, 3, 1)  # buckets 2, 0, 1 and 3
    assert arrived == [(2, []), (0, [0]), (1, [0, 1, 2]), (3, [0, 1, 2, 3])]
    ready.wait()
    assert not ready.outstanding


def test_buckets_that_backward_did_not_fill_leave_with_zeros_at_the_end():
    model = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))
    ready, launched = reducer(model)
    for bucket in ready.buckets:
        bucket.flat.fill_(7.0)  # what a window before left there
    ready.expect()
    gradient_of(model, 0, 2)
    assert launched == [0] and ready.outstanding
    assert ready.fill_missing() == [True, False, True]
    assert launched == [0, 1, 2]
    assert ready.buckets[1].flat.tolist() == [0.0] * 4 and ready.buckets[0].flat.tolist() != [7.0] * 4


def test_gradients_of_a_window_that_is_not_over_add_up_in_the_bucket_which_stays():
    model = nn.ModuleList([nn.Linear(2, 2, bias=False)])
    ready, launched = reducer(model)
    ready.synchronizing = False
    for micro in range(2):
        ready.expect()
        gradient_of(model, 0)
        assert model[0].weight.grad.tolist() == [[1.0 + micro] * 2] * 2
        assert launched == [] and not ready.outstanding
    assert model[0].weight.grad.data_ptr() == ready.buckets[0].flat.data_ptr()
    ready.synchronizing = True
    ready.expect()
    gradient_of(model, 0)
    assert launched == [0] and ready.buckets[0].flat.tolist() == [3.0] * 4
