"""Train several jobs in turns, a step each, in the same processes: a fair comparison on a machine that others use too.

    torchrun --standalone --nproc-per-node 2 examples/side_by_side.py \\
        --job configs/tiny_plain-4d.toml training.steps=8 --job configs/tiny.toml training.steps=8

Every ``--job`` is a configuration and the settings to override in it; all jobs have as many processes. Each writes its
own ``steps.jsonl``. Rank 0 prints a line for every round of steps: of each job the step's seconds and tokens/s, and its
speed in tokens/s over the first job, over all rounds but the first.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import torch.distributed as dist

from wlb.errors import UserError
from wlb.job.config import JobConfig
from wlb.job.config_file import load_config
from wlb.training.preflight import check_job
from wlb.training.runtime.environment import joined_job
from wlb.training.trainer import Trainer

_WIDTH = 29  # of what is printed of a job


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", nargs="+", action="append", required=True, metavar="CONFIG [section.key=value]")
    jobs = parser.parse_args().job
    try:
        configs = [load_config(Path(config), overrides) for config, *overrides in jobs]
    except UserError as error:
        parser.error(str(error))
    with joined_job(configs[0]) as device:
        processes = int(os.environ["LOCAL_WORLD_SIZE"])
        trainers = [Trainer(check_job(config, processes), device) for config in configs]
        progress = Progress(configs) if dist.get_rank() == 0 else None
        for _ in zip_longest(*(trainer.steps() for trainer in trainers)):
            if progress is not None:
                progress.show()


class Progress:
    """Prints a line for each round, under a heading that names the presets."""

    def __init__(self, configs: Sequence[JobConfig]) -> None:
        self._files = [config.metrics.dir / "steps.jsonl" for config in configs]
        self._tokens, self._seconds = [0] * len(configs), [0.0] * len(configs)
        self._round = 0
        print("step", *(f"{config.preset:<{_WIDTH}}" for config in configs), sep="  ", flush=True)

    def show(self) -> None:
        self._round += 1
        cells = []
        for number, file in enumerate(self._files):
            rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
            if len(rows) < self._round:  # this job has ended
                cells.append("")
                continue
            row = rows[-1]
            if self._round > 1:  # the first step warms up
                self._tokens[number] += row["tokens"]
                self._seconds[number] += row["step_seconds"]
            cells.append(
                f"{row['step_seconds']:5.2f} s {row['tokens_per_second']:7,.0f} tokens/s {self._speed(number)}"
            )
        print(f"{self._round:4}", *(f"{cell:<{_WIDTH}}" for cell in cells), sep="  ", flush=True)

    def _speed(self, number: int) -> str:
        """In tokens/s over the first job, so far."""
        if not self._seconds[number]:
            return ""
        return f"{self._tokens[number] / self._seconds[number] / (self._tokens[0] / self._seconds[0]):.2f}x"


if __name__ == "__main__":
    main()
