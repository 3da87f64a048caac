import json
import os
import resource

import pytest
import torch
from support import fork

from pellucid.checkpoint import files
from pellucid.checkpoint.reshard import write_parts
from pellucid.checkpoint.store import (
    CheckpointStore,
    checkpoints,
    extra_files,
    is_complete,
    newest_complete,
    newest_undamaged,
    open_checkpoint,
    verify,
    write_files,
    writing_bytes,
)
from pellucid.errors import CheckpointError, StorageError
from pellucid.parallel.parts import Part


def save(store, step, size=10, **state):
    """A small checkpoint, written and published."""
    folder = store.begin(step)
    weights = {"w": torch.full((size,), float(step))}
    moments = [Part("w/exp_avg", (size,), 0, torch.zeros(size, dtype=torch.float64))]
    written = write_files(
        folder,
        {
            "config.json": writing_bytes(b"{}"),
            "model.safetensors": lambda path: files.write_tensors(path, weights),
            "optimizer.safetensors": lambda path: write_parts(path, moments, whole=True),
            "rng.safetensors": lambda path: files.write_tensors(path, {"torch": torch.get_rng_state()}),
            "state.json": lambda path: files.write_json(path, {"step": step, **state}),
            **extra_files({"a": {"x": 1}, "b": {"t": torch.ones(2)}}),
        },
    )
    return store.publish(folder, step, written)


def test_what_is_saved_is_loaded_dtype_and_all(tmp_path):
    loaded = open_checkpoint(save(CheckpointStore(tmp_path), 7))
    assert loaded.step == 7 and loaded.path == tmp_path / "step_00000007" and loaded.state == {"step": 7}
    assert torch.equal(loaded.model.read("w"), torch.full((10,), 7.0))
    assert loaded.optimizer.read("w/exp_avg").dtype == torch.float64
    assert loaded.extra["a"] == {"x": 1} and torch.equal(loaded.extra["b"]["t"], torch.ones(2))
    assert torch.equal(loaded.rng.read("torch"), torch.get_rng_state())


def test_the_manifest_lists_every_other_file_with_its_size_and_hash(tmp_path):
    folder = save(CheckpointStore(tmp_path), 1)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["format"] == "pellucid-checkpoint" and manifest["format_version"] == 1 and manifest["step"] == 1
    on_disk = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} - {"manifest.json"}
    assert set(manifest["files"]) == on_disk and list(manifest["files"]) == sorted(on_disk)
    for name, said in manifest["files"].items():  # what was noted while writing is what is there
        assert said == {"bytes": (folder / name).stat().st_size, "sha256": files.sha256(folder / name)}, name


WRONG_KEYS = [
    (["format"], ["other", None]),
    (["format_version"], ["1", True, -1, 1.5]),
    (["step"], ["2", None]),
    (["files"], [[], "x"]),
    (["files", "state.json"], [1, None]),
    (["files", "model.safetensors", "bytes"], ["1", None, -1, 1e300]),
    (["files", "rng.safetensors", "sha256"], [1, None]),
]


@pytest.mark.parametrize(("keys", "values"), WRONG_KEYS)
def test_a_key_of_a_manifest_that_is_missing_or_wrong_is_named_and_the_checkpoint_before_is_taken(
    tmp_path, capfd, keys, values
):
    store = CheckpointStore(tmp_path)
    before, newest = save(store, 1), save(store, 2)
    path = newest / "manifest.json"
    whole = path.read_text()
    for value in [*values, ...]:
        manifest = table = json.loads(whole)
        for part in keys[:-1]:
            table = table[part]
        if value is ...:
            del table[keys[-1]]
        else:
            table[keys[-1]] = value
        path.write_text(json.dumps(manifest))
        with pytest.raises(CheckpointError) as refused:
            verify(newest)
        assert str(path) in str(refused.value) and keys[-1] in str(refused.value)
        assert not is_complete(newest) and newest_complete(tmp_path) == newest_undamaged(tmp_path) == before
        assert "step_00000002" in capfd.readouterr().err


@pytest.mark.parametrize("text", ["[" * 100_000, '{"format": "pellucid-checkpoint"}', "{}", "1", "", "\0"])
def test_a_manifest_that_is_none_is_a_damaged_checkpoint(tmp_path, text):
    store = CheckpointStore(tmp_path)
    before, newest = save(store, 1), save(store, 2)
    (newest / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"step_00000002/manifest\.json"):
        open_checkpoint(newest)
    assert newest_complete(tmp_path) == newest_undamaged(tmp_path) == before


def test_the_last_n_and_every_m_are_kept(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2, keep_every=4)
    for step in range(1, 10):
        save(store, step)
    assert [int(p.name[5:]) for p in checkpoints(tmp_path)] == [4, 8, 9]


def test_a_step_saved_again_replaces_the_first_one(tmp_path):
    save(CheckpointStore(tmp_path), 1)
    save(CheckpointStore(tmp_path), 1, again=True)
    assert open_checkpoint(tmp_path / "step_00000001").state["again"] and len(list(tmp_path.iterdir())) == 1


def test_a_state_of_a_callback_is_of_the_moment_it_was_asked_for(tmp_path):
    table, tensors = {"x": [1]}, {"t": torch.ones(2)}
    writes = extra_files({"a": table, "b": tensors})
    table["x"].append(2)
    tensors["t"].zero_()
    write_files(tmp_path, writes)
    assert json.loads((tmp_path / "extra/a.json").read_text()) == {"x": [1]}
    assert (tmp_path / "extra/b.safetensors").read_bytes().endswith(torch.ones(2).numpy().tobytes())


def test_a_full_disk_is_an_error_that_leaves_the_earlier_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 1)

    def fill():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            save(store, 2, size=1_000_000)
        except StorageError as error:
            assert "step_00000002" in str(error) and "model.safetensors" in str(error) and error.exit_code == 1
            os._exit(7)

    assert fork(fill) == 7
    assert newest_complete(tmp_path) == tmp_path / "step_00000001"
    store = CheckpointStore(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"], "what is left of the other is removed"


def test_a_manifest_that_cannot_be_written_publishes_nothing_and_leaves_nothing(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 1)

    def refuse(name, path):
        if path.name == "manifest.json":
            raise StorageError(f"cannot {name} {path}: no space")

    monkeypatch.setattr(files, "before_operation", refuse)
    with pytest.raises(StorageError, match=r"manifest\.json"):
        save(store, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"] and len(store.published) == 1


def test_leftovers_of_a_killed_save_are_removed_and_never_taken_for_a_checkpoint(tmp_path):
    save(CheckpointStore(tmp_path), 1)
    leftover = tmp_path / "step_00000002.tmp-123"
    leftover.mkdir()
    (leftover / "optimizer-00002-of-00004.safetensors").write_bytes(b"half")
    assert newest_complete(tmp_path) == newest_undamaged(tmp_path) == tmp_path / "step_00000001"
    assert is_complete(tmp_path / "step_00000001") and not is_complete(leftover)
    CheckpointStore(tmp_path)
    assert not leftover.exists()
