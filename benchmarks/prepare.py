"""How fast a Ray cluster prepares documents, beside worker processes of one command and beside shards.

    .venv/bin/python -m benchmarks.prepare [--workers 4] [--copies 2] [--turns 5] [--out FILE.json]

Measured on this machine: seconds until the store of the standard library's documents is there (``--copies`` times, as
JSON Lines, with a BPE of 1,024 tokens trained on them). The Ray cluster has as many cores as the others have processes
and is running beforehand, as clusters are; starting it is shown apart. Shards are processes that start at the same
time. All stores must have equal tokens. Methods take turns; speed is the median time of ``--workers`` over a method's.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.parts.measurement import command, facts, in_turns, make_parser, show, write
from wlb.documents.prepare import prepare_shards, prepare_store, train_tokenizer
from wlb.documents.prepare.sources import FileCorpus, StdlibCorpus
from wlb.documents.prepare.tokenization import HuggingFaceTokenizer
from wlb.documents.store.files import store_prefixes
from wlb.errors import UserError, require

_COLUMNS = {"method": "{method}", "seconds": "{seconds:.2f}", "MB/s": "{rate:.2f}", "speed": "{speed:.2f}"}


def methods(
    directory: Path, corpus: FileCorpus, tokenizer: HuggingFaceTokenizer, source: Path, workers: int
) -> dict[str, Callable[[Path], None]]:
    """What makes a store at a prefix, by name."""
    saved = directory / "tokenizer.json"
    saved.write_text(tokenizer.definition, encoding="utf-8")

    def by_workers(prefix: Path) -> None:
        prepare_store(corpus, prefix, tokenizer, workers=workers)

    def on_ray(prefix: Path) -> None:
        prepare_shards(corpus, prefix, tokenizer, ray="auto", shards=workers)

    def by_shards(prefix: Path) -> None:
        wlb = [sys.executable, "-m", "wlb", "prepare", str(source), "--tokenizer", str(saved), "--workers", "1"]
        shards = [
            subprocess.Popen([*wlb, "--out", str(prefix), "--shard", f"{i}/{workers}"], stdout=subprocess.DEVNULL)
            for i in range(1, workers + 1)
        ]
        statuses = [shard.wait() for shard in shards]
        if any(statuses):
            raise UserError("a shard failed")

    return {f"--workers {workers}": by_workers, f"{workers} workers on Ray": on_ray, f"{workers} shards": by_shards}


def seconds_of(make: Callable[[Path], None], directory: Path) -> tuple[float, str]:
    """Seconds to make a store, of one shard or many, and the sha256 of its tokens."""
    with tempfile.TemporaryDirectory(dir=directory) as place:
        prefix, began = Path(place, "store"), time.perf_counter()
        make(prefix)
        seconds = time.perf_counter() - began
        content = b"".join(Path(f"{shard}.bin").read_bytes() for shard in store_prefixes(place))
    return seconds, hashlib.sha256(content).hexdigest()


def measured(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    texts = [text for batch in StdlibCorpus().batches() for text in batch]
    source = directory / "documents.jsonl"
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    source.write_text(lines * options.copies, encoding="utf-8")
    tokenizer = train_tokenizer(StdlibCorpus(), 1024)
    corpus = FileCorpus([source])
    made = methods(directory, corpus, tokenizer, source, options.workers)
    results = in_turns({name: partial(seconds_of, make, directory) for name, make in made.items()}, options.turns)
    if len(digests := {digest for turns in results.values() for _, digest in turns}) != 1:
        raise UserError(f"stores differ: {digests}")
    medians = {name: statistics.median(seconds for seconds, _ in turns) for name, turns in results.items()}
    first = next(iter(medians.values()))
    rows = [
        {
            "method": name,
            "seconds": median,
            "rate": corpus.total_bytes / 1e6 / median,
            "speed": first / median,
            "turns": [seconds for seconds, _ in results[name]],
        }
        for name, median in medians.items()
    ]
    return {"megabytes": corpus.total_bytes / 1e6, "sha256": digests.pop(), "methods": rows}


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and write it as JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--copies", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    ray = require("ray", "ray")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init("local", num_cpus=options.workers, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    with tempfile.TemporaryDirectory() as directory:
        starting = time.perf_counter() - began
        results = facts("ray", "tokenizers") | {"cluster_start_seconds": starting, "workers": options.workers}
        results |= measured(options, Path(directory))
    ray.shutdown()
    show(
        f"{results['megabytes']:.0f} MB prepared; the cluster had started in {starting:.1f} s",
        results["methods"],
        _COLUMNS,
    )
    write(results, options.out)


if __name__ == "__main__":
    sys.exit(main())
