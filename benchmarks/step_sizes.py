"""What each preset does to steps: their size, what waits, and how even their share of long documents is.

    .venv/bin/python benchmarks/step_sizes.py [--job 7b-128k] [--micro-batches N] [--steps 400] [--lengths LENGTHS]
                                              [--out FILE.json]

Plans of the trainer's own planner, without a GPU; simulated is only the price by which they are packed. Rows are the
presets, then ``best`` with other settings. Tokens are in global batches. A document is long from half a window on.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parts.measurement import versions
from wlb.documents.lengths import read_lengths
from wlb.job.config import PRESETS
from wlb.job.planner import StepPlanner
from wlb.simulate.decide import decide
from wlb.simulate.job import NAMED_JOBS, named_job

_BEST: tuple[dict[str, Any], ...] = (
    {"token_spread": 0.5},
    {"token_spread": 0.25},
    {"token_spread": 0.1},
    {"max_delay": 0},
    {"max_length_factor": 1.0},
    {"max_length_factor": 1.25},
    {"max_length_factor": 2.0},
)
_COLUMNS = ("least tokens", "most tokens", "CV", "token delay", "imbalance", "long share", "its CV", "in cut documents")


@dataclass(frozen=True)
class Steps:
    """Of some steps: tokens over a global batch, mean delay in steps, and where tokens come from."""

    system: str
    least: float
    most: float
    cv: float
    token_delay: float
    imbalance: float
    long_share: float  # of all tokens, those in long documents
    long_share_cv: float  # of that share, step by step
    cut_share: float  # of all tokens, those in documents that packing has cut


def steps_of(preset: str, packing: dict[str, Any], options: argparse.Namespace, lengths: NDArray[np.int64]) -> Steps:
    job = named_job(options.job, preset, packing=packing, micro_batches=options.micro_batches)
    job = decide(job, lengths)
    plans = [*islice(StepPlanner(job, lengths).plans(), options.steps)]
    tokens = np.array([plan.tokens for plan in plans])
    whole = np.minimum(lengths, job.context_window)
    longs, cuts = [], 0
    for plan in plans:
        document, start, length = plan.table.T
        of_document = whole[document % len(lengths)]
        longs.append(length[of_document >= job.context_window // 2].sum())
        cuts += int(length[(start % job.context_window > 0) | (length < of_document)].sum())
    shares = np.array(longs) / tokens
    batches = tokens / (job.global_batch * job.context_window)
    return Steps(
        system=", ".join([preset, *(f"{name} {value:g}" for name, value in packing.items())]),
        least=float(batches.min()),
        most=float(batches.max()),
        cv=float(batches.std() / batches.mean()),
        token_delay=sum(plan.delay_token_steps for plan in plans) / int(tokens.sum()),
        imbalance=float(np.mean([plan.imbalance for plan in plans])),
        long_share=float(np.sum(longs) / tokens.sum()),
        long_share_cv=float(shares.std() / shares.mean()) if shares.any() else 0.0,
        cut_share=cuts / int(tokens.sum()),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--job", choices=NAMED_JOBS, default="7b-128k")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--micro-batches", type=int, help="of each data-parallel rank; default: the job's")
    parser.add_argument("--lengths", help="as for wlb compare; default: 100,000 synthetic ones of the job's window")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    window = NAMED_JOBS[options.job].context_window
    lengths = read_lengths(options.lengths or f"synthetic:100000:{window}:0")
    systems: list[tuple[str, dict[str, Any]]] = [(preset, {}) for preset in PRESETS]
    systems += [("best", settings) for settings in _BEST]
    print("| system |", " | ".join(_COLUMNS), "|")
    print("| --- |", " | ".join("---:" for _ in _COLUMNS), "|")
    rows = []
    for preset, packing in systems:
        row = steps_of(preset, packing, options, lengths)
        system, *numbers = asdict(row).values()
        print(f"| {system} |", " | ".join(f"{number:.2f}" for number in numbers), "|", flush=True)
        rows.append(row)
    if options.out is not None:
        result = {"versions": versions(), "job": options.job, "steps": [asdict(row) for row in rows]}
        options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
