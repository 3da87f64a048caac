"""A save in parts: killed or refused anywhere on any rank, the checkpoint before or after it loads, and nobody waits."""

import ctypes
import gc
import json
import math
import os
import resource
import shutil
import signal
import time
import weakref

import pytest
import torch
from safetensors.torch import load_file
from support import fork, load_moments, run_ranks, tensors_of, tiny_config, try_ranks, windows

from pellucid import launch
from pellucid.checkpoint import export_model, files, load_optimizer, newest_undamaged, open_checkpoint
from pellucid.errors import CheckpointError, ConfigError, RankError, StorageError, TrainingError
from pellucid.model import Transformer
from pellucid.parallel import comm
from pellucid.parallel.sharded_optimizer import ShardedOptimizer
from pellucid.train import Callback, Trainer
from pellucid.train.checkpointing import Saver
from pellucid.train.saving import RunWriter

CHANGES = dict(
    model__dropout=0.1, train__steps=4, train__global_batch=4, train__micro_batch=2, train__save_every=2, train__val_every=0,
    train__keep_last=0, train__async_save=False, parallel__ledger=False,
)  # fmt: skip


def trainer_of(out, mode="none", *, callbacks=(), model=None, **changes):
    config = tiny_config(out, parallel__mode=mode, **(CHANGES | changes))
    return Trainer(config, train_data=windows(12), callbacks=callbacks, model=model)


def run(out, mode="none", *, resume=True, **arguments):
    trainer = trainer_of(out, mode, **arguments)
    trainer.train(resume=resume)
    return trainer


@pytest.fixture(scope="module", autouse=True)
def warm():
    """The first step of an optimizer is slow in a process; forked ranks inherit a warm one."""
    run("", resume=False, train__steps=1)


# -- killed -------------------------------------------------------------------------------------------------


def count(background, out):
    """The operations of each of two ranks in a run from step 2 to step 4, as (name, path) lists."""

    def rank():
        seen = []
        files.before_operation = lambda name, path: seen.append([name, path.name])
        run(out, "zero1", train__async_save=background)
        return seen

    return run_ranks(rank, 2)


@pytest.fixture(scope="module")
def halfway(tmp_path_factory):
    """A run of two ranks with a checkpoint of step 2, and what it would be at step 4."""
    folder = tmp_path_factory.mktemp("halfway")

    def rank():
        run(folder / "run", "zero1", train__steps=2)

    run_ranks(rank, 2)
    shutil.rmtree(folder / "run/model")
    shutil.copytree(folder / "run", folder / "whole")
    run_ranks(lambda: run(folder / "whole", "zero1") and None, 2)
    return folder / "run", tensors_of(folder / "whole/checkpoints/step_00000004")


def killed(out, background, rank, point, moment):
    """The second half of a run, in which a rank is killed at one of its own operations; how it ended."""
    with pytest.raises(RankError) as error:
        launch(half_a_life, 2, out, background, rank, point, moment, start_method="fork")
    return str(error.value)


def half_a_life(out, background, rank, point, moment):
    torch.set_num_threads(1)
    seen = 0

    def die(name, path):
        nonlocal seen
        if seen == point:
            if moment == "torn":
                os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        seen += 1

    if comm.rank() == rank:
        setattr(files, "before_operation" if moment == "before" else "after_operation", die)
    run(out, "zero1", train__async_save=background)


def points(background, tmp_path, source):
    shutil.copytree(source, tmp_path / "count")
    operations = count(background, tmp_path / "count")
    assert [name for name, path in operations[1]] == ["write", "fsync"], "the second rank writes one file, its own"
    assert operations[1][0][1] == "optimizer-00002-of-00002.safetensors"
    return [
        (rank, point, moment)
        for rank, mine in enumerate(operations)
        for point, (name, _) in enumerate(mine)
        for moment in (("before", "torn", "after") if name == "write" else ("before", "after"))
    ]


def check_killed(case, background, tmp_path, halfway):
    source, whole = halfway
    out = tmp_path / "-".join(map(str, case))
    shutil.copytree(source, out)
    begin = time.monotonic()
    assert killed(out, background, *case).startswith(f"rank {case[0]} was killed by SIGKILL"), case
    assert time.monotonic() - begin < 25, "the other rank must not wait for the dead one"
    newest = newest_undamaged(out / "checkpoints")
    assert newest.name in ("step_00000002", "step_00000004"), case
    run_ranks(lambda: run(out, "zero1") and None, 2)
    assert not list(out.glob("**/*.tmp-*")), case
    got = tensors_of(out / "checkpoints/step_00000004")
    assert got.keys() == whole.keys() and all(torch.equal(got[key], value) for key, value in whole.items()), case
    shutil.rmtree(out)
    return newest.name


@pytest.mark.parametrize("background", [False, True], ids=["at once", "background"])
def test_a_rank_killed_in_a_save_leaves_the_checkpoint_before_or_after_it(tmp_path, halfway, background):
    cases = points(background, tmp_path, halfway[0])
    assert len(cases) > 55
    first, second = ([case for case in cases if case[0] == rank] for rank in (0, 1))
    chosen = [*second[::2], *first[background::20], first[-1]]
    found = {check_killed(case, background, tmp_path, halfway) for case in chosen}
    assert found == {"step_00000002", "step_00000004"}


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True], ids=["at once", "background"])
def test_a_rank_killed_at_any_operation_of_a_save_leaves_the_checkpoint_before_or_after_it(
    tmp_path, halfway, background
):
    for case in points(background, tmp_path, halfway[0]):
        check_killed(case, background, tmp_path, halfway)


# -- refused ------------------------------------------------------------------------------------------------


class At(Callback):
    """Calls ``function`` on one rank when step ``step`` is finished, before the save."""

    def __init__(self, step, rank, function):
        self.step, self.rank, self.function = step, rank, function

    def on_optimizer_step(self, trainer, info):
        if info.step == self.step and comm.rank() == self.rank:
            self.function()


def full_disk():
    """From now on this process can write no file of more than some bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))


@pytest.mark.parametrize("background", [False, True], ids=["at once", "background"])
@pytest.mark.parametrize("mode, culprit", [("zero1", 1), ("zero3", 2), ("zero3", 0)])
def test_a_part_that_one_rank_cannot_write_fails_on_all_and_leaves_nothing(tmp_path, background, mode, culprit):
    """In zero3 all ranks gather the weights that the first one then cannot write: nobody may be left waiting."""

    def rank():
        callback = At(4, culprit, full_disk)
        with pytest.raises((StorageError, RankError)) as error:
            run(
                tmp_path, mode, callbacks=[callback], resume=False, train__async_save=background, train__steps=6,
                train__global_batch=3, train__micro_batch=1,
            )  # fmt: skip
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return [type(error.value).__name__, str(error.value), error.value.exit_code]

    results = run_ranks(rank, 3)
    kind, message, exit_code = results.pop(culprit)
    part = f"optimizer-0000{culprit + 1}-of-00003.safetensors" if culprit else "model.safetensors"
    assert kind == "StorageError" and part in message and exit_code == 1
    assert results == [["RankError", f"rank {culprit}: {message}", 1]] * 2
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000002"]
    assert newest_undamaged(tmp_path / "checkpoints").name == "step_00000002"


def test_a_callback_whose_state_cannot_be_saved_fails_the_save_on_all(tmp_path):
    class Broken(Callback):
        name = "broken"

        def state_dict(self):
            raise ZeroDivisionError("no state")

    def rank():
        with pytest.raises((ZeroDivisionError, RankError)) as error:
            run(tmp_path, "zero1", callbacks=[Broken()], resume=False)
        return str(error.value)

    assert run_ranks(rank, 2) == ["no state", "rank 0: ZeroDivisionError: no state"]
    assert not list((tmp_path / "checkpoints").iterdir())


# -- in the background --------------------------------------------------------------------------------------


def test_a_checkpoint_in_the_background_is_of_its_step_and_published_while_training_goes_on(tmp_path):
    """One rank's writing is held up: all publish together, in the same later step."""

    class Seen(Callback):
        def __init__(self):
            self.saved, self.held = [], []

        def on_optimizer_step(self, trainer, info):
            if info.step == 5 and comm.rank() == 1:
                files.before_operation = lambda name, path: wait_for((tmp_path / "go on").exists)
            if info.step == 8:
                self.held = [path.name.partition("-")[0] for path in (tmp_path / "run/checkpoints").iterdir()]
                comm.barrier(tag="looked")
                (tmp_path / "go on").touch()
                wait_for(lambda: not trainer._saver.writing)

        def on_save(self, trainer, info):
            self.saved.append([info.step, trainer.state.step])

    def rank():
        seen = Seen()
        run(
            tmp_path / "run", "zero1", callbacks=[seen], resume=False, train__async_save=True, train__steps=9,
            train__save_every=5,
        )  # fmt: skip
        return [seen.held, seen.saved]

    first, second = run_ranks(rank, 2)
    assert first[0] == second[0] == ["step_00000005.tmp"], "in step 8 it is not published yet"
    assert first[1] == [[5, 8], [9, 9]] and second[1] == []
    early, late = (open_checkpoint(tmp_path / f"run/checkpoints/step_0000000{n}") for n in (5, 9))
    assert early.state["step"] == 5 and early.optimizer.read("model.norm.weight/step").item() == 5
    assert late.optimizer.read("model.norm.weight/step").item() == 9
    run_ranks(lambda: run(tmp_path / "again", "zero1", train__steps=9, train__save_every=5) and None, 2)
    expected, got = (tensors_of(tmp_path / f"{name}/checkpoints/step_00000005") for name in ("again", "run"))
    assert all(torch.equal(got[key], value) for key, value in expected.items()), "what it was when step 5 was finished"


def wait_for(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_background_save_of_a_run_that_fails_later_is_kept(tmp_path):
    """On one process, and on ranks where the first one writes all."""

    class Fails(Callback):
        def on_before_step(self, trainer, info):
            if info.step == 3:
                raise ZeroDivisionError("mine")

    def rank(out, mode):
        with pytest.raises((ZeroDivisionError, RankError)):
            run(out, mode, callbacks=[Fails()], resume=False, train__async_save=True)

    rank(tmp_path / "one", "none")
    run_ranks(lambda: rank(tmp_path / "two", "ddp"), 2)
    for out in ("one", "two"):
        assert newest_undamaged(tmp_path / out / "checkpoints").name == "step_00000002"


def test_what_the_first_rank_wrote_alone_stays_when_another_dies_meanwhile(tmp_path, monkeypatch):
    def rank():
        if comm.rank() == 1:
            write = Saver._write_weights
            monkeypatch.setattr(
                Saver, "_write_weights", lambda *a, **k: os._exit(9) if a[1].step == 4 else write(*a, **k)
            )
        with pytest.raises(RuntimeError, match="gloo"):
            run(tmp_path, "ddp", resume=False)
        os._exit(3)

    assert try_ranks(rank, 2)[0] == [3, 9]
    assert newest_undamaged(tmp_path / "checkpoints").name == "step_00000004"


def test_a_refused_step_keeps_the_checkpoint_that_all_are_writing(tmp_path):
    class Poison(Callback):
        def on_batch_end(self, trainer, info):
            if info.step == 3:
                trainer.model.model.norm.weight.grad.fill_(torch.nan)

    def rank():
        if comm.rank() == 1:
            files.before_operation = lambda name, path: time.sleep(0.3)  # it is not done when step 3 is refused
        with pytest.raises(TrainingError, match=r"step 3: .* step 2, and the newest checkpoint is of step 2"):
            run(tmp_path, "zero1", callbacks=[Poison()], resume=False, train__async_save=True)

    run_ranks(rank, 2)
    assert newest_undamaged(tmp_path / "checkpoints").name == "step_00000002"


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("mode, size", [("none", 1), ("zero1", 2), ("zero3", 2)])
def test_weights_that_are_not_finite_are_never_published(tmp_path, mode, size, background):
    class Poison(Callback):
        def on_optimizer_step(self, trainer, info):
            if info.step == 4:
                weight = next(p for name, p in trainer.model.named_parameters() if "down_proj" in name)
                weight.detach().flatten()[-1:].fill_(torch.inf)

    def rank():
        with pytest.raises(
            (TrainingError, RankError), match=r"down_proj\.weight is not finite in float32 and is not saved"
        ):
            run(tmp_path, mode, callbacks=[Poison()], resume=False, train__async_save=background, train__save_every=2,
                train__steps=4)  # fmt: skip

    if size == 1:
        assert fork(rank) == 0
    else:
        run_ranks(rank, size)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000002"]
    assert not (tmp_path / "model").exists()
    assert newest_undamaged(tmp_path / "checkpoints").name == "step_00000002"


# -- a parameter without state ------------------------------------------------------------------------------


class Unreached(Transformer):
    """Has a parameter that no loss reaches."""

    def __init__(self, config, **kwargs):
        super().__init__(config, **kwargs)
        self.spare = torch.nn.Parameter(torch.ones(5, 7))


@pytest.mark.parametrize("mode, size", [("none", 1), ("ddp", 2), ("zero1", 2), ("zero2", 3)])
def test_a_run_with_a_parameter_that_no_loss_reaches_can_be_resumed(tmp_path, mode, size):
    def rank():
        for steps in (2, 4):
            model = Unreached(tiny_config().model, generator=torch.Generator().manual_seed(1))
            trainer = run(tmp_path, mode, model=model, train__steps=steps, train__global_batch=6, train__micro_batch=1)
        return trainer.state.step

    assert ([rank()] if size == 1 else run_ranks(rank, size)) == [4] * size
    checkpoint = open_checkpoint(tmp_path / "checkpoints/step_00000004")
    assert checkpoint.state["without_state"] == ["spare"]
    assert not [key for key in checkpoint.optimizer.keys() if key.startswith("spare")]  # noqa: SIM118
    assert checkpoint.optimizer.read("model.norm.weight/step").item() == 4


def test_a_state_that_is_really_missing_is_refused_by_name(tmp_path):
    run(tmp_path, train__steps=2)
    folder = tmp_path / "checkpoints/step_00000002"
    moments = load_moments(folder)
    moments = {key: value for key, value in moments.items() if not key.startswith("model.norm.weight/")}
    written = files.write_tensors(folder / "optimizer.safetensors", moments)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["optimizer.safetensors"] = {"bytes": written.bytes, "sha256": written.sha256}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"step_00000002: .*no optimizer state for model\.norm\.weight"):
        run(tmp_path)


# -- a loop of one's own ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mode, size", [("none", 1), ("ddp", 2), ("zero1", 2), ("zero1", 3), ("zero3", 3), ("fsdp2", 2)]
)
def test_plain_adamw_takes_the_state_of_any_checkpoint_and_steps_on(tmp_path, mode, size):
    def rank():
        run(tmp_path, mode, train__steps=2, train__global_batch=6, train__micro_batch=1)

    rank() if size == 1 else run_ranks(rank, size)
    folder = tmp_path / "checkpoints/step_00000002"
    assert len(list(folder.glob("optimizer*"))) == (size if mode in ("zero1", "zero3", "fsdp2") else 1)
    model = Transformer(tiny_config().model, generator=torch.Generator().manual_seed(5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.5, 0.75), weight_decay=0.0)
    load_optimizer(tmp_path, model, optimizer)  # a run: its newest checkpoint
    expected = load_moments(folder)
    for name, parameter in model.named_parameters():
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[parameter][key], expected[f"{name}/{key}"]), name
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.25)
    optimizer.step()
    for name, parameter in model.named_parameters():  # by hand, from the moments in the file
        m = expected[f"{name}/exp_avg"].double() * 0.5 + 0.25 * 0.5
        v = expected[f"{name}/exp_avg_sq"].double() * 0.75 + 0.25**2 * 0.25
        update = (m / (1 - 0.5**3)) / ((v / (1 - 0.75**3)).sqrt() + 1e-8)
        torch.testing.assert_close(parameter.detach(), (before[name] - 0.1 * update).float(), rtol=1e-5, atol=1e-6)


def test_load_optimizer_refuses_what_does_not_fit_and_keeps_dtypes(tmp_path):
    run(tmp_path, train__steps=2)
    model = Transformer(tiny_config().model)
    optimizer = torch.optim.AdamW(model.bfloat16().parameters())
    load_optimizer(tmp_path / "checkpoints/step_00000002", model, optimizer)
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.float32}
    wide = Transformer(tiny_config(model__hidden_size=32).model)
    other = torch.optim.AdamW(wide.parameters())
    with pytest.raises(
        CheckpointError, match=r"step_00000002: .*exp_avg has shape \(61, 16\), the parameter \(61, 32\)"
    ):
        load_optimizer(tmp_path, wide, other)
    assert not other.state
    with pytest.raises(CheckpointError, match="no checkpoint and no run with a complete one"):
        load_optimizer(tmp_path / "nowhere", model, optimizer)
    with pytest.raises(ConfigError, match="plain optimizer"):
        load_optimizer(tmp_path, model, ShardedOptimizer(model.parameters(), torch.optim.AdamW))
    damaged = tmp_path / "checkpoints/step_00000002/optimizer.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors does not have the hash"):
        load_optimizer(tmp_path, model, optimizer)


# -- memory -------------------------------------------------------------------------------------------------


def peak_over(function):
    """Bytes by which resident memory rises at most while ``function`` runs."""
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: what is freed is gone, and what is resident is held
    gc.collect()  # what waits for the collector is no part of the base
    libc.malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = _status("VmRSS")
    function()
    return _status("VmHWM") - before


def _status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))


LARGE = dict(
    model__vocab_size=16_384, model__hidden_size=256, model__intermediate_size=640, model__num_hidden_layers=9,
    model__tie_word_embeddings=True, train__global_batch=2, train__micro_batch=1, train__steps=1,
)  # fmt: skip
LARGEST = 16_384 * 256 * 4


def test_a_stream_of_tensors_holds_one_at_a_time(tmp_path):
    seen = []

    def tensors():
        for i in range(4):
            assert [alive() for alive in seen] == [None] * i, "those before are gone when the next one is made"
            tensor = torch.full((2, 3), float(i))
            seen.append(weakref.ref(tensor))
            once = [tensor]
            del tensor
            yield f"w{i}", once.pop()

    shapes = {f"w{i}": ((2, 3), torch.float32) for i in range(4)}
    files.stream_tensors(tmp_path / "x", shapes, tensors())
    assert {name: t.tolist() for name, t in load_file(tmp_path / "x").items()} == {
        f"w{i}": [[float(i)] * 3] * 2 for i in range(4)
    }


@pytest.mark.slow
def test_saving_and_exporting_hold_one_tensor_beside_what_is_there_and_a_background_save_copies(tmp_path):
    def measure(mode):
        out = tmp_path / f"{mode}{comm.world_size()}"
        trainer = trainer_of(out, mode, **LARGE)
        trainer.train()
        weights = 4 * sum(math.prod(shape) for shape, _ in trainer.setup.executor.weight_shapes().values())
        moments = sum(part.tensor.nbytes for part in trainer.setup.executor.optimizer_parts())
        writer = RunWriter(trainer.setup, resume=True) if comm.rank() == 0 else None
        if writer is not None:
            writer.begin(1, ended=True)
        saver = Saver(trainer.setup, writer)
        # once before: pages that a forked process has not touched yet are no part of the measure
        saver.save(trainer.state, stopped=None)
        # the allocator may take a little more now and then
        at_once = min(peak_over(lambda: saver.save(trainer.state, stopped=None)) for _ in range(2))
        object.__setattr__(trainer.setup.config.train, "async_save", True)

        def background():
            saver.save(trainer.state, stopped=None)
            saver.finish()

        # and once in many times the base holds a tensor that is let go meanwhile
        copied = max(peak_over(background) for _ in range(2))
        saver.close()
        return [at_once, copied, weights, moments]

    def alone():
        (tmp_path / "measured").write_text(json.dumps(measure("none")))

    assert fork(alone) == 0
    results = [json.loads((tmp_path / "measured").read_text()), *run_ranks(lambda: measure("zero1"), 2)]
    results += run_ranks(lambda: measure("zero3"), 2)
    print("over the base, in largest tensors:", [[round(x / LARGEST, 2) for x in result[:2]] for result in results])
    for i, (at_once, copied, weights, moments) in enumerate(results):
        assert weights > 38e6 and moments > (30e6 if i else 76e6)
        assert at_once < 1.2 * LARGEST, f"{at_once / 1e6:.0f} MB"
        # one of them may come to lie in memory that was let go and is resident still
        assert copied > 0.9 * (moments + (weights if i < 2 else 0)) - LARGEST, "the measurement sees copies"

    def export(dtype):
        # once before: pages of code that a forked process has not touched yet are no part of the measure
        export_model(tmp_path / "zero12", tmp_path / f"out-{dtype}", dtype=dtype)
        peak = peak_over(lambda: export_model(tmp_path / "zero12", tmp_path / f"out-{dtype}", dtype=dtype))
        print("export over the base, in largest tensors:", peak / LARGEST)
        (tmp_path / f"peak-{dtype}").write_text(str(peak))

    for dtype in ("auto", "bfloat16"):
        assert fork(lambda dtype=dtype: export(dtype)) == 0
        assert int((tmp_path / f"peak-{dtype}").read_text()) < 1.2 * LARGEST
