"""What tests of GRPO learn from."""

import pytest
from grpo_runs import REWARDS, prepare_sums


@pytest.fixture(scope="session")
def rewards(tmp_path_factory):
    """The module grpo_rewards can be imported, here and by reward workers."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "grpo_rewards.py").write_text(REWARDS)
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(folder))
    yield
    patch.undo()


@pytest.fixture(scope="session")
def prompts(tmp_path_factory, rewards):
    """60 sums with a byte-level vocabulary, prepared. Tests must not change them."""
    return prepare_sums(tmp_path_factory.mktemp("prompts"))
