"""One thread a process, so that forked children compute what their parent would, and no hub is ever asked."""

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parent))

import torch

torch.set_num_threads(1)
