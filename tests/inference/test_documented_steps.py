"""docs/engine.md walks two requests through the step log: it must be the log of those requests."""

import re
from pathlib import Path

import torch

from pellucid import Engine, ModelConfig, Request, SamplingParams, Transformer
from pellucid.cli.steps import step_line
from pellucid.inference.paged import bytes_per_token

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "engine.md"


def test_the_documented_step_log_is_what_the_engine_does() -> None:
    config = ModelConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=128,
    )  # fmt: skip
    model = Transformer(config, generator=torch.Generator().manual_seed(0)).eval()
    room = 5.01 * 8 * bytes_per_token(model.kv_specs(), torch.float32) / 1e9
    lines: list[str] = []
    engine = Engine(
        model, kv_gb=room, page_size=8, max_running=4, token_budget=16, on_step=lambda r: lines.append(step_line(r))
    )
    prompt = range(1, 21)
    engine.submit(Request("a", tuple(prompt), SamplingParams(temperature=0, max_tokens=6)))
    engine.step()
    engine.submit(Request("b", (*prompt[:16], 30, 31, 32), SamplingParams(seed=1, max_tokens=14, n=2)))
    while engine.has_work:
        engine.step()
    found = re.search(r"<!-- steps -->\n```text\n(.*?)\n```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    expected = found.group(1).split("\n")
    assert [re.sub(r" \| [\d.]+ ms$", "", line) for line in lines] == [
        re.sub(r" \| [\d.]+ ms$", "", line) for line in expected
    ]
    assert any("pre-empted" in line for line in lines) and any("evicted" in line for line in lines)
