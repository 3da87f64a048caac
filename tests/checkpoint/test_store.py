import json
import os
import resource

import pytest
import torch
from support import fork

from pellucid.checkpoint.store import (
    CheckpointStore,
    Snapshot,
    checkpoints,
    is_complete,
    load_checkpoint,
    newest_complete,
)
from pellucid.errors import StorageError


def snapshot(step, size=10):
    return Snapshot(
        step=step, model={"w": torch.full((size,), float(step))}, optimizer={"w/exp_avg": torch.zeros(size, dtype=torch.float64)},
        rng={"torch": torch.get_rng_state()}, state={"step": step}, model_files={"config.json": b"{}"},
        extra={"a": {"x": 1}, "b": {"t": torch.ones(2)}},
    )  # fmt: skip


def test_what_is_saved_is_loaded_dtype_and_all(tmp_path):
    CheckpointStore(tmp_path).save(snapshot(7))
    loaded = load_checkpoint(tmp_path / "step_00000007")
    assert torch.equal(loaded.model["w"], torch.full((10,), 7.0))
    assert loaded.optimizer["w/exp_avg"].dtype == torch.float64
    assert loaded.extra["a"] == {"x": 1} and torch.equal(loaded.extra["b"]["t"], torch.ones(2))
    assert torch.equal(loaded.rng["torch"], torch.get_rng_state())


def test_the_manifest_lists_every_other_file_with_its_size_and_hash(tmp_path):
    CheckpointStore(tmp_path).save(snapshot(1))
    folder = tmp_path / "step_00000001"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["format"] == "pellucid-checkpoint" and manifest["format_version"] == 1 and manifest["step"] == 1
    on_disk = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} - {"manifest.json"}
    assert set(manifest["files"]) == on_disk
    assert manifest["files"]["config.json"]["bytes"] == 2


def test_the_last_n_and_every_m_are_kept(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2, keep_every=4)
    for step in range(1, 10):
        store.save(snapshot(step))
    assert [int(p.name[5:]) for p in checkpoints(tmp_path)] == [4, 8, 9]


def test_a_background_save_is_of_the_moment_it_was_asked_for(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(snapshot(1, size=1_000_000), background=True)
    store.wait()
    assert store.published == [tmp_path / "step_00000001"] and is_complete(tmp_path / "step_00000001")


def test_a_step_saved_again_replaces_the_first_one(tmp_path):
    CheckpointStore(tmp_path).save(snapshot(1))
    changed = snapshot(1)
    changed.state["again"] = True
    CheckpointStore(tmp_path).save(changed)
    assert load_checkpoint(tmp_path / "step_00000001").state["again"] and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_is_an_error_that_leaves_the_earlier_checkpoint(tmp_path, background):
    store = CheckpointStore(tmp_path, keep_last=1)
    store.save(snapshot(1))

    def fill():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            store.save(snapshot(2, size=1_000_000), background=background)
            store.wait()
        except StorageError as error:
            assert "step_00000002" in str(error) and error.exit_code == 1
            os._exit(7)

    assert fork(fill) == 7
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]
    assert newest_complete(tmp_path) == tmp_path / "step_00000001"


def test_leftovers_of_a_killed_save_are_removed_and_never_taken_for_a_checkpoint(tmp_path):
    CheckpointStore(tmp_path).save(snapshot(1))
    leftover = tmp_path / "step_00000002.tmp-123"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    assert newest_complete(tmp_path) == tmp_path / "step_00000001"
    CheckpointStore(tmp_path)
    assert not leftover.exists()
