"""One thread a process, so that forked children compute what their parent would, and no hub is ever asked."""

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parent))

import torch

torch.set_num_threads(1)

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

settings.register_profile("pellucid", deadline=None)  # a busy machine is no fault of the code
settings.load_profile("pellucid")


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels():
    """Before a test's forked ranks would do it within their time limits."""
    from pellucid import kernels

    kernels.available()


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory):
    """300 kB of generated stories with a vocabulary of 400, prepared. Tests must not change it."""
    from pellucid.data.prepare import PrepareOptions, prepare

    out = tmp_path_factory.mktemp("data") / "stories"
    prepare(
        PrepareOptions(inputs=("sample:stories",), out=out, vocab_size=400, size="300kB", workers=1, val_fraction=0.05)
    )
    return out
