"""What it costs on this machine that ranks wait for each other, beside anything that the simulator knows.

    python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/parts/training/jitter.py --out FILE

Two processes multiply the same matrices, equally often, and meet in a collective of one number every so many
milliseconds. Cores that other programs interrupt are each slow at other moments, and at every meeting the slower one
counts. Writes how many times as long as without meetings that takes, by milliseconds between meetings (medians of
three turns).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

APART = (50, 25, 12)  # milliseconds
SECONDS, TURNS = 3.0, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    matrix = torch.randn(512, 512)
    seconds_each = torch.tensor(_seconds(matrix, 300, 0) / 300)
    dist.broadcast(seconds_each, 0)
    count = int(SECONDS / seconds_each)
    between = {apart: max(1, round(apart * 1e-3 / float(seconds_each))) for apart in APART}
    turns = [
        {apart: _seconds(matrix, count, every) for apart, every in ({0: 0} | between).items()} for _ in range(TURNS)
    ]
    if dist.get_rank() == 0:
        ratios = {apart: median(turn[apart] / turn[0] for turn in turns) for apart in APART}
        out.write_text(json.dumps(ratios) + "\n", encoding="utf-8")
    dist.destroy_process_group()


def _seconds(matrix: torch.Tensor, count: int, every: int) -> float:
    """Wall time of ``count`` products, until both processes have made theirs."""
    one = torch.zeros(1)
    dist.barrier()
    began = time.perf_counter()
    for n in range(1, count + 1):
        matrix @ matrix
        if every and n % every == 0:
            dist.all_reduce(one)
    dist.barrier()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
