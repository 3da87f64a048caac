"""The settings of a server: what TOML and flags make of each other, and what cannot be."""

import dataclasses
import re
from pathlib import Path

import pytest

from pellucid.config import field_docs
from pellucid.errors import ConfigError
from pellucid.serve_config import ServeConfig, is_loopback, load_serve_config


def test_flags_win_over_the_file_and_tables_of_models_are_merged(tmp_path):
    file = tmp_path / "serve.toml"
    file.write_text('port = 9000\nmax_queue = 3\nallowed_hosts = ["a.b"]\n[models]\nother = "x"\nthird = "y"\n')
    config = load_serve_config(file, {"port": 9001, "models": {"other": "z"}})
    assert (config.port, config.max_queue, config.allowed_hosts) == (9001, 3, ("a.b",))
    assert config.models == {"other": "z", "third": "y"} and config.host == "127.0.0.1"
    assert load_serve_config(None, {}) == ServeConfig()


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("max_que = 3", "unknown key max_que; did you mean max_queue"),
        ('port = "x"', "port must be a whole number"),
        ("port = 70000", "port must be in"),
        ("kv_gb = 0", "kv_gb must be positive"),
        ("max_running = 0", "max_running must be at least 1"),
        ("max_queue = -1", "max_queue must not be negative"),
        ("drain_seconds = inf", "drain_seconds must be at most 1,000,000, got inf"),
        ("drain_seconds = 1e300", "drain_seconds must be at most 1,000,000, got 1e\\+300"),
        ("request_timeout_s = 1e300", "request_timeout_s must be at most 1,000,000"),
        ("request_timeout_s = nan", "request_timeout_s must be positive"),
        ('weights = "int2"', "weights must be one of"),
        ('[models]\na = ""', "models.a must be a folder"),
        ("[models]\na = 3", "models.a must be a folder"),
        ('cors_origins = ["chat.example"]', "is no origin"),
        ('cors_origins = ["https://chat.example/"]', "is no origin"),
        ("port =", "is not TOML"),
    ],
)
def test_what_cannot_be_is_refused_by_name(tmp_path, text, match):
    file = tmp_path / "serve.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=match):
        load_serve_config(file, {})


def test_a_missing_file_is_told():
    with pytest.raises(ConfigError, match="no such configuration file"):
        load_serve_config("/nowhere.toml", {})


def test_only_this_machines_addresses_are_loopback():
    for host in ("127.0.0.1", "127.255.0.9", "::1", "[::1]", "localhost", "LOCALHOST", "localhost."):
        assert is_loopback(host), host
    for host in ("0.0.0.0", "::", "10.0.0.1", "localhost.evil", "evil", "", "127.0.0.1.evil", "1270.0.0.1"):
        assert not is_loopback(host), host


def test_the_document_has_every_setting_with_its_default_and_what_it_does():
    text = (Path(__file__).resolve().parents[1] / "docs" / "serving.md").read_text().partition("## Settings")[2]
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+) \|$", text, re.MULTILINE)
    docs, config = field_docs(ServeConfig), ServeConfig()
    defaults = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    assert rows == [
        (name, repr(list(value) if isinstance(value, tuple) else value), " ".join(docs[name].split()))
        for name, value in defaults.items()
    ]
