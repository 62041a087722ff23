"""Every rival policy beside ours: 128K to 1M tokens, 8B and 70B parameters, 64 to 1,024 GPUs.

Each policy's best layout is searched for each job (``wlb.rivals``). The jobs are a line through the grid, not all of
it: windows grow with the GPUs. A job that is done is written to ``OUT/rivals/`` and not computed again with the same
settings, so an interrupted run goes on.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

from wlb.documents.lengths import read_lengths
from wlb.documents.synthetic import sample_lengths
from wlb.reproduce.experiment import Column, Finding, Report, Settings, Table, Value, grouped_bars
from wlb.rivals import BASE, POLICIES, Outcome, compare
from wlb.simulate.search import search_space

BATCH_TOKENS = 2**24
_DOCUMENTS = 20_000
_STEPS = 4
_K = 1024
_OURS = ("best", "elastic")


class RivalJob(NamedTuple):
    model: str
    gpus: int
    context_window: int

    @property
    def name(self) -> str:
        window = self.context_window // _K
        return f"{self.model}-{f'{window // _K}m' if window >= _K else f'{window}k'}-{self.gpus}"


JOBS = (
    RivalJob("llama3-8b", 64, 128 * _K),
    RivalJob("llama3-8b", 128, 256 * _K),
    RivalJob("llama3-8b", 256, 512 * _K),
    RivalJob("llama3-8b", 512, 1024 * _K),
    RivalJob("llama3-70b", 256, 128 * _K),
    RivalJob("llama3-70b", 512, 256 * _K),
    RivalJob("llama3-70b", 1024, 512 * _K),
    RivalJob("llama3-70b", 1024, 1024 * _K),
)

# Quoted: each publication's own figure, over what it compared with, on its own jobs.
CLAIMS = {
    "wlb-llm": "1.23 mean, over plain-4D (arXiv 2503.17924, section 7.2)",
    "megatron-dynamic": "1.25 to 1.48, Llama 13B (NVIDIA, at second hand)",
    "hotspa": "up to 2.99, over fixed strategies (SOSP '24, abstract)",
    "hydraulis": "1.32 to 2.66 (arXiv 2412.07894, abstract)",
    "flexsp": "up to 1.98, over Megatron, 64 A100 (arXiv 2412.01523)",
    "bytescale": "3.89 at most in its ablation (arXiv 2502.21231)",
    "bytescale-pipeline": "3.89 at most in its ablation (arXiv 2502.21231)",
    "distca": "1.05 to 1.35, over WLB without delay (arXiv 2510.18121)",
    "libra": "1.44 mean, 1.68 at most, over WLB-LLM (arXiv 2607.23250, abstract)",
    "fcp": "1.13 to 2.21, MFU of attention (arXiv 2605.08524)",
}


def run(settings: Settings) -> Report:
    steps = settings.steps or _STEPS
    found = {job.name: _of_job(job, settings, steps) for job in JOBS}
    claims = {policy: CLAIMS.get(policy) for policy in POLICIES}
    rows: list[tuple[Value, ...]] = [
        (policy, *(_speed(outcomes, policy) for outcomes in found.values()), claims[policy]) for policy in POLICIES
    ]
    columns = (
        Column("policy"),
        *(Column(name, "simulated", ".2f") for name in found),
        Column("its own claim", ""),
    )
    return Report(
        title="Rivals: speed at equal work over plain-4D, each policy in its best layout",
        documents=settings.lengths or f"synthetic, {_DOCUMENTS:,} documents that grow with the window",
        tables=[Table("speed at equal work over plain-4D; claims are quoted", columns, rows), *_details(found)],
        draw=partial(
            grouped_bars,
            title="speed at equal work over plain-4D, simulated",
            groups=[*found],
            series={name: [_speed(of_job, name) for of_job in found.values()] for name in _shown(found)},
            label="speed over plain-4D",
        ),
        findings=[_finding(name, outcomes) for name, outcomes in found.items()],
        notes=[
            f"{steps} steps of {BATCH_TOKENS:,} tokens of each policy in its best layout, H100 preset; over so few "
            "steps it matters to systems that delay documents which ones still wait",
            "every policy is this project's reading of its publication; docs/rivals.md says what was assumed",
        ],
    )


def _of_job(job: RivalJob, settings: Settings, steps: int) -> list[Outcome]:
    """Outcomes of all policies, from the file of an earlier run where there is one of the same settings."""
    asked: dict[str, object] = {
        "lengths": settings.lengths,
        "seed": settings.seed,
        "steps": steps,
        "policies": [*POLICIES],
    }
    path = settings.out / "rivals" / f"{job.name}.json"
    done = _read(path, asked)
    if done is not None:
        return done
    space = search_space(job.model, job.gpus, job.context_window, batch_tokens=BATCH_TOKENS, steps=steps)
    if settings.lengths is not None:
        lengths = read_lengths(settings.lengths)
    else:
        lengths = sample_lengths(_DOCUMENTS, job.context_window, settings.seed)
    outcomes, without = compare(
        [*POLICIES], space, lengths, on_progress=lambda policy: settings.on_progress(f"{job.name}, {policy}")
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    document = asked | {"outcomes": [asdict(outcome) for outcome in outcomes], "without_layout": without}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return outcomes


def _read(path: Path, asked: dict[str, object]) -> list[Outcome] | None:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if any(document.get(key) != value for key, value in asked.items()):
        return None
    return [Outcome(**outcome) for outcome in document["outcomes"]]


def _speed(outcomes: list[Outcome], policy: str) -> float | None:
    by_name = {outcome.policy: outcome.work_rate for outcome in outcomes}
    return by_name[policy] / by_name[BASE] if policy in by_name else None


def _shown(found: dict[str, list[Outcome]]) -> list[str]:
    """The policies of the picture: the fastest rivals anywhere, and ours."""
    rivals = {o.policy for outcomes in found.values() for o in sorted(outcomes, key=lambda o: -o.work_rate)[:3]}
    return [policy for policy in POLICIES if policy in rivals or policy in _OURS][:6]


def _finding(job: str, outcomes: list[Outcome]) -> Finding:
    ranking = sorted(outcomes, key=lambda outcome: -outcome.work_rate)
    told = ", ".join(f"{outcome.policy} {_speed(outcomes, outcome.policy):.2f}" for outcome in ranking[:3])
    return Finding(f"{job}: ours is the fastest", ranking[0].policy in _OURS, told)


def _details(found: dict[str, list[Outcome]]) -> list[Table]:
    columns = (
        Column("policy"),
        Column("token delay", "simulated", ".2f"),
        Column("tokens/step CV", "simulated", ".3f"),
        Column("exchange, GB of a GPU", "simulated", ".1f"),
        Column("peak, GiB", "simulated", ".0f"),
        Column("planning, s/step", "measured", ".2f"),
        Column("layout"),
    )
    return [
        Table(
            f"{job}: {outcomes[0].steps} steps",
            columns,
            [
                (
                    outcome.policy,
                    outcome.token_delay,
                    outcome.tokens_cv,
                    outcome.exchanged_bytes / 1e9,
                    outcome.memory_bytes / 2**30,
                    outcome.planning_seconds,
                    outcome.layout,
                )
                for outcome in outcomes
            ],
        )
        for job, outcomes in found.items()
    ]
