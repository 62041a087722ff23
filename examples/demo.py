"""The main job on real input: what balancing gains on this machine, measured, and on a cluster, simulated.

1. Turn the standard library of this Python into a token store (``wlb prepare``), and cut its documents where context
   windows end, as the paper's data loader does: from here on every system trains the same segments.
2. Train them on two data-parallel processes under ``plain-4d`` and under ``elastic``, a step of each in turn, so that
   both see the same machine (``side_by_side.py``). A step of one trains the same segments as that step of the other,
   so speed at equal work and in tokens/s are one number.
3. Simulate a job on 256 GPUs, on documents that are cut in the same way.
4. Print both and draw ``demo/demo.png``.

Everything is written below ``demo/``; a second run reuses the token stores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from wlb.documents.filling import cut_at_windows
from wlb.documents.lengths import read_lengths
from wlb.documents.permutation import Permutation
from wlb.documents.segments import Segment
from wlb.documents.store.reader import TokenStore, TokenStoreWriter
from wlb.job.config_file import load_config
from wlb.job.planner import StepPlanner
from wlb.report.plots import BALANCED, BASELINE, pyplot_without_display, save
from wlb.simulate import SimulationResult, simulate, simulate_steps, simulated_job
from wlb.training.preflight import check_job

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "tiny_elastic.toml"
PRESETS = ("plain-4d", "elastic")
VOCABULARY = 1024
WINDOW = 4096

CLUSTER_MODEL, CLUSTER_WINDOW = "llama3-8b", 131_072
CLUSTER: dict[str, Any] = {
    "tp": 8,
    "pp": 4,
    "dp": 4,
    "cp": 2,
    "micro_batches": 4,
    "virtual_pp": 2,
    "schedule": "interleaved_1f1b",
}
CLUSTER_DOCUMENTS = f"synthetic:20000:{CLUSTER_WINDOW}:0"
CLUSTER_STEPS = 16
SYSTEMS = ("plain-4d", "fixed-4d", "wlb-llm", "best", "elastic")
OURS = ("best", "elastic")  # the others are the paper's

console = Console(width=80, highlight=False)


@dataclass(frozen=True)
class Measured:
    """A preset's steps, the first excluded; ``rank_seconds`` are predicted, of shape (steps, ranks)."""

    preset: str
    segments: list[list[Segment]]
    tokens: list[int]
    step_seconds: list[float]
    rank_seconds: NDArray[np.float64]

    @property
    def tokens_per_second(self) -> float:
        return sum(self.tokens) / sum(self.step_seconds)

    @property
    def imbalance(self) -> float:
        """The slowest rank over the mean one, mean over steps."""
        return float((self.rank_seconds.max(axis=1) / self.rank_seconds.mean(axis=1)).mean())


def main() -> None:
    arguments = parse_arguments()
    out: Path = arguments.out
    began = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    stage(1, "token store of the standard library of this Python")
    store = prepare(out)
    stage(2, f"{' and '.join(PRESETS)} on 2 processes, {arguments.steps} steps each, in turn")
    train_in_turns(out, store, arguments)
    measured = [measure(preset, out, store, arguments) for preset in PRESETS]
    assert measured[0].segments == measured[1].segments, "both trained the same segments in every step"
    stage(3, "a cluster, simulated")
    simulated = simulate_cluster()
    stage(4, "results")
    show_measured(measured, arguments)
    show_simulated(simulated)
    draw(measured, simulated, out / "demo.png")
    console.print(f"\npicture: {out / 'demo.png'} ({time.perf_counter() - began:.0f} s in all)")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("demo"), help="directory of everything that is written")
    parser.add_argument("--steps", type=int, default=17, help="optimizer steps of each preset; the first warms up")
    parser.add_argument("--micro-batches", type=int, default=4, help="context windows of a step")
    return parser.parse_args()


def stage(number: int, what: str) -> None:
    console.print(f"\n[bold]\\[{number}/4] {what}[/bold]")


def prepare(out: Path) -> Path:
    """The prefix of a store of segments, none of which crosses the end of a window of the stream."""
    corpus, segments = out / "corpus", out / "segments"
    if not corpus.with_suffix(".idx").exists():
        run("-m", "wlb", "prepare", "--stdlib", "--train-bpe", VOCABULARY, "--out", corpus)
    if not segments.with_suffix(".idx").exists():
        documents = TokenStore.open(corpus)
        order = Permutation(len(documents), 0).between(0, len(documents)).tolist()
        whole = (Segment(document, 0, int(documents.lengths[document])) for document in order)
        with TokenStoreWriter(segments, vocab_size=VOCABULARY) as writer:
            for piece in cut_at_windows(whole, WINDOW):
                writer.add(documents.read(*piece))
    return segments


def run(*words: object) -> None:
    subprocess.run([sys.executable, *map(str, words)], check=True)


def job_settings(preset: str, out: Path, store: Path, arguments: argparse.Namespace) -> list[str]:
    """What a preset's job changes in the configuration."""
    return [
        f"preset={preset}",
        f"data.store={store}",
        "data.shuffle=false",
        f"packing.micro_batches={arguments.micro_batches}",
        f"training.steps={arguments.steps}",
        f"checkpoint.dir={out / preset / 'checkpoints'}",
        f"checkpoint.every={10**6}",
        f"metrics.dir={out / preset}",
        "metrics.tensorboard=false",
    ]


def train_in_turns(out: Path, store: Path, arguments: argparse.Namespace) -> None:
    """Train every preset afresh, on one thread a process; what the trainers say goes to ``training.log``."""
    words: list[str] = []
    for preset in PRESETS:
        shutil.rmtree(out / preset, ignore_errors=True)
        words += ["--job", str(CONFIG), *job_settings(preset, out, store, arguments)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    log = out / "training.log"
    with log.open("w", encoding="utf-8") as errors:
        trained = subprocess.run(
            [*torchrun, str(ROOT / "examples" / "side_by_side.py"), *words],
            stderr=errors,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            check=False,
        )
    if trained.returncode:
        raise SystemExit(f"training failed; the end of {log}:\n{log.read_text(encoding='utf-8')[-3000:]}")


def measure(preset: str, out: Path, store: Path, arguments: argparse.Namespace) -> Measured:
    """Read the job's ``steps.jsonl``, and plan its steps once more for what each rank had to do."""
    lines = (out / preset / "steps.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines][1:]
    config = load_config(CONFIG, job_settings(preset, out, store, arguments))
    job = check_job(config, config.parallel.world_size).job
    plans = list(islice(StepPlanner(job, TokenStore.open(store).lengths).plans(), 1, 1 + len(rows)))
    assert [plan.tokens for plan in plans] == [row["tokens"] for row in rows], "the plans are those that were trained"
    return Measured(
        preset,
        segments=[sorted(plan.segments) for plan in plans],
        tokens=[row["tokens"] for row in rows],
        step_seconds=[row["step_seconds"] for row in rows],
        rank_seconds=simulate_steps(plans, job).gpu_seconds.reshape(len(plans), -1),
    )


def simulate_cluster() -> dict[str, SimulationResult]:
    """Every system on 256 GPUs, on synthetic documents that are cut where windows end."""
    whole = [Segment(n, 0, length) for n, length in enumerate(read_lengths(CLUSTER_DOCUMENTS).tolist())]
    lengths = np.array([piece.length for piece in cut_at_windows(whole, CLUSTER_WINDOW)])
    results: dict[str, SimulationResult] = {}
    for system in SYSTEMS:
        console.print(f"  {system} ...")
        job = simulated_job(CLUSTER_MODEL, CLUSTER_WINDOW, system, **CLUSTER)
        in_order = replace(job, data=job.data.model_copy(update={"shuffle": False}))
        prices = next(iter(results.values())).job.work_prices if results else None
        results[system] = simulate(in_order, lengths, CLUSTER_STEPS, work_prices=prices)
    return results


def show_measured(results: Sequence[Measured], arguments: argparse.Namespace) -> None:
    base = results[0]
    table = new_table(
        "measured on this machine\n2 data-parallel processes, hidden size 128\n"
        f"{len(base.tokens)} steps of {arguments.micro_batches} x {WINDOW:,} tokens of each preset",
        ("speed at\nequal work", "\ntokens/s", "step\nseconds", "imbalance\nof ranks"),
        "each step trains the same segments under both\nstep seconds: median\n"
        "imbalance: predicted compute of the slowest rank over the mean",
    )
    for result in results:
        table.add_row(
            result.preset,
            f"{result.tokens_per_second / base.tokens_per_second:.2f}x",
            f"{result.tokens_per_second:,.0f}",
            f"{median(result.step_seconds):.2f}",
            f"{result.imbalance:.2f}",
        )
    console.print(table)


def show_simulated(results: dict[str, SimulationResult]) -> None:
    base = results[SYSTEMS[0]]
    table = new_table(
        f"simulated, not measured\n{CLUSTER_MODEL} on {base.job.layout.world_size} H100: tp 8, pp 4, cp 2, dp 4\n"
        f"{CLUSTER_STEPS} steps of 16 x {CLUSTER_WINDOW:,} tokens",
        ("speed at\nequal work", "\ntokens/s", "step\nseconds", "tokens/step\nCV", "token\ndelay"),
        f"lengths {CLUSTER_DOCUMENTS}, cut where windows end\n"
        "tokens/s overstates where long documents are delayed\n"
        "the paper's: plain-4d, fixed-4d, wlb-llm; ours: best, elastic",
    )
    for system, result in results.items():
        table.add_row(
            system,
            f"{result.speed_at_equal_work(base):.2f}x",
            f"{result.tokens_per_second:,.0f}",
            f"{result.mean_step_seconds:.2f}",
            f"{result.tokens_cv:.2f}",
            f"{result.token_delay:.2f}",
        )
    console.print(table)


def new_table(title: str, headings: Sequence[str], caption: str) -> Table:
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("preset")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def draw(measured: Sequence[Measured], simulated: dict[str, SimulationResult], path: Path) -> None:
    """What each rank has to do in each step, and speeds over plain-4d: measured here, simulated on a cluster."""
    figure, axes = pyplot_without_display().subplots(
        1, 4, figsize=(14, 3.8), width_ratios=[1.2, 1.2, 0.6, 1.0], constrained_layout=True
    )
    colours = {preset: BALANCED if preset in OURS else BASELINE for preset in SYSTEMS}
    tallest = max(float(result.rank_seconds.max()) for result in measured)
    for axis, result in zip(axes, measured, strict=False):
        for step, ranks in enumerate(result.rank_seconds):
            axis.bar(3 * step + np.arange(len(ranks)), ranks, width=0.9, color=colours[result.preset])
            axis.hlines(ranks.max(), 3 * step - 0.5, 3 * step + len(ranks) - 0.5, color="black", linewidth=1.2)
        axis.set(ylim=(0, 1.1 * tallest), xticks=[], xlabel="two ranks, step by step; line: when the step ends")
        axis.set_title(f"{result.preset}: seconds of work of each rank (predicted)", fontsize=10)
    base = measured[0].tokens_per_second
    speeds = {result.preset: result.tokens_per_second / base for result in measured}
    _draw_speeds(axes[2], speeds, colours, "measured\n2 CPU processes")
    plain = simulated[SYSTEMS[0]]
    over_plain = {system: result.speed_at_equal_work(plain) for system, result in simulated.items()}
    _draw_speeds(axes[3], over_plain, colours, f"simulated\n{CLUSTER_MODEL}, {plain.job.layout.world_size} H100")
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    save(figure, path)


def _draw_speeds(axis: Any, speeds: dict[str, float], colours: dict[str, str], title: str) -> None:
    bars = axis.bar(list(speeds), list(speeds.values()), color=[colours[preset] for preset in speeds], width=0.7)
    axis.bar_label(bars, [f"{speed:.2f}x" for speed in speeds.values()], padding=2, fontsize=9)
    axis.set_title(f"speed at equal work, {title}", fontsize=10)
    axis.tick_params(axis="x", labelsize=8)
    axis.margins(y=0.12)


if __name__ == "__main__":
    main()
