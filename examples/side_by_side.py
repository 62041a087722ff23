"""Train several jobs in turns, a step each, in the same processes: a fair comparison on a machine that others use too.

    torchrun --standalone --nproc-per-node 2 examples/side_by_side.py \\
        --job configs/tiny_plain-4d.toml training.steps=8 --job configs/tiny.toml training.steps=8

Every ``--job`` is a configuration and the settings to override in it; all jobs have as many processes. Each writes its
own ``steps.jsonl``.
"""

from __future__ import annotations

import argparse
import os
from itertools import zip_longest
from pathlib import Path

from wlb.config_file import load_config
from wlb.training.memory_budget import with_agreed_factor
from wlb.training.preflight import check_job
from wlb.training.runtime.environment import joined_job
from wlb.training.trainer import Trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", nargs="+", action="append", required=True, metavar="CONFIG [section.key=value]")
    configs = [load_config(Path(config), overrides) for config, *overrides in parser.parse_args().job]
    with joined_job(configs[0]) as device:
        processes = int(os.environ["LOCAL_WORLD_SIZE"])
        trainers = [Trainer(with_agreed_factor(check_job(config, processes).config), device) for config in configs]
        for _ in zip_longest(*(trainer.steps() for trainer in trainers)):
            pass


if __name__ == "__main__":
    main()
