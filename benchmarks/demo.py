"""What balancing gains: measured with two processes on this machine, and simulated for a cluster.

1. Turn the standard library of this Python into a token store (``wlb prepare``), and cut its documents where context
   windows end, as the paper's data loader does: from here on both presets train the same segments in every step.
2. Train them on two data-parallel processes under ``plain-4d`` and ``balanced``, a step of each in turn. The figure is
   CPU seconds of the critical path: what a step takes where each rank has a core of its own. For it ranks compute one
   at a time, as they would slow each other (``parts/training/side_by_side.py``); for the clock, once more, both at
   once. Everything is trained twice, and the smaller seconds count: of every micro-batch, and by the clock of a step.
3. Ask ``wlb check`` what a job on a cluster loses.
4. Print both and draw one step of each preset, ``demo/demo.png``.

Everything is written below ``demo/``; a second run reuses the token stores.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.parts.measurement import differences, load, lower_median, spread
from benchmarks.parts.training.side_by_side import (
    BEGIN,
    END,
    Note,
    files_of,
    launch,
    micro_batch_seconds,
    played,
    read_notes,
    step_seconds,
    typical,
)
from wlb.documents.permutation import Permutation
from wlb.documents.segments import Segment
from wlb.documents.store.reader import TokenStore, TokenStoreWriter
from wlb.job.config_file import load_config
from wlb.job.planner import StepPlanner
from wlb.packing.plan import StepPlan
from wlb.training.preflight import check_job
from wlb_studies.filling import cut_at_windows
from wlb_studies.plots import COMPUTING, WAITING, pyplot_without_display, save

CONFIG = Path("configs/tiny_balanced.toml")
PRESETS = ("plain-4d", "balanced")
TURNS = (*PRESETS, *reversed(PRESETS))  # so that both are, on average, at the same place
RANKS = 2
VOCABULARY = 512
MODEL = ("hidden=64", "layers=2", "heads=4", "kv_heads=4", "head_dim=16", "ffn_hidden=176")
ATTENTION = 10.0  # seconds of a window-long document's attention over those of everything else, about; 8B at 128K: 5
ORDERS = 32  # of the documents, of which one is trained
CHECK = ("check", "synthetic:20000:128K:0")
TOO_BUSY = 1.2  # times the CPU seconds that the clock may take and still say something

console = Console(width=80, highlight=False)


@dataclass(frozen=True)
class Measured:
    """A preset's counted steps: plans, and of every repetition the notes of all ranks and the seconds by the clock."""

    preset: str
    plans: list[StepPlan]
    repeated: list[list[list[list[Note]]]]  # repetition, step, rank
    repeated_clock: list[list[float]]  # repetition, step

    @cached_property
    def notes(self) -> list[list[list[Note]]]:
        """The notes of all ranks in each step, with the smaller of the seconds that repetitions measured."""
        return [[typical(of_rank) for of_rank in zip(*step, strict=True)] for step in zip(*self.repeated, strict=True)]

    @cached_property
    def cpu(self) -> NDArray[np.float64]:
        """CPU seconds of each step's critical path, shape (1 + repetitions, steps): the figure, then each one."""
        return np.array([[step_seconds(of_step) for of_step in steps] for steps in (self.notes, *self.repeated)])

    @cached_property
    def clock(self) -> NDArray[np.float64]:
        """Seconds of each step by the clock, shape (1 + repetitions, steps): the smaller, then each repetition."""
        return np.array([lower_median(self.repeated_clock), *self.repeated_clock])

    @property
    def seconds(self) -> NDArray[np.float64]:
        """CPU seconds of each step's critical path, shape (steps,)."""
        seconds: NDArray[np.float64] = self.cpu[0]
        return seconds

    @property
    def even_seconds(self) -> float:
        """CPU seconds that the steps would take if their ranks shared the work evenly."""
        return float(np.mean([[notes[-1].cpu_seconds for notes in of_step] for of_step in self.notes], axis=1).sum())

    @property
    def micro_batches(self) -> list[list[float]]:
        """CPU seconds of each micro-batch, in every repetition."""
        return [
            [seconds for of_step in steps for notes in of_step for seconds in micro_batch_seconds(notes)]
            for steps in self.repeated
        ]

    def speeds(self, base: Measured) -> list[float]:
        """In CPU seconds over ``base``: the figure, then that of each repetition alone."""
        return list(base.cpu.sum(axis=1) / self.cpu.sum(axis=1))

    def clock_speeds(self, base: Measured) -> list[float]:
        """By the clock over ``base``: the figure, then that of each repetition alone."""
        return list(base.clock.sum(axis=1) / self.clock.sum(axis=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("demo"), help="directory of everything that is written")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps of each preset; the first warms up")
    parser.add_argument("--window", type=int, default=16_384, help="context window; a step has one for each rank")
    arguments = parser.parse_args()
    out: Path = arguments.out
    began = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    stage(1, "token store of the standard library of this Python")
    store = prepare(out, arguments.window, arguments.steps)
    stage(2, f"{' and '.join(PRESETS)} on {RANKS} processes, {arguments.steps} steps each, twice, in turn")
    train_in_turns(out, store, arguments)
    base, ours = measure(out, store, arguments)
    loads = load()
    stage(3, f"a cluster, simulated: wlb {' '.join(CHECK)}")
    checked = check()
    stage(4, "results")
    show_measured(base, ours, arguments.window, loads)
    draw(base, ours, out / "demo.png")
    show_simulated(checked)
    console.print(f"picture: {out / 'demo.png'} ({time.perf_counter() - began:.0f} s in all)", soft_wrap=True)
    console.print("\nnext: wlb check LENGTHS   (your documents: a file of lengths, or a token store)")


def stage(number: int, what: str) -> None:
    console.print(f"\n[bold]\\[{number}/4] {what}[/bold]")


def prepare(out: Path, window: int, steps: int) -> Path:
    """The prefix of a store of segments, none of which crosses the end of a window of the stream."""
    corpus, segments = out / f"corpus-{VOCABULARY}", out / f"segments-{window}-{steps}"
    if not corpus.with_suffix(".idx").exists():
        words = ["prepare", "--stdlib", "--train-bpe", str(VOCABULARY), "--out", str(corpus)]
        subprocess.run([sys.executable, "-m", "wlb", *words], check=True)
    if not segments.with_suffix(".idx").exists():
        documents = TokenStore.open(corpus)
        with TokenStoreWriter(segments, vocab_size=VOCABULARY) as writer:
            for piece in usual_order(np.asarray(documents.lengths), window, steps):
                writer.add(documents.read(*piece))
    return segments


def usual_order(lengths: NDArray[np.int64], window: int, steps: int) -> list[Segment]:
    """The documents cut at windows, in the order whose first steps are nearest to the usual imbalance of plain-4d.

    Usual is the mean over all steps of all orders. So few steps of any one order may be far more or less even. One of
    the steps, which is drawn, shall be near to it, too.
    """
    orders, of_all, of_first, of_each = [], [], [], []
    for seed in range(ORDERS):
        order = Permutation(len(lengths), seed).between(0, len(lengths))
        whole = zip(order.tolist(), lengths[order].tolist(), strict=True)
        orders.append(cut_at_windows((Segment(document, 0, length) for document, length in whole), window))
        pieces = np.array([piece.length for piece in orders[-1]])
        seconds = 1 + ATTENTION * np.bincount((pieces.cumsum() - pieces) // window, (pieces / window) ** 2)
        by_step = seconds[: len(seconds) // RANKS * RANKS].reshape(-1, RANKS)
        slowest, even = by_step.max(axis=1), by_step.mean(axis=1)
        of_all.append(slowest.sum() / even.sum())
        of_first.append(slowest[1:steps].sum() / even[1:steps].sum())
        of_each.append(slowest[1:steps] / even[1:steps])
    usual = np.mean(of_all)
    apart = np.abs(np.array(of_first) - usual) + np.abs(np.array(of_each) - usual).min(axis=1)
    return orders[int(apart.argmin())]


def job_settings(preset: str, directory: Path, store: Path, arguments: argparse.Namespace) -> list[str]:
    """What a preset's job changes in the configuration."""
    return [
        f"preset={preset}",
        *(f"model.{size}" for size in MODEL),
        f"data.store={store}",
        "data.shuffle=false",
        f"data.context_window={arguments.window}",
        f"packing.global_batch={RANKS}",
        f"training.steps={arguments.steps}",
        *files_of(directory),
    ]


def train_in_turns(out: Path, store: Path, arguments: argparse.Namespace) -> None:
    """Train every preset afresh, in the order of ``TURNS``."""
    words: list[str] = []
    for option, kind in (("--one-at-a-time", "cpu"), ("--job", "clock")):
        for turn, preset in enumerate(TURNS):
            directory = out / kind / str(turn)
            shutil.rmtree(directory, ignore_errors=True)
            words += [option, str(CONFIG), *job_settings(preset, directory, store, arguments)]
    launch(RANKS, out / "notes", words)


def measure(out: Path, store: Path, arguments: argparse.Namespace) -> list[Measured]:
    """Read what was noted of every preset, without the first step, and plan its steps once more."""
    notes = read_notes(out / "notes", RANKS)
    results = []
    for preset in PRESETS:
        job = check_job(load_config(CONFIG, job_settings(preset, out / "plans", store, arguments)), RANKS).job
        plans = list(islice(StepPlanner(job, TokenStore.open(store).lengths).plans(), 1, arguments.steps))
        of_preset, clock = [], []
        for turn in [turn for turn, its in enumerate(TURNS) if its == preset]:
            lines = (out / "clock" / str(turn) / "steps.jsonl").read_text(encoding="utf-8").splitlines()
            rows = [json.loads(line) for line in lines][1:]
            assert [plan.tokens for plan in plans] == [row["tokens"] for row in rows], "these plans were trained"
            of_preset.append([notes[turn, row["step"]] for row in rows])
            clock.append([row["step_seconds"] for row in rows])
        results.append(Measured(preset, plans, of_preset, clock))
    first, second = ([sorted(plan.segments) for plan in result.plans] for result in results)
    assert first == second, "both trained the same segments in every step"
    return results


def check() -> dict[str, Any]:
    """What ``wlb check`` says of a cluster."""
    said = subprocess.run([sys.executable, "-m", "wlb", *CHECK, "--json"], check=True, stdout=subprocess.PIPE)
    checked: dict[str, Any] = json.loads(said.stdout)
    return checked


def show_measured(base: Measured, ours: Measured, window: int, loads: Mapping[str, float]) -> None:
    table = Table(
        title=f"measured: {len(base.plans)} steps of {RANKS} x {window:,} tokens on {RANKS} data-parallel processes",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("\npreset")
    for heading in (
        "CPU s\na step",
        "slowest rank\nover mean",
        "speed in\nCPU seconds",
        "clock s\na step",
        "speed by\nthe clock",
    ):
        table.add_column(heading, justify="right")
    for result, speeds, by_clock in (
        (base, "1.00x", "1.00x"),
        (ours, _with_spread(ours.speeds(base)), _with_spread(ours.clock_speeds(base))),
    ):
        uneven = result.seconds.sum() / result.even_seconds
        cells = (f"{result.seconds.mean():.3f}", f"{uneven:.2f}", speeds, f"{result.clock[0].mean():.3f}", by_clock)
        table.add_row(result.preset, *cells)
    console.print(table)
    even = min(base.even_seconds, ours.even_seconds)  # the work is the same, so of its two measurements the smaller
    console.print(
        f"Perfectly even ranks would give {base.seconds.sum() / even:.2f}x in CPU seconds; {ours.preset} reaches "
        f"{even / ours.seconds.sum():.0%} of that. Both train the same documents in every step. We report the slowest "
        "rank's CPU time, because a machine may be shared."
    )
    apart = differences(np.hstack([base.micro_batches, ours.micro_batches]))
    console.print(
        "Everything was measured twice, and the smaller time counts; in brackets also the first and the second alone. "
        f"CPU seconds of one micro-batch differed by {apart['median_difference']:.0%} (median), at most by "
        f"{apart['worst_difference']:.0%}. Load average: {loads['load_at_start']:.1f} before training, "
        f"{loads['load_at_end']:.1f} after it, on {os.cpu_count()} cores (training itself adds 1 to {RANKS})."
    )
    stretched = max(float(result.clock[0].sum() / result.seconds.sum()) for result in (base, ours))
    if stretched > TOO_BUSY:
        console.print(
            f"[bold]The clock means little here:[/bold] it ran {stretched:.1f} times the CPU seconds, because other "
            "programs had the cores or the two processes slow each other."
        )


def _with_spread(speeds: list[float]) -> str:
    return f"{speeds[0]:.2f}x" + "\n({least:.2f} to {most:.2f})".format_map(spread(speeds))


def show_simulated(checked: dict[str, Any]) -> None:
    gpus = checked["systems"][0]["gpus"]
    console.print(f"\nsimulated: {gpus} GPUs, each system in its own fastest layout", markup=False)
    console.print(f"{checked['verdict']}\n", markup=False)


class Bar(NamedTuple):
    """Computing without interruption, in a micro-batch or, if None, outside of any."""

    starts: float
    ends: float
    micro_batch: int | None


def bars(notes: Sequence[Note], times: Sequence[float]) -> list[Bar]:
    """What a rank computes when, of ``notes`` that it comes to at ``times``; between bars it waits."""
    made: list[Bar] = []
    micro_batch: int | None = None
    for (before, starts), (note, _) in pairwise([(Note("", (), 0.0), 0.0), *zip(notes, times, strict=True)]):
        mark, _, number = before.message.rpartition(" ")
        micro_batch = int(number) if mark == BEGIN else None if mark == END else micro_batch
        ends = starts + note.cpu_seconds - before.cpu_seconds
        if made and made[-1].micro_batch == micro_batch and math.isclose(made[-1].ends, starts):
            made[-1] = made[-1]._replace(ends=ends)
        elif ends > starts:
            made.append(Bar(starts, ends, micro_batch))
    return made


def draw(base: Measured, ours: Measured, path: Path) -> None:
    """Draw the ranks of one step of both presets: the step whose speed is nearest to that of all steps."""
    step = int(np.abs(base.seconds / ours.seconds - ours.speeds(base)[0]).argmin())
    figure, axes = pyplot_without_display().subplots(2, 1, figsize=(5.6, 3.8), sharex=True, constrained_layout=True)
    ends = float(base.seconds[step])
    faster = f" ({ends / float(ours.seconds[step]):.2f}x as fast)"
    for axis, result, note in zip(axes, (base, ours), ("", faster), strict=True):
        axis.set(xlim=(0, 1.005 * ends), ylim=(RANKS - 0.5, -0.5), yticks=range(RANKS))
        _draw_ranks(axis, result, step)
        seconds = float(result.seconds[step])
        axis.axvline(seconds, color="black", linewidth=1.5)
        axis.set_yticklabels([f"rank {rank}" for rank in range(RANKS)])
        axis.set_title(f"{result.preset}: {seconds:.2f} s{note}", fontsize=14, loc="left", weight="bold")
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(axis="y", length=0)
        axis.tick_params(labelsize=12)
    axes[1].set_xlabel(f"CPU seconds, measured: one of {len(base.plans)} steps", fontsize=12)
    save(figure, path)


def _draw_ranks(axis: Any, result: Measured, step: int) -> None:
    notes, ends = result.notes[step], float(result.seconds[step])
    for rank, (of_rank, times) in enumerate(zip(notes, played(notes), strict=True)):
        made = bars(of_rank, times)
        axis.barh(rank, ends, height=0.8, color=WAITING, linewidth=0)
        for bar in made:
            axis.barh(rank, bar.ends - bar.starts, left=bar.starts, height=0.8, color=COMPUTING, linewidth=0)
        for number, label in enumerate(longest_documents(result.plans[step], rank)):
            mine = [bar for bar in made if bar.micro_batch == number]
            left, right = mine[0].starts, mine[-1].ends
            axis.vlines(right, rank - 0.4, rank + 0.4, color="white")
            if sum(bar.ends - bar.starts for bar in mine) < 0.95 * (right - left):  # the rank waits inside
                _, left, right = max((bar.ends - bar.starts, bar.starts, bar.ends) for bar in mine)
            labels = (
                f"longest document: {label}",
                f"longest document:\n{label}",
                f"longest:\n{label.removesuffix(' tokens')}",
            )
            _write(axis, rank, left, right, labels, "black")
        for bar, following in pairwise([*made, Bar(ends, ends, None)]):
            _write(axis, rank, bar.ends, following.starts, ["waiting"], "white")


def _write(axis: Any, rank: int, left: float, right: float, labels: Sequence[str], colour: str) -> None:
    """Write the first of ``labels`` that fits between ``left`` and ``right``: about 46 letters fill the axis."""
    letters = (right - left) / axis.get_xlim()[1] * 46
    for label in labels:
        if letters > max(map(len, label.split("\n"))):
            axis.text((left + right) / 2, rank, label, ha="center", va="center", fontsize=12, color=colour)
            break


def longest_documents(plan: StepPlan, rank: int) -> list[str]:
    """Of each micro-batch of ``rank`` in a step: its longest document, or half of the one that both ranks share."""
    own = plan.ranks[rank] if len(plan.ranks) > 1 else [each for each in plan.ranks[0] if rank in each.ranks]
    shared = [len(micro_batch.ranks) > 1 for micro_batch in own]
    return [
        f"half of {max(each.lengths):,}" if both else f"{max(each.lengths):,} tokens"
        for each, both in zip(own, shared, strict=True)
    ]


if __name__ == "__main__":
    main()
