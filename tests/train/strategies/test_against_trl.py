"""The losses of TRL's trainers on the same model and the same records; needs trl, which is no part of the test extra."""

import numpy as np
import pytest
import torch
from records import conversations, pairs
from support import TINY

from pellucid import save_model
from pellucid.config import ModelConfig
from pellucid.model import Transformer
from pellucid.train.strategies import Dpo, DpoOptions, Sft, SftOptions
from pellucid.train.strategies.dpo import ComparedBatch

trl = pytest.importorskip("trl", reason="pip install trl")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def models(tmp_path_factory, data_folder):
    """A policy and a reference, here and in transformers, and a tokenizer that TRL wants to see."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from pellucid.data.shards import TokenData

    tokenizer = TokenData.open(data_folder).tokenizer()
    config = ModelConfig(**TINY | {"vocab_size": tokenizer.vocab_size, "max_position_embeddings": 32})
    root, ours, theirs = tmp_path_factory.mktemp("models"), [], []
    for seed in (1, 2):
        model = Transformer(config, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.mul_(5)  # drawn so small, all models say the same
        save_model(root / str(seed), model, tokenizer)
        ours.append(model)
        theirs.append(AutoModelForCausalLM.from_pretrained(root / str(seed), attn_implementation="eager"))
    hf = AutoTokenizer.from_pretrained(root / "1")
    hf.pad_token = hf.pad_token or hf.eos_token
    return ours, theirs, hf


def gradients(ours, theirs):
    """Of each of our parameters beside transformers' of the same name."""
    named = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        yield name, parameter.grad, named[name].grad


TEXT = [{"prompt": "a", "chosen": "b", "rejected": "c"}]
"""A trainer wants to make ids itself; its collator then gets ours."""
CASES = {
    "sigmoid": (DpoOptions(beta=0.3), {"loss_type": ["sigmoid"]}),
    "ipo": (DpoOptions(beta=0.3, variant="ipo", length_normalised=True), {"loss_type": ["ipo"]}),
    "normalised": (DpoOptions(beta=0.3, length_normalised=True), {"loss_type": ["sigmoid_norm"]}),
}


@pytest.mark.parametrize("name", CASES)
def test_dpo(models, tmp_path, name):
    from datasets import Dataset

    (policy, reference), (their_policy, their_reference), tokenizer = models
    options, settings = CASES[name]
    data = pairs(6, vocab_size=policy.config.vocab_size)
    rows = [
        dict(zip(("prompt_ids", "chosen_ids", "rejected_ids"), (p.ids.tolist() for p in record.parts), strict=True))
        for record in data.split.records
    ]
    arguments = trl.DPOConfig(
        output_dir=str(tmp_path), beta=0.3, use_cpu=True, bf16=False, fp16=False, report_to="none", max_length=None,
        gradient_checkpointing=False, per_device_train_batch_size=6, remove_unused_columns=False, **settings,
    )  # fmt: skip
    trainer = trl.DPOTrainer(
        model=their_policy, ref_model=their_reference, args=arguments, train_dataset=Dataset.from_list(TEXT),
        processing_class=tokenizer,
    )  # fmt: skip
    batch = trainer.data_collator(rows)
    their_policy.zero_grad()
    theirs = trainer.compute_loss(trainer.model, batch)
    theirs.backward()

    mine = data.batch(list(range(6)))
    with torch.no_grad():
        from pellucid.train.forward import predict
        from pellucid.train.losses import response_log_probs

        said = response_log_probs(predict(reference, mine).logits, mine.targets, mine.loss_mask)
    policy.zero_grad()
    ours = Dpo(options)(policy, ComparedBatch(mine, said))
    (ours.sum / 6).backward()
    assert ours.sum.item() / 6 == pytest.approx(theirs.item(), rel=1e-4)
    assert abs(ours.sum.item() / 6 - (1 / 0.6) ** 2) > 1e-3
    for key, grad, their_grad in gradients(policy, their_policy):
        assert grad.norm() > 0, key
        torch.testing.assert_close(grad, their_grad, rtol=2e-3, atol=1e-5 * float(grad.abs().max()) + 1e-7)


def test_sft(models, tmp_path):
    from datasets import Dataset

    (model, _), (their_model, _), tokenizer = models
    data = conversations(6, vocab_size=model.config.vocab_size)
    rows = [
        {"input_ids": r.parts[0].ids.tolist(), "labels": np.where(r.parts[0].learnt, r.parts[0].ids, -100).tolist()}
        for r in data.split.records
    ]
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, fp16=False, report_to="none", max_length=None,
        gradient_checkpointing=False, remove_unused_columns=False,
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        model=their_model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )
    batch = trainer.data_collator(rows)
    their_model.zero_grad()
    theirs = trainer.compute_loss(trainer.model, batch)
    theirs.backward()
    model.zero_grad()
    strategy, mine = Sft(SftOptions()), data.batch(list(range(len(data))))
    ours, weight = strategy(model, mine), strategy.weight(mine)
    (ours.sum / weight).backward()
    assert ours.sum.item() / weight == pytest.approx(theirs.item(), rel=1e-4)
    for key, grad, their_grad in gradients(model, their_model):
        assert grad.norm() > 0, key
        torch.testing.assert_close(grad, their_grad, rtol=2e-3, atol=1e-5 * float(grad.abs().max()) + 1e-7)
