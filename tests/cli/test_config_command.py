"""`pellucid config` prints TOML that reads back as what it says."""

from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from pellucid.cli import main
from pellucid.config import RunConfig, field_docs, load_config


def test_every_default_is_printed_with_its_meaning_and_reads_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config"]) == 0
    out = capsys.readouterr().out
    file = tmp_path / "defaults.toml"
    file.write_text(out, encoding="utf-8")
    assert load_config(file) == load_config(None)
    for table in fields(RunConfig):
        default = getattr(RunConfig(), table.name)
        for setting in fields(default) if is_dataclass(default) else ():
            if setting.name not in ("options", "schedule", "modes"):
                assert f"\n{setting.name} = " in out
                assert field_docs(type(default))[setting.name].splitlines()[0] in out


def test_a_file_is_printed_completed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, resolved = tmp_path / "mine.toml", tmp_path / "resolved.toml"
    file.write_text('[model]\npreset = "tiny"\n[optim]\nlr = 0.01\n')
    assert main(["config", str(file), "--train.steps", "7"]) == 0
    resolved.write_text(capsys.readouterr().out)
    config = load_config(resolved)
    assert config == load_config(file, {"train.steps": 7})
    assert (config.model.hidden_size, config.optim.lr, config.train.steps) == (128, 0.01, 7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[optim]\nwarmup_step = 3\n", "did you mean optim.warmup_steps?"),
        ("[optim\n", "is not TOML"),
        (None, "no such"),
    ],
)
def test_a_bad_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, message: str
) -> None:
    file = tmp_path / "mine.toml"
    if text is not None:
        file.write_text(text)
    assert main(["config", str(file)]) == 2
    assert message in capsys.readouterr().err
