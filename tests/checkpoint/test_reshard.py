"""What many ranks wrote is read by any number of them: the same bits as the whole tensors, and never more than was asked for."""

import json
import random
import re

import pytest
import torch
from nets import Net
from safetensors.torch import load_file, save_file
from support import load_moments, run_ranks, whole_state

from pellucid.checkpoint import files
from pellucid.checkpoint.reshard import SavedFiles, open_optimizer, part_name, write_parts
from pellucid.errors import CheckpointError
from pellucid.parallel import comm, create_executor
from pellucid.parallel.parts import Part, WholeTensors

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.float16)


def random_tensors(rng):
    tensors = {}
    for i in range(rng.randint(1, 6)):
        shape = rng.choice([(), (rng.randint(1, 200),), (rng.randint(1, 9), rng.randint(1, 33)), (0, 3)])
        values = torch.randn(shape, generator=torch.Generator().manual_seed(rng.randrange(1 << 30)))
        tensors[f"layer.{i}/x"] = (values * 100).to(rng.choice(DTYPES))
    return tensors


def cut(tensors, num_parts, rng):
    """Each tensor in as many flat slices as there are parts, some of them empty or left out."""
    parts = [[] for _ in range(num_parts)]
    for name, tensor in tensors.items():
        borders = sorted(rng.randint(0, tensor.numel()) for _ in range(num_parts - 1))
        borders = [0, *borders, tensor.numel()]
        for i in range(num_parts):
            start, stop = borders[i], borders[i + 1]
            if start < stop or (tensor.numel() == 0 and i == 0) or rng.random() < 0.3:
                parts[i].append(Part(name, tuple(tensor.shape), start, tensor.reshape(-1)[start:stop]))
        if rng.random() < 0.5:
            rng.shuffle(parts)  # no order of files is promised
    return parts


@pytest.mark.parametrize("seed", range(40))
def test_any_range_of_tensors_cut_anyhow_is_read_to_the_bit(tmp_path, seed):
    rng = random.Random(seed)
    tensors, num_parts = random_tensors(rng), rng.randint(1, 5)
    for i, parts in enumerate(cut(tensors, num_parts, rng)):
        written = write_parts(tmp_path / part_name(i, num_parts), parts, whole=False)
        assert written.sha256 == files.sha256(tmp_path / part_name(i, num_parts))
    saved = open_optimizer(tmp_path)
    assert set(saved.keys()) == set(tensors)
    for name, tensor in tensors.items():
        assert saved.shape(name) == tuple(tensor.shape) and saved.dtype(name) == tensor.dtype
        assert torch.equal(saved.read(name).view(tensor.shape), tensor)
        for _ in range(8):
            start, stop = sorted(rng.randint(0, tensor.numel()) for _ in range(2))
            got = saved.read(name, start, stop)
            assert got.dtype == tensor.dtype and torch.equal(got, tensor.reshape(-1)[start:stop])
    loaded = load_moments(tmp_path)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items()), "an independent reader agrees"


def test_a_file_is_what_safetensors_reads_and_one_of_safetensors_is_read(tmp_path):
    tensors = random_tensors(random.Random(1)) | {"odd": torch.arange(3).bfloat16(), "wide": torch.rand(2).double()}
    files.write_tensors(tmp_path / "ours", tensors)
    theirs = load_file(tmp_path / "ours")
    assert theirs.keys() == tensors.keys() and all(torch.equal(theirs[name], tensors[name]) for name in tensors)
    save_file(tensors, tmp_path / "theirs")
    saved = SavedFiles([tmp_path / "theirs"])
    assert all(torch.equal(saved.read(name).view(t.shape), t) for name, t in tensors.items())


# -- what is refused ----------------------------------------------------------------------------------------


def write_slices(folder, *slices, shape=(4, 5), dtype=torch.float32):
    """A file a slice of a tensor of 20 elements; a slice is (start, stop), or also with its own shape and dtype."""
    for i, (start, stop, *other) in enumerate(slices):
        whole, kind = other or (shape, dtype)
        part = Part("layer.weight/exp_avg", whole, start, torch.zeros(stop - start, dtype=kind))
        write_parts(folder / part_name(i, len(slices)), [part], whole=False)


@pytest.mark.parametrize(
    "slices, message",
    [
        ([(0, 10), (9, 20)], r"elements \[9, 10\) are in .*optimizer-00001-of-00002.* and in .*optimizer-00002-of-00002"),
        ([(0, 20), (3, 5)], r"elements \[3, 5\) are in .*-00001-.* and in .*-00002-"),
        ([(0, 20), (0, 20)], r"elements \[0, 20\) are in .*-00001-.* and in .*-00002-"),
        ([(0, 9), (10, 20)], r"elements \[9, 10\) are in no file"),
        ([(1, 10), (10, 20)], r"elements \[0, 1\) are in no file"),
        ([(0, 10), (10, 19)], r"elements \[19, 20\) are in no file"),
        ([(0, 10), (10, 21)], r"has 20 elements, and .*-00002-.* one after element 20"),
        ([(0, 10), (10, 20, (20,), torch.float32)], r"is torch.float32 \(4, 5\) in .* and torch.float32 \(20,\) in"),
        ([(0, 10), (10, 20, (4, 5), torch.float16)], r"is torch.float32 .* and torch.float16"),
    ],
)  # fmt: skip
def test_slices_that_do_not_cover_a_tensor_exactly_once_are_refused_by_name(tmp_path, slices, message):
    write_slices(tmp_path, *slices)
    with pytest.raises(CheckpointError, match=r"layer\.weight/exp_avg.*" + message):
        open_optimizer(tmp_path)


def test_a_number_that_two_ranks_wrote_is_refused(tmp_path):
    for rank in range(2):
        write_parts(tmp_path / part_name(rank, 2), [Part("w/step", (), 0, torch.tensor(3.0))], whole=False)
    with pytest.raises(CheckpointError, match=r"w/step: elements \[0, 1\) are in"):
        open_optimizer(tmp_path)


def test_a_missing_cut_or_foreign_file_is_named(tmp_path):
    write_slices(tmp_path, (0, 10), (10, 20))
    second = tmp_path / part_name(1, 2)
    whole = second.read_bytes()
    second.unlink()
    with pytest.raises(CheckpointError, match=r"optimizer-00002-of-00002\.safetensors is missing"):
        open_optimizer(tmp_path)
    for damaged, message in [
        (whole[:-1], "does not fit the file"),
        (whole[:20], "no safetensors file, or was cut"),
        (b"", "no safetensors file"),
        (b"x" * 100, "no safetensors file"),
        ((5).to_bytes(8, "little") + b"[1,2]" + bytes(9), "cannot be read as safetensors"),
        ((40).to_bytes(8, "little") + b'{"a":{"dtype":"F32","data_offsets":[0]}}', "cannot be read as safetensors"),
        (whole.replace(b'"F32"', b'"F99"'), "of a type that is not known here: F99"),
    ]:
        second.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=rf"{re.escape(str(second))}.*{message}"):
            open_optimizer(tmp_path)
    second.write_bytes(whole)
    saved = open_optimizer(tmp_path)
    second.write_bytes(whole[:-8])  # after its header was read
    with pytest.raises(CheckpointError, match=r"optimizer-00002-of-00002\.safetensors ends too early"):
        saved.read("layer.weight/exp_avg")


def test_only_the_bytes_asked_for_are_read(tmp_path, monkeypatch):
    parts = [Part("w/x", (100,), 0, torch.arange(50.0)), Part("v/x", (7,), 0, torch.zeros(7))]
    write_parts(tmp_path / part_name(0, 2), parts, whole=False)
    write_parts(tmp_path / part_name(1, 2), [Part("w/x", (100,), 50, torch.arange(50.0, 100.0))], whole=False)
    saved, opened = open_optimizer(tmp_path), []
    plain = open

    def counting(path, *args, **kwargs):
        opened.append(path.name)
        return plain(path, *args, **kwargs)

    monkeypatch.setattr("builtins.open", counting)
    assert torch.equal(saved.read("w/x", 60, 70), torch.arange(60.0, 70.0)) and opened == [part_name(1, 2)]
    assert torch.equal(saved.read("w/x", 45, 55), torch.arange(45.0, 55.0))
    assert opened == [part_name(1, 2), part_name(0, 2), part_name(1, 2)]


# -- from any number of ranks to any other ------------------------------------------------------------------


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)


def prepared(mode, *, steps):
    model = Net()
    executor = create_executor(mode, **({"bucket_size_mb": 0.002} if mode in ("ddp", "zero1", "zero2") else {}))
    wrapped, optimizer, *_ = executor.prepare(model, adamw(model))
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + comm.rank())
        with executor.accumulate(wrapped):
            executor.backward(wrapped(torch.randn(5, 19, generator=generator)).square().mean())
        optimizer.step()
    return executor


@pytest.fixture(scope="module", autouse=True)
def warm():
    """The first step of an optimizer is slow in a process; forked ranks inherit a warm one."""
    prepared("none", steps=1)


def save_state(executor, folder):
    """As a save does it, the optimizer's state alone."""
    folder.mkdir(exist_ok=True)
    sharded = executor.shards_state
    name = part_name(comm.rank(), comm.world_size()) if sharded else "optimizer.safetensors"
    if sharded or comm.rank() == 0:
        write_parts(folder / name, executor.optimizer_parts(), whole=not sharded)
    comm.barrier(tag="written")


MODES = ("ddp", "zero1", "zero2", "zero3")


@pytest.mark.parametrize("source", ["zero1", "zero3"])
def test_moments_saved_by_1_to_4_ranks_are_the_same_bits_in_every_mode_on_1_to_4_ranks(tmp_path, source):
    def write():
        save_state(prepared(source, steps=3), tmp_path / str(comm.world_size()))

    def read():
        size, same = comm.world_size(), []
        for saved in (1, 2, 3, 4):
            expected = load_moments(tmp_path / str(saved))
            for mode in MODES if size > 1 else ("none",):
                executor = prepared(mode, steps=0)
                executor.load_optimizer_state(open_optimizer(tmp_path / str(saved)))
                got = whole_state(executor)
                bits = all(got[key].dtype == t.dtype and torch.equal(got[key], t) for key, t in expected.items())
                same.append(bits and got.keys() == expected.keys())
        return same

    write()
    for size in (2, 3, 4):
        run_ranks(write, size)
        assert len(list((tmp_path / str(size)).iterdir())) == size
    wholes = [load_moments(tmp_path / str(size)) for size in (1, 2, 3, 4)]
    keys = {f"{name}/{key}" for name, p in Net().named_parameters() if p.requires_grad for key in
            ("step", "exp_avg", "exp_avg_sq")}  # fmt: skip
    assert all(whole.keys() == keys for whole in wholes)
    assert any(whole["first.weight/exp_avg"].abs().max() > 0 for whole in wholes)
    assert not torch.equal(wholes[0]["first.weight/exp_avg"], wholes[1]["first.weight/exp_avg"]), "other batches"
    assert read() == [True] * 4
    for size in (2, 3, 4):
        assert run_ranks(read, size) == [[True] * 4 * len(MODES)] * size


@pytest.mark.parametrize("mode", ["zero1", "zero2"])
def test_on_as_many_ranks_in_the_same_mode_it_goes_on_to_the_bit(tmp_path, mode):
    def rank():
        executor = prepared(mode, steps=2)
        save_state(executor, tmp_path / "state")
        weights = {name: weight.clone() for name, weight in executor.weights()}
        again = prepared(mode, steps=0)
        again.load_weights(WholeTensors(weights))
        again.load_optimizer_state(open_optimizer(tmp_path / "state"))
        model, other = executor.model, again.model
        for one in (executor, again):
            with one.accumulate(one.model):
                x = torch.randn(5, 19, generator=torch.Generator().manual_seed(7 + comm.rank()))
                one.backward(one.model(x).square().mean())
            one.step()
        moved = not torch.equal(weights["last.weight"], model.last.weight)
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        return [moved, all(torch.equal(a, b) for a, b in pairs)]

    assert run_ranks(rank, 3) == [[True, True]] * 3


def test_a_part_file_says_whole_shapes_and_offsets(tmp_path):
    run_ranks(lambda: save_state(prepared("zero1", steps=1), tmp_path / "two"), 2)
    seen = {}
    for rank in range(2):
        data = (tmp_path / "two" / part_name(rank, 2)).read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        slices = json.loads(header.pop("__metadata__")["slices"])
        assert slices.keys() == header.keys()
        for key, said in slices.items():
            seen.setdefault(key, []).append((said["start"], header[key]["shape"], said["shape"]))
    shapes = {name: list(p.shape) for name, p in Net().named_parameters()}
    for key, slices in seen.items():
        name, _, kind = key.rpartition("/")
        assert all(whole == ([] if kind == "step" else shapes[name]) for _, _, whole in slices)
        end = 0
        for start, (numel,), _ in sorted(slices):
            assert start == end
            end += numel
    assert any(len(slices) == 2 for slices in seen.values()), "some tensor lies on both ranks"
