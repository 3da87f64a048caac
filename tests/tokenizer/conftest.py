"""Our own tokenizer and folders of foreign ones."""

from pathlib import Path

import pytest
from tokenizer_kinds import FOREIGN, FOREIGN_CONFIG, TEXT, write
from tokenizers import Tokenizer as HF

from pellucid.tokenizer import Tokenizer, train_bpe


@pytest.fixture(scope="session")
def own() -> Tokenizer:
    return train_bpe([TEXT] * 4, 480)


@pytest.fixture(scope="session")
def reference(own: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> HF:
    """The same tokenizer in `tokenizers` alone."""
    folder = tmp_path_factory.mktemp("reference")
    own.save(folder)
    hf = HF.from_file(str(folder / "tokenizer.json"))
    hf.encode_special_tokens = True
    return hf


@pytest.fixture(scope="session")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each foreign kind."""
    root = tmp_path_factory.mktemp("foreign")
    return {name: write(root / name, make(), **FOREIGN_CONFIG[name]) for name, make in FOREIGN.items()}
