"""The main job on real input: measure what balancing micro-batches gains on this machine, and draw it.

1. Turn the standard library of this Python into a token store (``wlb prepare``).
2. Compare packing methods on its lengths (``wlb compare``, simulated).
3. Train the same documents with plain-4D and with WLB-LLM packing on two pipeline stages, a step of one and a step of
   the other in turn so that both see the same machine (``side_by_side.py``, measured).
4. Print both side by side and draw ``demo/demo.png``.

Everything is written below ``demo/``; a second run reuses the token store.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.table import Table

from wlb.config import JobConfig
from wlb.config_file import load_config
from wlb.documents.store.reader import TokenStore
from wlb.packing.pipeline_order import micro_batch_seconds
from wlb.packing.plan import StepPlan
from wlb.planning.job import JobSpec
from wlb.planning.planner import StepPlanner
from wlb.report.plots import BALANCED, BASELINE, pyplot_without_display, save
from wlb.simulate import pipeline_makespan

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY = 1024
PROCESSES = 2
CONFIGS = {"plain-4D": "configs/tiny_plain-4d.toml", "WLB-LLM": "configs/tiny.toml"}


@dataclass(frozen=True)
class Measured:
    """One job: what its steps measured, the first excluded, and the plans they ran.

    ``busy`` is the share of the processes' time that the model's work takes, by the workload model's seconds for
    that work; ``predicted_busy`` is what the pipeline simulation expects.
    """

    name: str
    step_seconds: list[float]
    tokens_per_second: float
    busy: float
    predicted_busy: float
    imbalance_degree: float
    plans: list[StepPlan]


def main() -> None:
    arguments = parse_arguments()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    store = out / "corpus"
    if not store.with_suffix(".idx").exists():
        wlb("prepare", "--stdlib", "--train-bpe", VOCABULARY, "--out", store)
    size = ["--context-window", 4096, "--micro-batches", arguments.micro_batches, "--pp", 2]
    wlb("compare", store, *size, "--model", "tiny", "--hardware", "cpu")

    print("\nplain-4D and WLB-LLM, a step of each in turn:", flush=True)
    jobs = {name: overrides(name, arguments, store) for name in CONFIGS}
    train_in_turns(jobs)
    results = [measure(name, load_config(ROOT / CONFIGS[name], settings)) for name, settings in jobs.items()]
    report(results, out / "demo.png")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("demo"), help="directory of everything that is written")
    parser.add_argument("--steps", type=int, default=9, help="optimizer steps of each job; the first is not counted")
    parser.add_argument("--micro-batches", type=int, default=16, help="micro-batches of a step")
    return parser.parse_args()


def wlb(*arguments: object) -> None:
    """Run the command line of this installation; its output is ours."""
    subprocess.run([sys.executable, "-m", "wlb", *map(str, arguments)], check=True)


def overrides(name: str, arguments: argparse.Namespace, store: Path) -> list[str]:
    """What the job called ``name`` changes in its configuration; it starts afresh and keeps no checkpoints."""
    directory: Path = arguments.out / name
    shutil.rmtree(directory, ignore_errors=True)
    return [
        f"data.store={store}",
        f"packing.micro_batches={arguments.micro_batches}",
        f"training.steps={arguments.steps}",
        f"checkpoint.dir={directory / 'checkpoints'}",
        f"checkpoint.every={10**6}",
        f"metrics.dir={directory}",
    ]


def train_in_turns(jobs: dict[str, list[str]]) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES)]
    words = [word for name, settings in jobs.items() for word in ("--job", str(ROOT / CONFIGS[name]), *settings)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*torchrun, str(ROOT / "examples" / "side_by_side.py"), *words], check=True, env=environment)


def measure(name: str, config: JobConfig) -> Measured:
    """Read the job's ``steps.jsonl`` and plan its steps once more to know the work they did."""
    lines = (config.metrics.dir / "steps.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    store = TokenStore.open(config.data.stores[0])
    job = JobSpec.from_config(config, "cpu", vocab_size=store.vocab_size)
    plans = [*islice(StepPlanner(job, store.lengths).plans(), len(rows))]  # from the configuration and lengths alone
    counted = range(1, len(rows))  # the first step warms up
    seconds = [rows[index]["step_seconds"] for index in counted]
    for index in counted:
        assert plans[index].tokens == rows[index]["tokens"], "the plan is the one that was trained"
    stages = config.parallel.pp
    work = [
        micro_batch_seconds(plans[index].ranks, job.workload)[:, 0] / stages for index in counted
    ]  # (phase, micro-batches)
    predicted = [pipeline_makespan("1f1b", [forward] * stages, [backward] * stages) for forward, backward in work]
    return Measured(
        name,
        seconds,
        tokens_per_second=sum(rows[index]["tokens"] for index in counted) / sum(seconds),
        busy=sum(float(w.sum()) for w in work) / sum(seconds),
        predicted_busy=sum(float(w.sum()) for w in work) / sum(predicted),
        imbalance_degree=statistics.mean(rows[index]["imbalance_degree"] for index in counted),
        plans=[plans[index] for index in counted],
    )


def report(results: Sequence[Measured], picture: Path) -> None:
    base = results[0]
    table = Table(title="measured on this machine: 2 processes, pp 2, hidden 128, window 4,096")
    table.add_column("")
    for heading in (
        "speed at\nequal work",
        "\npredicted",
        "imbalance\ndegree",
        "busy\nshare",
        "step\nseconds",
        "\ntokens/s",
        "speed in\ntokens/s",
    ):
        table.add_column(heading, justify="right")
    for result in results:
        table.add_row(
            result.name,
            f"{result.busy / base.busy:.2f}x",
            f"{result.predicted_busy / base.predicted_busy:.2f}x",
            f"{result.imbalance_degree:.3f}",
            f"{result.busy:.0%}",
            f"{statistics.median(result.step_seconds):.2f}",
            f"{result.tokens_per_second:,.0f}",
            f"{result.tokens_per_second / base.tokens_per_second:.2f}x",
        )
    console = Console(width=100)
    console.print(table)
    console.print(
        "step seconds are medians; tokens/s and busy share (predicted seconds of the work done over the processes' "
        "time) are over all steps. plain-4D cuts documents at the end of every micro-batch and so skips part of their "
        "attention: tokens/s compares the tokens read, the busy share the work done.",
        style="dim",
    )
    draw(results, picture)
    console.print(f"picture: {picture}")


def draw(jobs: Sequence[Measured], path: Path) -> None:
    """Micro-batch workloads of every step of each job, and the jobs' measured speed relative to the first."""
    figure, axes = pyplot_without_display().subplots(
        1, len(jobs) + 1, figsize=(13, 4), width_ratios=[*[1.0 for _ in jobs], 0.8], constrained_layout=True
    )
    colours = [BASELINE, BALANCED]
    tallest = 0.0
    for axis, job, colour in zip(axes, jobs, colours, strict=False):
        position = 0
        for plan in job.plans:
            workloads = [1e3 * micro_batch.workload for micro_batch in plan.micro_batches]
            mean = sum(workloads) / len(workloads)
            axis.bar(range(position, position + len(workloads)), workloads, width=1.0, color=colour)
            axis.hlines(mean, position - 0.5, position + len(workloads) - 0.5, color="black", linewidth=1)
            tallest = max(tallest, *workloads)
            position += len(workloads) + 2
        axis.set_title(f"{job.name}: predicted milliseconds of every micro-batch", fontsize=10)
        axis.set_xticks([])
        axis.set_xlabel("micro-batches, step by step (line: mean of the step)")
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[: len(jobs)]:
        axis.set_ylim(0, 1.05 * tallest)
    base = jobs[0]
    for offset, (job, colour) in enumerate(zip(jobs, colours, strict=False)):
        ratios = [job.busy / base.busy, job.tokens_per_second / base.tokens_per_second]
        places = [group + 0.4 * offset for group in range(len(ratios))]
        bars = axes[-1].bar(places, ratios, width=0.36, color=colour, label=job.name)
        axes[-1].bar_label(bars, [f"{ratio:.2f}x" for ratio in ratios], padding=2)
    axes[-1].set_xticks([0.2, 1.2], ["at equal work", "tokens/s"])
    axes[-1].set_title("measured speed over plain-4D", fontsize=10)
    axes[-1].margins(y=0.3)
    axes[-1].legend(frameon=False, loc="upper left", ncols=2)
    axes[-1].spines[["top", "right"]].set_visible(False)
    save(figure, path)


if __name__ == "__main__":
    main()
