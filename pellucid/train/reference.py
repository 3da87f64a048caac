"""The frozen model that a policy is compared with, and what it says of pairs, computed once.

P pairs of a batch, N records of a split, W ranks.
"""

import json
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pellucid.checkpoint.model_folder import load_model
from pellucid.data.batches import Batch, Samples
from pellucid.data.records import PreferenceBatch, RolloutBatch
from pellucid.errors import CheckpointError, ConfigError, DataError, StorageError, TrainingError
from pellucid.model import Transformer
from pellucid.model.lora import is_adapter_weight, lora_of, without_adapter
from pellucid.parallel import Executor, comm
from pellucid.parallel.fingerprint import weights_sha256
from pellucid.train.forward import predict
from pellucid.train.losses import response_log_probs
from pellucid.train.precision import autocast
from pellucid.train.prefixes import Prefixes
from pellucid.train.ranks import of_first_rank, on_first_rank
from pellucid.train.run_folder import replace_text

if TYPE_CHECKING:
    from pellucid.train.setup import Setup

FOLDER = "reference"
"""Of a run: what its reference is, and what it said."""
FLUSH_SECONDS = 5.0
"""What is computed reaches the disk this often; a killed run computes so much again."""


class Reference:
    """A frozen model in evaluation mode: the run's own as it starts (with an adapter its base), or another one.

    Where the mode shards weights, it is sharded in the same way; elsewhere every rank holds all of it. The run's own model
    is used itself, not copied, where it stays as it is: before the first step, or below an adapter.

    Args:
        path: a model folder; "": the run's own model.
        live: it is asked in training steps too.
        folder: the run's folder, which keeps a hash of the reference's weights.

    Raises:
        ConfigError, DataError: the model at ``path`` has another tokenizer, too small a vocabulary or too short a window.
        CheckpointError: a resumed run has another reference than before.
    """

    def __init__(self, setup: "Setup", path: str, *, live: bool, folder: Path | None) -> None:
        self.setup = setup
        self.model = setup.model
        self.owned = not path and (not live or lora_of(setup.model) is not None)
        """The run's own model is the reference."""
        self._shards: Executor | None = None
        """Holds the rows of a second model."""
        if not self.owned:
            model = _open(setup, path) if path else _copy(setup)
            self._shards = _shard(setup.executor, model) if setup.executor.shards_weights else None
            self.model = model.requires_grad_(False).eval()
        self.sha256 = of_first_rank(weights_sha256(self._weights()), tag="reference/sha256") if folder else ""
        if folder:
            on_first_rank(lambda: _note(folder, self.sha256), tag="reference/note")

    @torch.no_grad()
    def __call__(self, batch: PreferenceBatch) -> Tensor:
        """The log-probability in nats of each row's answer, ``[2 P]``, summed over its tokens. ★ modes that shard weights."""
        logits = self.logits(batch)
        with autocast(self.setup.device, self.setup.dtype):
            return response_log_probs(logits, batch.targets, batch.loss_mask)

    @torch.no_grad()
    def logits(
        self,
        batch: Batch | PreferenceBatch | RolloutBatch,
        *,
        at: Tensor | None = None,
        prefixes: Prefixes | None = None,
    ) -> Tensor:
        """What the reference says of each position, ``[R, T, V]``, or as in `predict` ``[n, V]``. ★ modes that shard weights."""
        trains = self.model.training
        self.model.eval()
        try:
            bare = without_adapter(self.model) if self.owned else nullcontext()
            with autocast(self.setup.device, self.setup.dtype), bare:
                return predict(self.model, batch, at=at, prefixes=prefixes).logits
        finally:
            self.model.train(trains)

    def _weights(self) -> Iterator[tuple[str, Tensor | None]]:
        """Whole ones on the first rank. ★ modes that shard weights."""
        holder = self.setup.executor if self.owned else self._shards
        for name, weight in holder.weights() if holder is not None else self.model.named_parameters():
            yield name, weight if comm.rank() == 0 and not is_adapter_weight(name) else None


def reference_table(
    reference: Reference, samples: Samples[PreferenceBatch], setup: "Setup", folder: Path | None, split: str
) -> Tensor:
    """What ``reference`` says of every pair of a split: ``[N, 2]`` float32, chosen and rejected, by record. ★

    A pair is scored alone or beside others with equal right, so ranks share them out. In ``folder`` it is kept: a resumed
    run reads it, and one that was killed on the way goes on where it was.

    Raises:
        TrainingError: a value is not finite; names the record.
    """
    table = torch.full((samples.split.num_documents, 2), float("nan"))
    store = _Store(folder, split, reference.sha256, samples) if folder and comm.rank() == 0 else None
    done = int(
        of_first_rank(str(on_first_rank(lambda: store.open(table) if store else 0, tag="reference/open")), tag="done")
    )
    if comm.world_size() > 1 and done:
        everybodys = comm.all_gather_bytes(table.numpy().tobytes() if comm.rank() == 0 else b"", tag="reference/known")
        table = torch.frombuffer(bytearray(everybodys[0]), dtype=torch.float32).view(-1, 2)
    micro, size = setup.config.train.micro_batch, comm.world_size()
    while done < len(samples):
        first = min(done + comm.rank() * micro, len(samples) - 1)  # a rank without pairs of its own gathers weights too
        ids = list(range(first, min(first + micro, len(samples))))
        batch = samples.batch(ids, micro).to(setup.device)
        sums = reference(batch).double().cpu().view(2, -1).T  # ★ modes that shard weights
        mine = torch.zeros(size, micro, 3, dtype=torch.float64)
        if done + comm.rank() * micro < len(samples):
            mine[comm.rank()] = torch.cat([batch.pair_ids.cpu().double().unsqueeze(1) + 1, sums], 1)
        # each number is one rank's and float32, so that the sum is exact
        found = torch.tensor(comm.all_reduce(mine.flatten().tolist(), tag="reference")).view(-1, 3)  # ★
        found = found[found[:, 0] > 0]
        bad = next((int(pair) - 1 for pair, *values in found.tolist() if not np.isfinite(values).all()), None)
        if bad is not None:
            raise TrainingError(
                f"the reference gives record {bad} of split {split} a log-probability that is not finite"
            )
        table[found[:, 0].long() - 1] = found[:, 1:].float()
        done = min(done + size * micro, len(samples))
        if store is not None:
            store.keep(table, done)
    if store is not None:
        store.close()
    return table.to(setup.device)


class _Store:
    """RUN/reference/SPLIT.bin, float32 by record, and SPLIT.json, which says of what and how many samples are in it."""

    def __init__(self, folder: Path, split: str, sha256: str, samples: Samples[Any]) -> None:
        self.values, self.head = folder / FOLDER / f"{split}.bin", folder / FOLDER / f"{split}.json"
        sizes = {"samples": len(samples), "tokens": samples.split.num_tokens}
        self.facts = {"reference_sha256": sha256, **sizes, **samples.identity}
        self.records, self.samples = samples.split.num_documents, len(samples)
        self._map: Any = None
        self._kept_at = time.monotonic()

    def open(self, table: Tensor) -> int:
        """Fill ``table`` with what is known; how many samples, in their order, that is."""
        done = 0
        try:
            known = json.loads(self.head.read_text(encoding="utf-8")) if self.head.is_file() else {}
            if known and {key: known.get(key) for key in self.facts} == self.facts:
                values = np.fromfile(self.values, np.float32).reshape(self.records, 2)
                table.copy_(torch.from_numpy(values))
                done = int(known["done"])
            self._map = np.memmap(self.values, np.float32, "r+" if done else "w+", shape=(self.records, 2))
        except (OSError, ValueError, RecursionError) as error:
            raise StorageError(f"{self.values}: cannot be used ({error}); remove {self.values.parent}") from error
        return done

    def keep(self, table: Tensor, done: int) -> None:
        """Write what is new, now and then."""
        if done < self.samples and time.monotonic() - self._kept_at < FLUSH_SECONDS:
            return
        self._map[:] = table.numpy()
        self._map.flush()
        replace_text(self.head, json.dumps(self.facts | {"done": done}) + "\n")
        self._kept_at = time.monotonic()

    def close(self) -> None:
        """Give the file up."""
        self._map = None


def _note(folder: Path, sha256: str) -> None:
    """Record what the reference is, or `CheckpointError` where a run had another one."""
    path = folder / FOLDER / "reference.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        before = json.loads(path.read_text(encoding="utf-8")).get("sha256") if path.is_file() else sha256
    except (OSError, ValueError, RecursionError, AttributeError) as error:
        raise StorageError(f"{path} cannot be used ({error}); remove {path.parent}") from error
    if before != sha256:
        raise CheckpointError(
            f"{path} says that this run's reference has weights of hash {before[:12]}, and it has {sha256[:12]} now; resume with "
            "the train.init, strategy.reference_model and model that it began with"
        )
    replace_text(path, json.dumps({"sha256": sha256}) + "\n")


def _open(setup: "Setup", path: str) -> Transformer:
    loaded = load_model(
        path, device=setup.device.type if setup.device.index is None else str(setup.device), dtype="float32"
    )
    config, key = loaded.config, f"strategy.reference_model {path}"
    theirs = loaded.tokenizer.sha256 if loaded.tokenizer is not None else None
    if setup.data is not None and theirs not in (None, setup.data.tokenizer_sha256):
        raise DataError(
            f"{key} and {setup.config.data.path} have different tokenizers; take a reference of this tokenizer, or prepare "
            f"the data with --tokenizer {path}"
        )
    needed = setup.data.vocab_size if setup.data is not None else setup.model.config.vocab_size
    if config.vocab_size < needed:
        raise ConfigError(
            f"{key} has a vocabulary of {config.vocab_size:,} and the data one of {needed:,}; take a reference of this tokenizer"
        )
    context = setup.config.data.context or setup.config.model.max_position_embeddings
    if config.max_position_embeddings < context:
        raise ConfigError(
            f"{key} has a window of {config.max_position_embeddings:,} tokens and the run one of {context:,}; "
            "shorten data.context or take another reference"
        )
    return loaded.model


def _copy(setup: "Setup") -> Transformer:
    """The run's own model as it is now; where weights are sharded, on the first rank, from which all get theirs."""
    model = Transformer(setup.model.config, device="meta")
    shapes, tensors = setup.executor.weight_shapes(), dict[str, Tensor]()
    for name, weight in setup.executor.weights():
        shape, dtype = shapes[name]
        tensors[name] = torch.zeros(shape, dtype=dtype, device=setup.device)
        if weight is not None:
            tensors[name].copy_(weight)
    model.load_state_dict(tensors, assign=True)
    return model.to(setup.device)


def _shard(executor: Executor, model: Transformer) -> Executor:
    """Leave this rank the rows of ``model`` that it would have of the run's own."""
    held = type(executor)(average=False, options=executor.options)
    held.weights_tag = FOLDER
    held.prepare(model)
    return held
