"""Products of packed weights against torch's of what they stand for, in each way that the kernels can be compiled."""

import ctypes
import shutil

import pytest
import torch
import torch.nn.functional as F
from kernel_variants import VARIANTS, compiled, using

from pellucid import kernels
from pellucid.kernels.build import check
from pellucid.kernels.linear import GROUP, disagreement, plain_struct
from pellucid.model.quantize import to_int4, to_int8

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
SHAPES = [(64, 96), (33, 47), (1, 1), (16, 33), (130, 576)]


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request, tmp_path_factory):
    """Which library everything calls; gives whether layers of 4 and 16 bits round their inputs."""
    library = compiled(request.param, tmp_path_factory.mktemp("kernels"))
    with using(library):
        yield bool(library.pellucid_pairs())


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def packed(bits, outputs, inputs):
    weight = drawn(outputs, inputs)
    return kernels.pack8(*to_int8(weight)) if bits == 8 else kernels.pack4(*to_int4(weight), inputs)


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_packing_loses_nothing(outputs, inputs):
    weight = drawn(outputs, inputs)
    levels, scale_zero = to_int4(weight)
    scale, zero = scale_zero.float().repeat_interleave(GROUP, 0).permute(2, 1, 0)
    assert torch.equal(kernels.unpacked(packed(4, outputs, inputs)), ((levels - 8) * scale + zero)[:, :inputs])
    levels, scale = to_int8(weight)
    assert torch.equal(kernels.unpacked(packed(8, outputs, inputs)), levels.float() * scale.float()[:, None])


@pytest.mark.parametrize("rows", [1, 2, 5, 27])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_a_product_is_that_of_the_unpacked_weights(variant, bits, outputs, inputs, rows):
    weights, x = packed(bits, outputs, inputs), drawn(rows, inputs, seed=1)
    taken = x.bfloat16() if bits == 4 and variant else x
    unpacked = kernels.unpacked(weights).double()
    exact, room = F.linear(taken.double(), unpacked), F.linear(taken.double().abs(), unpacked.abs())
    out = weights.multiply(x)
    assert out.dtype == torch.float32 and out.shape == exact.shape
    # a zero is up to 8 scales away from its level, so that the two parts of a weight may cancel
    assert ((out - exact).abs() <= 2e-6 * (room + 1)).all()
    assert not torch.equal(out, weights.multiply(x + 0.1))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_has_the_same_bits_in_any_company_and_on_any_number_of_threads(variant, bits):
    weights, x = packed(bits, 130, 576), drawn(41, 576, seed=1)
    whole = weights.multiply(x)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 24, 25):
        assert torch.equal(torch.cat([weights.multiply(part) for part in x.split(rows)]), whole), rows
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(weights.multiply(x), whole)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("inputs", [32, 576, 800, 1568])
def test_a_row_of_bfloat16_weights_has_the_same_bits_in_any_number_of_rows(variant, inputs):
    """However its inputs are cut, and few, some and many rows."""
    weight, x = drawn(37, inputs).bfloat16(), drawn(101, inputs, seed=1).bfloat16()
    whole = torch.ops.pellucid.bfloat16_linear(x, weight, None)
    torch.testing.assert_close(whole.float(), x.float() @ weight.float().T, rtol=2**-7, atol=1e-4 * inputs)
    for rows in (1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 47, 48, 49, 97):
        parts = [torch.ops.pellucid.bfloat16_linear(part, weight, None) for part in x.split(rows)]
        assert torch.equal(torch.cat(parts), whole), rows


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_of_nan_stays_alone(variant, bits):
    weights, x = packed(bits, 33, 47), drawn(9, 47, seed=1)
    clean = weights.multiply(x)
    x[4, 7] = torch.nan
    out = weights.multiply(x)
    assert out[4].isnan().all()
    assert torch.equal(out[torch.arange(9) != 4], clean[torch.arange(9) != 4])


def test_every_kind_agrees_with_torch_where_a_library_is_loaded(variant):
    library = kernels.linear.library()
    assert disagreement(library) is None

    class Wrong:
        pellucid_pairs = library.pellucid_pairs

        def pellucid_linear(self, layer, rows, count, out, threads):
            status = library.pellucid_linear(layer, rows, count, out, threads)
            ctypes.memset(out + 4 * 50, 0, 4)
            return status

    assert disagreement(Wrong()) == "products of weights of 4 bits are not torch's"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_torchs_default_type_is_of_no_account(dtype):
    weights, x = packed(4, 33, 47), drawn(3, 47, seed=1)
    expected = weights.multiply(x)
    torch.set_default_dtype(dtype)
    try:
        assert torch.equal(weights.multiply(x), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_no_memory_is_an_error_and_not_the_end():
    layer = packed(4, 33, 47).struct()
    with pytest.raises(MemoryError, match="fewer tokens a step"):
        check(kernels.linear.library().pellucid_linear(ctypes.addressof(layer), None, 2**58, None, 1))


def test_the_operator_is_what_torch_expects_of_one():
    weights, x = packed(4, 33, 47), drawn(3, 47)
    checked = torch.library.opcheck(
        torch.ops.pellucid.packed_linear,
        (x, weights.packed, weights.scales, 33),
        test_utils=("test_schema", "test_faketensor"),
    )
    assert set(checked.values()) == {"SUCCESS"}


@pytest.mark.parametrize("bits", [4, 8])
def test_no_rows(bits):
    assert packed(bits, 33, 47).multiply(torch.empty(0, 47)).shape == (0, 33)


@pytest.mark.parametrize(("rows", "inputs"), [(1, 160), (3, 160), (7, 160), (20, 160), (53, 1600)])  # many, and wide
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_of_plain_weights(variant, dtype, rows, inputs):
    weight, bias, x = drawn(37, inputs).to(dtype), drawn(48, seed=2), drawn(rows, inputs, seed=1)
    taken = x.bfloat16() if dtype == torch.bfloat16 and variant else x
    exact = F.linear(taken.double(), weight.double(), bias[:37].double())

    def product(part):
        part, out, layer = part.clone(), torch.empty(len(part), 48), plain_struct(weight, bias)
        kernels.linear.library().pellucid_linear(ctypes.addressof(layer), part.data_ptr(), len(part), out.data_ptr(), 2)
        return out[:, :37]

    out = product(x)
    assert ((out - exact).abs() <= 1e-6 * F.linear(taken.double().abs(), weight.double().abs()) + 1e-5).all()
    for together in (1, 2, 12, 13):
        assert torch.equal(torch.cat([product(part) for part in x.split(together)]), out), together


@pytest.mark.parametrize(("outputs", "inputs", "rows"), [(37, 160, 3), (64, 96, 1), (16, 32, 20), (37, 64, 0)])
def test_bfloat16_in_and_out_is_rounded_once_as_torch_rounds(variant, outputs, inputs, rows):
    weight, bias, x = (
        drawn(outputs, inputs).bfloat16(),
        drawn(outputs, seed=2).bfloat16(),
        drawn(rows, inputs, seed=1).bfloat16(),
    )
    wide, made, layer = x.float(), torch.empty(rows, -(-outputs // 16) * 16), plain_struct(weight)
    kernels.linear.library().pellucid_linear(ctypes.addressof(layer), wide.data_ptr(), rows, made.data_ptr(), 2)
    expected = made[:, :outputs]
    assert torch.equal(torch.ops.pellucid.bfloat16_linear(x, weight, None), expected.bfloat16())
    assert torch.equal(torch.ops.pellucid.bfloat16_linear(x, weight, bias), (expected + bias.float()).bfloat16())
    for odd in (torch.inf, -torch.inf, torch.nan):
        spoiled = x.clone()
        spoiled[:1] = odd
        out = torch.ops.pellucid.bfloat16_linear(spoiled, weight, bias)
        assert not out[:1].isfinite().any() and out[1:].isfinite().all()
