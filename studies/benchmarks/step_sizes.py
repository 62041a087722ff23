"""What each preset does to steps: their size, what waits, and how even their share of long documents is.

    .venv/bin/python -m studies.benchmarks.step_sizes [--job NAME] [--steps N] [--lengths LENGTHS] [--out FILE]

Plans of the trainer's own planner, without a GPU; simulated is only the price by which they are packed. Tokens are in
global batches. A document is long from half a window on.
"""

import argparse
import sys
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.parts.measurement import command, facts, make_parser, show, write
from wlb.documents.lengths import read_lengths
from wlb.job.config import PRESETS
from wlb.job.planner import StepPlanner
from wlb.simulate.decide import decide
from wlb_studies.paper.jobs import ALL_JOBS

Row = dict[str, Any]
_COLUMNS = {
    "system": "{system}",
    "least tokens": "{least:.2f}",
    "most tokens": "{most:.2f}",
    "CV": "{cv:.2f}",
    "token delay": "{token_delay:.2f}",
    "imbalance": "{imbalance:.2f}",
    "long share": "{long_share:.2f}",
    "its CV": "{long_share_cv:.2f}",
    "in cut documents": "{cut_share:.2f}",
}


def steps_of(preset: str, options: argparse.Namespace, lengths: NDArray[np.int64]) -> Row:
    """Of some steps: tokens over a global batch, mean delay in steps, and shares of tokens by where they come from."""
    job = decide(ALL_JOBS[options.job].under(preset, micro_batches=options.micro_batches), lengths)
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
    return {
        "system": preset,
        "least": float(batches.min()),
        "most": float(batches.max()),
        "cv": float(batches.std() / batches.mean()),
        "token_delay": sum(plan.delay_token_steps for plan in plans) / int(tokens.sum()),
        "imbalance": float(np.mean([plan.imbalance for plan in plans])),
        "long_share": float(np.sum(longs) / tokens.sum()),  # in long documents
        "long_share_cv": float(shares.std() / shares.mean()) if shares.any() else 0.0,  # of that share, step by step
        "cut_share": cuts / int(tokens.sum()),  # in documents that packing has cut
    }


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and write it as JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--job", choices=ALL_JOBS, default="7b-128k")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--micro-batches", type=int, help="of each data-parallel rank; default: the job's")
    parser.add_argument("--lengths", help="as for wlb check; default: 100,000 synthetic ones of the job's window")
    options = parser.parse_args(arguments)
    window = ALL_JOBS[options.job].context_window
    lengths = read_lengths(options.lengths or f"synthetic:100000:{window}:0")
    rows = [steps_of(preset, options, lengths) for preset in PRESETS]
    show(f"{options.steps} steps of {options.job}", rows, _COLUMNS)
    write(facts() | {"job": options.job, "rows": rows}, options.out)


if __name__ == "__main__":
    sys.exit(main())
