"""How much faster than `tokenizers` alone do we encode text in batches, at the same number of threads?

    python bench/encode.py [--mb 3] [--vocab-size 8192] [--rounds 5]

Trains our tokenizer on the running Python's standard library, encodes it in documents of about 2 kB with
`tokenizers` (both of its batch calls) and with Pellucid in turn, checks that the ids are equal, and prints MB/s and
ratios of medians. Threads: 1 against RAYON_NUM_THREADS=1, 2 against 2, each in a process of its own.
"""

import argparse
import os
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path


def documents(megabytes: float, size: int = 2000) -> list[str]:
    found: list[str] = []
    left = int(megabytes * 1e6)
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = file.read_text(encoding="utf-8", errors="replace")[:left]
        left -= len(text)
        found += [text[i : i + size] for i in range(0, len(text), size)]
    return found


def measure(threads: int, megabytes: float, vocab_size: int, rounds: int) -> None:
    import tempfile

    import tokenizers

    from pellucid.tokenizer import train_bpe

    texts = documents(megabytes)
    bytes_of_text = sum(len(text.encode()) for text in texts)
    ours = train_bpe(texts, vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        ours.save(folder)
        theirs = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
    theirs.encode_special_tokens = True
    contestants: dict[str, Callable[[], list[list[int]]]] = {
        "tokenizers encode_batch": lambda: [e.ids for e in theirs.encode_batch(texts, add_special_tokens=False)],
        "tokenizers encode_batch_fast": lambda: [
            e.ids for e in theirs.encode_batch_fast(texts, add_special_tokens=False)
        ],
        "pellucid encode_batch": lambda: ours.encode_batch(texts, num_threads=threads),
    }
    speeds: dict[str, list[float]] = {name: [] for name in contestants}
    for round_ in range(rounds + 1):
        results = []
        for name, encode in contestants.items():
            start = time.perf_counter()
            results.append(encode())
            if round_ > 0:  # the first warms caches
                speeds[name].append(bytes_of_text / 1e6 / (time.perf_counter() - start))
        assert results[0] == results[1] == results[2], "the ids differ"
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    best = max(value for name, value in medians.items() if name.startswith("tokenizers"))
    print(
        f"{threads} thread(s), {bytes_of_text / 1e6:.1f} MB, vocabulary {ours.vocab_size}, equal ids, median of {rounds} rounds"
    )
    for name, value in medians.items():
        print(f"  {name:30} {value:6.2f} MB/s  ({min(speeds[name]):.2f} to {max(speeds[name]):.2f})")
    pellucid = medians["pellucid encode_batch"]
    print(
        f"  ratio {pellucid / medians['tokenizers encode_batch']:.2f}; to the faster of its two calls {pellucid / best:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=3.0, help="megabytes of text")
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help=argparse.SUPPRESS)  # how a process of its own is told
    options = parser.parse_args()
    if options.threads:
        return measure(options.threads, options.mb, options.vocab_size, options.rounds)
    for threads in (1, 2):
        environment = {"RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "true" if threads > 1 else "false"}
        subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--threads", str(threads)],
            check=True,
            env=os.environ | environment,
        )
    return None


if __name__ == "__main__":
    main()
