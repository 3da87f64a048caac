"""How much of communication does backward hide? On a link of 1 Gbit/s and 0.2 ms, imitated on this machine.

    python bench/overlap.py

`configs/small.toml` on 2 ranks with 4 micro-batches of 2 rows each, as a user would run it: prepare, train, and what
`pellucid trace` says of a typical step. Asked: at most 30 % of ddp's communication is exposed.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from machine import machine_line

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "small.toml"
LINK = "1Gbit/s,0.2ms"
BUCKETS_MB = (25, 2)


def pellucid(*words: str) -> str:
    """A command's stdout."""
    command = [sys.executable, "-m", "pellucid", *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    print(machine_line(1))
    print(f"\n`small`, 2 ranks, 4 micro-batches of 2 x 256 tokens a rank, link {LINK}\n")
    print("| mode, buckets | step, s | communication, s | exposed, s | exposed share | bytes as planned |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        data = f"{folder}/data"
        pellucid("prepare", "sample:stories", "--size", "1MB", "--vocab-size", "1024", "--out", data, "--quiet")
        for mode in ("ddp", "zero1"):
            for size in BUCKETS_MB:
                run = f"{folder}/{mode}-{size}"
                pellucid(
                    "train", str(CONFIG), "--data.path", data, "--out", run, "--nproc", "2", "--quiet",
                    f"--parallel.mode={mode}", f"--parallel.bucket_size_mb={size}", f"--parallel.emulate={LINK}",
                    "--model.vocab_size=8192", "--train.micro_batch=2", "--train.steps=6", "--train.val_every=0",
                )  # fmt: skip
                seen = json.loads(pellucid("trace", run, "--json"))
                worst = max(seen["ranks"], key=lambda rank: rank["exposed_share"])
                print(
                    f"| {mode}, {size} MiB | {worst['step_s']:.2f} | {worst['communication_s']:.3f} "
                    f"| {worst['exposed_s']:.3f} | {worst['exposed_share']:.0%} | {seen['bytes_match']} |"
                )


if __name__ == "__main__":
    main()
