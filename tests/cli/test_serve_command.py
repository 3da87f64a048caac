"""`pellucid serve` up to where it listens: flags, keys, and what is loaded under which name."""

import pytest
import torch
from small_models import make_folder, make_tokenizer

from pellucid.checkpoint.adapter import save_adapter
from pellucid.checkpoint.encoder_folder import save_encoder
from pellucid.checkpoint.model_folder import load_model
from pellucid.cli import build_parser, main
from pellucid.cli.serve import given_settings, make_service
from pellucid.config import LoraConfig, ModelConfig
from pellucid.errors import CheckpointError, ConfigError, PellucidError
from pellucid.inference import SamplingParams
from pellucid.model import EmbedConfig, Encoder
from pellucid.model.lora import add_lora
from pellucid.serve_config import ServeConfig
from pellucid.server.auth import KEY_VARIABLE, Keys


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="module")
def adapter(folder, tmp_path_factory):
    """On that model, with weights that change its answers."""
    model = load_model(folder).model
    add_lora(model, LoraConfig(r=4, targets=("q_proj", "down_proj")))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5, generator=generator)
    path = tmp_path_factory.mktemp("models") / "adapter"
    save_adapter(path, model, base="/gone/with/the/wind")
    return path


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    config = ModelConfig(
        vocab_size=make_tokenizer().vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, max_position_embeddings=64,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("models") / "encoder"
    save_encoder(path, Encoder(config, EmbedConfig()), make_tokenizer())
    return path


def service(path, **settings):
    return make_service(str(path), ServeConfig(**{"kv_gb": 0.001, **settings}), Keys([]))


def answer(served):
    (result,) = served.front.engine.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=12))
    return result.ids


def test_flags_become_settings_and_nothing_else_is_given():
    parse = build_parser().parse_args
    assert given_settings(parse(["serve", "m"])) == {}
    words = (
        "serve m --host ::1 --port 0 --name n --model a=b --model c=d=e --adapter x=y --embedder v=w --any-model --fast "
        "--api-key-file k --allow-anonymous --cors-origin https://a --cors-origin https://b --allow-host h --max-queue 1 "
        "--max-body-mb 2 --request-timeout 3 --drain-seconds 4 --log-prompts --kv-gb 5 --page-size 6 --max-running 7 "
        "--token-budget 8 --threads 9 --speculate 10 --weights int8 --dtype float32 --device cpu"
    )
    given = given_settings(parse(words.split()))
    assert given == {
        "host": "::1", "port": 0, "name": "n", "models": {"a": "b", "c": "d=e"}, "adapters": {"x": "y"},
        "embedders": {"v": "w"}, "any_model": True, "fast": True, "api_key_file": "k", "allow_anonymous": True,
        "cors_origins": ["https://a", "https://b"], "allowed_hosts": ["h"], "max_queue": 1, "max_body_mb": 2.0,
        "request_timeout_s": 3.0, "drain_seconds": 4.0, "log_prompts": True, "kv_gb": 5.0, "page_size": 6,
        "max_running": 7, "token_budget": 8, "threads": 9, "speculate": 10, "weights": "int8", "dtype": "float32",
        "device": "cpu",
    }  # fmt: skip


def test_what_is_served_keeps_its_names(folder, encoder):
    found = service(folder, models={"org/second": str(folder)}, embedders={"vectors": str(encoder)})
    assert list(found.models) == ["small", "org/second"] and list(found.embedders) == ["vectors"]
    assert found.models["small"].front.engine is not found.models["org/second"].front.engine
    assert service(folder, name="chatty").model("default").name == "chatty"


def test_an_adapter_answers_as_its_model_with_it_and_the_base_as_without(folder, adapter):
    found = service(folder, adapters={"tuned": str(adapter)})
    expected = load_model(adapter, base=folder).model
    plain, tuned = answer(found.models["small"]), answer(found.models["tuned"])
    tokens = [5, 6, 7]
    for _ in range(12):
        tokens.append(int(expected(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert tuned == tokens[3:] and plain != tuned
    assert plain == answer(service(folder).models["small"])
    assert found.models["small"].fingerprint != found.models["tuned"].fingerprint


def test_an_adapter_can_be_quantised_with_its_base(folder, adapter):
    found = service(folder, adapters={"tuned": str(adapter)}, weights="int8")
    layers = {type(m).__name__ for m in found.models["tuned"].front.engine.model.modules()}
    assert "Int8Linear" in layers and "LoraLinear" not in layers


def test_an_encoder_alone_only_embeds(encoder):
    found = service(encoder)
    assert list(found.models) == [] and found.embedder("default").name == "encoder"


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"models": {"small": "FOLDER"}}, ConfigError, "'small' is the name of two models"),
        ({"name": "default"}, ConfigError, "'default' is what MODEL is called besides"),
        ({"adapters": {"a": "FOLDER"}}, ConfigError, "has no adapter"),
        ({"models": {"a": "/nowhere"}}, CheckpointError, "no such model"),
        ({"embedders": {"a": "FOLDER"}}, ConfigError, "is no encoder"),
        ({"kv_gb": 1e-9}, ConfigError, "no room"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(folder, settings, error, match):
    filled = {
        key: {name: str(folder) if path == "FOLDER" else path for name, path in value.items()} if isinstance(value, dict) else value
        for key, value in settings.items()
    }  # fmt: skip
    with pytest.raises(error, match=match):
        service(folder, **filled)


def test_a_model_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(PellucidError, match=r"tokenizer\.json"):
        service(make_folder(tmp_path / "bare", tokenizer=False))


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ("--model nameless", "is not NAME=PATH"),
        ("--model a=b --model a=c", "given twice"),
        ("--host 0.0.0.0", "--allow-anonymous"),
        ("--host no.such.host.invalid --allow-anonymous", "is no address"),
        ("--port 70000", "port must be in"),
        ("--config /nowhere.toml", "no such configuration file"),
    ],
)
def test_usage_errors_end_with_2_before_anything_is_loaded(monkeypatch, capsys, words, match):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert main(["serve", "/no/such/model", *words.split()]) == 2
    assert match in capsys.readouterr().err
