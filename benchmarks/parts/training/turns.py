"""Every preset trained in turns on real processes, and the same steps simulated: what two benchmarks share.

A layout names the parallel sizes that are 2: ``dp``, or ``dp+cp`` on four processes. Presets take turns, a step each,
in the same processes (``examples/side_by_side.py``). Each repetition leaves a ``steps.jsonl`` per preset, whose first
step is not counted. The plans of those steps, and their predicted seconds, come from the configuration, the document
lengths and a profile measured on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from wlb.job.config import PRESETS
from wlb.job.config_file import load_config
from wlb.job.planner import StepPlanner
from wlb.packing.plan import StepPlan
from wlb.simulate import simulate_steps
from wlb.training.preflight import CheckedJob, check_job
from wlb.workload.profile import WorkloadProfile, read_profile

ROOT = Path(__file__).resolve().parents[3]
CONFIG = ROOT / "configs" / "tiny.toml"
IN_TURNS = ROOT / "examples" / "side_by_side.py"
VOCABULARY = 512  # that of the preset tiny, which is what is profiled
PROCESSES = 2
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def make_parser(description: str | None, directory: str) -> argparse.ArgumentParser:
    """The options of a benchmark that trains every preset in turns; working files go to ``directory``."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--layouts", default="pp,dp,cp", help="which of pp, dp and cp are 2, as in dp,dp+cp")
    parser.add_argument("--presets", type=_presets, default=list(PRESETS), help="which to train; default: all")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="counted steps of every preset in a repetition")
    parser.add_argument("--micro-batches", type=int, default=8, help="micro-batches of a step, over all ranks")
    parser.add_argument("--directory", type=Path, default=Path(directory), help="working files")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    return parser


def _presets(names: str) -> list[str]:
    unknown = set(names.split(",")) - set(PRESETS)
    if unknown:
        raise argparse.ArgumentTypeError(f"{min(unknown)} is no preset; choose from {', '.join(PRESETS)}")
    return names.split(",")


def prepare(directory: Path) -> Path:
    store = directory / "stdlib"
    if not store.with_suffix(".idx").exists():
        run("-m", "wlb", "prepare", "--stdlib", "--train-bpe", VOCABULARY, "--out", store)
    return store


def measure_profile(directory: Path) -> WorkloadProfile:
    """What the model costs on this machine now, on the slowest of two cores that compute at the same time.

    Ranks wait for the slowest, and the cores of a shared machine differ by more than a prediction may err.
    """
    paths = [directory / f"profile-{process}.json" for process in range(PROCESSES)]
    words = [sys.executable, "-m", "wlb", "profile", "--model", "tiny", "--device", "cpu", "--threads", "1", "--quick"]
    running = [subprocess.Popen([*words, "--out", str(path)], env=ONE_THREAD) for path in paths]
    if sum([process.wait() for process in running]):  # of all, or one would go on
        raise SystemExit("wlb profile has failed")
    return max(map(read_profile, paths), key=_measured_seconds)


def _measured_seconds(profile: WorkloadProfile) -> float:
    parts = (profile.attention, profile.linear)
    return sum(sum(part.forward_seconds) + sum(part.backward_seconds) for part in parts)


def run(*words: object, processes: int = 1) -> None:
    """Run this Python with ``words``, under torchrun where several processes are asked for."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(torchrun if processes > 1 else []), *map(str, words)]
    subprocess.run(command, check=True, env=ONE_THREAD)


def overrides(layout: str, preset: str, repetition: int, arguments: argparse.Namespace, store: Path) -> list[str]:
    directory = arguments.directory / layout / preset / str(repetition)
    return [
        f"preset={preset}",
        *(f"parallel.{name}={2 if name in layout.split('+') else 1}" for name in ("pp", "dp", "cp")),
        f"data.store={store}",
        f"packing.micro_batches={arguments.micro_batches}",
        f"training.steps={arguments.steps + 1}",
        f"checkpoint.dir={directory / 'checkpoints'}",
        f"checkpoint.every={10**6}",
        f"metrics.dir={directory}",
        "metrics.tensorboard=false",
    ]


def checked_job(layout: str, preset: str, arguments: argparse.Namespace, store: Path) -> CheckedJob:
    """The job that is trained, in which nothing is left to decide."""
    config = load_config(CONFIG, overrides(layout, preset, 0, arguments, store))
    return check_job(config, config.parallel.world_size)


def train_in_turns(
    layout: str, repetition: int, arguments: argparse.Namespace, store: Path, program: Sequence[object] = (IN_TURNS,)
) -> None:
    """Train a step of every preset in turn with ``program``, a file and its own options."""
    words: list[str] = []
    for preset in arguments.presets:
        shutil.rmtree(arguments.directory / layout / preset / str(repetition), ignore_errors=True)
        words += ["--job", str(CONFIG), *overrides(layout, preset, repetition, arguments, store)]
    run(*program, *words, processes=processes_of(layout))


def processes_of(layout: str) -> int:
    return 1 << len(layout.split("+"))


def measured_rows(
    layout: str, preset: str, arguments: argparse.Namespace, plans: Sequence[StepPlan]
) -> list[list[dict[str, Any]]]:
    """Counted steps of every repetition, which are those of ``plans``."""
    rows = counted_rows(layout, preset, arguments)
    for repetition in rows:
        if [plan.tokens for plan in plans] != [row["tokens"] for row in repetition]:
            raise SystemExit(f"{layout} {preset}: the steps trained are not the steps planned")
    return rows


def counted_rows(layout: str, name: str, arguments: argparse.Namespace) -> list[list[dict[str, Any]]]:
    """The lines of steps.jsonl of every repetition, without the first."""
    files = [arguments.directory / layout / name / str(n) / "steps.jsonl" for n in range(arguments.repetitions)]
    return [[json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()][1:] for file in files]


def plan_steps(checked: CheckedJob, steps: int) -> list[StepPlan]:
    """The plans of the job's first ``steps`` steps, from document lengths alone."""
    return [*islice(StepPlanner(checked.job, checked.store.lengths).plans(), steps)]


def predicted_seconds(plans: Sequence[StepPlan], checked: CheckedJob, profile: WorkloadProfile) -> list[float]:
    """Simulated seconds of each step, computing as measured in ``profile``."""
    seconds: list[float] = simulate_steps(plans, checked.job.priced(profile=profile)).seconds.tolist()
    return seconds
