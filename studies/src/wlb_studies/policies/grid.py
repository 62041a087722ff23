"""Rival policies beside ours: 8B and 70B parameters, 64 to 1,024 GPUs, on synthetic documents and on source code.

For each job, the best layout of each policy is searched (``wlb_studies.policies``), with as many jobs at once as there
are cores. Windows of 128K to 1M tokens have synthetic documents that grow with the window, and run every policy. Source
code, which anyone has, runs the policies ``_ON_SOURCES``: a byte counts as a token. A finished job is written to
``OUT/rivals/`` and reused with the same settings, so an interrupted run continues, and a new policy runs alone.
Delete that directory when prices have changed.
"""

import json
import multiprocessing
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from wlb.documents.lengths import read_lengths
from wlb.documents.prepare.sources import stdlib_documents, stdlib_files, stdlib_root
from wlb.documents.synthetic import sample_lengths
from wlb.errors import UserError, require
from wlb.simulate.search import DRAWS
from wlb.simulate.space import search_space
from wlb_studies.experiment import Column, Finding, Report, Settings, Table, Value, grouped_bars
from wlb_studies.plots import pyplot_without_display, save
from wlb_studies.policies import BASE, POLICIES, Outcome, compare
from wlb_studies.policies.filling import Integers

BATCH_TOKENS, _SOURCE_BATCH_TOKENS = 2**24, 2**22
DOCUMENTS = 60_000  # more than the steps of a draw train, in every window
_STEPS = 4  # of a draw
K = 1024
_OURS = ("balanced",)
_PICTURED = 6  # policies


class RivalJob(NamedTuple):
    model: str
    gpus: int
    context_window: int
    source: str = ""  # of _SOURCES, or else synthetic

    @property
    def name(self) -> str:
        window = self.context_window // K
        named = f"{self.model}-{f'{window // K}m' if window >= K else f'{window}k'}-{self.gpus}"
        return f"{named}-{self.source}" if self.source else named

    @property
    def batch_tokens(self) -> int:
        return _SOURCE_BATCH_TOKENS if self.source else BATCH_TOKENS

    @property
    def policies(self) -> list[str]:
        return [*(_ON_SOURCES if self.source else POLICIES)]


def _definitions() -> Integers:
    """Bytes of the documents of ``wlb prepare --stdlib``: one per definition of Python's standard library."""
    texts = chain.from_iterable(map(stdlib_documents, stdlib_files(stdlib_root())))
    return np.array([len(text.encode()) for text in texts if text])


def _files_of_sympy() -> Integers:
    """Bytes of the Python files of the installed sympy, which torch depends on."""
    root = Path(require("sympy", "dev").__file__ or "").parent
    return np.array([size for path in sorted(root.rglob("*.py")) if (size := path.stat().st_size)])


_SOURCES = {"stdlib": _definitions, "sympy": _files_of_sympy}
_ON_SOURCES = (
    *(BASE, "per-document-4d", "wlb-llm", "plain-4d-dealt-head", "wlb-llm-dealt-head", "megatron-packing", "bytescale"),
    *("distca", "magi", "slimpipe", "balanced"),
)
GPUS = {"llama3-8b": (64, 256, 1024), "llama3-70b": (64, 256)}
JOBS = (
    *(RivalJob(model, n, size * K) for model in GPUS for size, n in product((128, 256, 512, 1024), GPUS[model])),
    *(RivalJob(model, 64, size * K, source) for model, source, size in product(GPUS, _SOURCES, (32, 128))),
)

# Quoted: each publication's own figure, over its own baseline, on its own jobs.
CLAIMS = {
    "wlb-llm": "1.23 mean, over plain-4D (arXiv 2503.17924, section 7.2)",
    "megatron-dynamic": "1.25 to 1.48, Llama 13B (NVIDIA, at second hand)",
    "hotspa": "up to 2.99, over fixed strategies (SOSP '24, abstract)",
    "hydraulis": "1.32 to 2.66 (arXiv 2412.07894, abstract)",
    "flexsp": "up to 1.98, over Megatron, 64 A100 (arXiv 2412.01523)",
    "bytescale": "3.89 at most in its ablation (arXiv 2502.21231)",
    "bytescale-pipeline": "3.89 at most in its ablation (arXiv 2502.21231)",
    "flexible-cp": "up to 1.46 on average, over Megatron-LM and DeepSpeed (arXiv 2602.21788, abstract)",
    "odc": "up to 1.36, over FSDP (arXiv 2601.19362, abstract)",
    "hbp": "1.33 to 1.42, and 2.4 for DeepSeek-V2, over one packing length (arXiv 2503.07680, table 5)",
    "distca": "1.05 to 1.35, over WLB without delay (arXiv 2510.18121)",
    "libra": "1.44 mean, 1.68 at most, over WLB-LLM (arXiv 2607.23250, abstract)",
    "seq1f1b": "1.14, over 1F1B of Megatron (arXiv 2406.03488, abstract)",
    "slimpipe": "up to 1.57, MFU at 512K, 70B (arXiv 2504.14519, abstract)",
    "chunkflow": "up to 4.53, over Megatron-LM, fine-tuning (arXiv 2503.02356, abstract)",
    "infinipipe": "1.69, over other systems (arXiv 2509.21275, abstract)",
    "slimpack": "up to 2.8 (arXiv 2509.26246, abstract)",
    "fcp": "1.13 to 2.21, MFU of attention (arXiv 2605.08524)",
}


@dataclass(frozen=True)
class _Done:
    """A job's outcomes, the base first; or none and the reason, if the model does not fit."""

    outcomes: Sequence[Outcome]
    without: Mapping[str, str]

    def speedup(self, policy: str) -> float | None:
        """Tokens per second over the base; None without a layout.

        A few steps of a policy that delays documents train too many or too few long ones. So its work counts, for the
        tokens that our policy trains with as much.
        """
        of_policy = {outcome.policy: outcome for outcome in self.outcomes}
        one, ours, base = of_policy.get(policy), of_policy.get(_OURS[0]), self.outcomes[0]
        if one is not None and ours is not None and one.token_delay:
            return one.speed_at_equal_work(ours) * ours.speedup(base)
        return None if one is None else one.speedup(base)

    def missing(self, policies: Sequence[str]) -> list[str]:
        """Those of ``policies`` that were not run; none if the base has no layout, and so nothing to compare with."""
        known = {*self.without, *(outcome.policy for outcome in self.outcomes)}
        return [] if BASE in self.without else [name for name in policies if name not in known]

    @property
    def ranking(self) -> list[Outcome]:
        """Fastest first."""
        return sorted(self.outcomes, key=lambda outcome: -(self.speedup(outcome.policy) or 0.0))


def run(settings: Settings) -> Report:
    steps = settings.steps or _STEPS
    done = _all_jobs(settings, steps)
    found = {job: done[job] for job in JOBS if done[job].outcomes}
    too_large = [job.name for job in JOBS if not done[job].outcomes]
    on_fewest = {(job.model, job.context_window): job for job in reversed(found) if not job.source}
    pictured = [*reversed(on_fewest.values())]
    findings = [_finding(job.name, of_job) for job, of_job in found.items()]
    return Report(
        title="Rivals: tokens per second over plain-4D, each policy in its best layout",
        documents=settings.lengths or f"synthetic, {DOCUMENTS:,} documents that grow with the window",
        tables=[
            *(_speedups(of_jobs) for of_jobs in _tables(found)),
            *(_details(job, of_job) for job, of_job in found.items()),
        ],
        draw=partial(
            grouped_bars,
            title="tokens per second over plain-4D, simulated",
            groups=[job.name for job in pictured],
            series={
                name: [found[job].speedup(name) for job in pictured]
                for name in _shown([found[job] for job in on_fewest.values()])
            },
            label="speedup over plain-4D",
        ),
        findings=findings,
        notes=[
            f"ours is the fastest in {sum(1 for one in findings if one.holds)} of {len(findings)} jobs",
            f"{steps} steps of {BATCH_TOKENS:,} tokens (source code: {_SOURCE_BATCH_TOKENS:,}) in each of {DRAWS} "
            "draws of the documents, after warm-up steps; each policy in its best layout, H100 preset",
            "where documents wait, tokens are those that balanced trains with as much work",
            "source code: one token per byte; a draw repeats the standard library up to 5 times, sympy up to 2 times",
            "we re-implemented each policy from its publication; wlb_studies.policies lists the assumptions",
            *([f"plain-4d fits in memory in no layout of {', '.join(too_large)}"] if too_large else []),
        ],
    )


def _all_jobs(settings: Settings, steps: int) -> dict[RivalJob, _Done]:
    """Every job's outcomes; missing ones are computed, several at once."""
    known = {job: _read(_path(job, settings), _asked(settings, steps)) for job in JOBS}
    done = {job: read for job, read in known.items() if not read.missing(job.policies)}
    left = [job for job in JOBS if job not in done]
    quiet = replace(settings, on_progress=print)  # picklable for another process, which does not call it
    with _workers() as workers:
        running = {workers.submit(_computed, job, known[job], quiet, steps): job for job in left}
        settings.on_progress(f"{len(done)} of {len(JOBS)} jobs")
        for future in as_completed(running):
            done[running[future]] = future.result()
            settings.on_progress(f"{len(done)} of {len(JOBS)} jobs, last {running[future].name}")
    return done


def _workers() -> Executor:
    return ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn"))


def _computed(job: RivalJob, known: _Done, settings: Settings, steps: int) -> _Done:
    """``known`` and the policies that it leaves out."""
    space = search_space(job.model, job.gpus, job.context_window, batch_tokens=job.batch_tokens)
    try:
        outcomes, without = compare(known.missing(job.policies), space, documents_of(job, settings), steps)
        found = {outcome.policy: outcome for outcome in (*known.outcomes, *outcomes)}
        done = _Done([found[name] for name in job.policies if name in found], {**known.without, **without})
    except UserError as error:
        done = _Done([], {BASE: str(error)})
    path = _path(job, settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_asked(settings, steps) | asdict(done), indent=1) + "\n", encoding="utf-8")
    return done


def documents_of(job: RivalJob, settings: Settings) -> Integers:
    """Lengths of source code, of the given documents, or of synthetic documents that grow with the window."""
    if job.source:
        return _SOURCES[job.source]()
    if settings.lengths is not None:
        lengths = read_lengths(settings.lengths)
        return lengths[lengths > 0]
    return sample_lengths(DOCUMENTS, job.context_window, settings.seed)


def _path(job: RivalJob, settings: Settings) -> Path:
    return settings.out / "rivals" / f"{job.name}.json"


def _asked(settings: Settings, steps: int) -> dict[str, object]:
    """The settings that a stored file must have been computed with."""
    documents = {"lengths": settings.lengths, "documents": DOCUMENTS, "seed": settings.seed}
    return {**documents, "draws": DRAWS, "steps": steps}


def _read(path: Path, asked: dict[str, object]) -> _Done:
    """The outcomes of earlier runs with the same settings, of as many policies as there are."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return _Done([], {})
    if any(document.get(key) != value for key, value in asked.items()):
        return _Done([], {})
    return _Done([Outcome(**outcome) for outcome in document["outcomes"]], document["without"])


def _tables(found: dict[RivalJob, _Done]) -> list[dict[RivalJob, _Done]]:
    """Jobs of one model on documents of one kind."""
    kinds = dict.fromkeys((job.model, bool(job.source)) for job in found)
    return [{job: found[job] for job in found if (job.model, bool(job.source)) == kind} for kind in kinds]


def _speedups(of_jobs: dict[RivalJob, _Done]) -> Table:
    model, source = next((job.model, job.source) for job in of_jobs)
    columns = (
        Column("policy"),
        *(Column(job.name.removeprefix(f"{model}-"), "simulated", ".2f") for job in of_jobs),
        Column("its own claim", ""),
    )
    rows: list[tuple[Value, ...]] = [
        (policy, *(of_job.speedup(policy) for of_job in of_jobs.values()), CLAIMS.get(policy))
        for policy in (_ON_SOURCES if source else POLICIES)
    ]
    documents = "source code" if source else "synthetic documents"
    return Table(f"{model}, {documents}: speedup over plain-4D; claims are quoted", columns, rows)


def _shown(found: list[_Done]) -> list[str]:
    """The policies in the picture: ours, and the rivals most often among the three fastest."""
    often = Counter(outcome.policy for of_job in found for outcome in of_job.ranking[:3])
    rivals = [policy for policy, _ in often.most_common() if policy not in _OURS]
    return [*_OURS, *rivals[: _PICTURED - len(_OURS)]]


def _finding(job: str, of_job: _Done) -> Finding:
    ranking = of_job.ranking
    told = ", ".join(f"{one.policy} {_with_spread(one, of_job.outcomes[0])}" for one in ranking[:3])
    return Finding(f"{job}: ours is the fastest", ranking[0].policy in _OURS, told)


def _with_spread(outcome: Outcome, base: Outcome) -> str:
    """Speedup over ``base``, with the smallest and largest of the draws."""
    low, high = outcome.spread(base)
    return f"{outcome.speedup(base):.2f} ({low:.2f} to {high:.2f})"


def _details(job: RivalJob, of_job: _Done) -> Table:
    columns = (
        Column("policy"),
        Column("tokens/s", "simulated", ",.0f"),
        Column("speedup", "simulated", ".2f"),
        Column("least", "simulated", ".2f"),
        Column("most", "simulated", ".2f"),
        Column("at equal work", "simulated", ".2f"),
        Column("token delay", "simulated", ".2f"),
        Column("tokens/step CV", "simulated", ".3f"),
        Column("exchange, GB of a GPU", "simulated", ".0f"),
        Column("peak, GiB", "simulated", ".0f"),
        Column("planning, CPU s/step", "measured", ".2f"),
        Column("layout"),
    )
    rows: list[tuple[Value, ...]] = []
    base = of_job.outcomes[0]
    for one in of_job.ranking:
        exchanged, peak = one.exchanged_bytes / 1e9, one.memory_bytes / 2**30
        speeds = (one.tokens_per_second, one.speedup(base), *one.spread(base), one.speed_at_equal_work(base))
        tokens = (one.token_delay, one.tokens_cv)
        rows.append((one.policy, *speeds, *tokens, exchanged, peak, one.planning_seconds, one.layout))
    return Table(job.name, columns, rows)


def draw_speeds(path: Path, outcomes: Sequence[Outcome], title: str) -> None:
    """Bars of the speedup over the first outcome, with the smallest and largest of the draws."""
    figure, axis = pyplot_without_display().subplots(figsize=(7, 1 + 0.32 * len(outcomes)), constrained_layout=True)
    base = outcomes[0]
    for one in reversed(outcomes):
        speed, (low, high) = one.speedup(base), one.spread(base)
        colour = "#1b7f5c" if one.policy in _OURS else "#6a7fb5"
        shown = axis.barh(one.policy, speed, color=colour, xerr=[[speed - low], [high - speed]], ecolor="black")
        axis.bar_label(shown, [f"{speed:.2f}x"], fontsize=8, padding=2)
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.set_xlabel(f"tokens per second over {base.policy}, simulated, and their spread in {DRAWS} draws")
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title(title, fontsize=10)
    save(figure, path)
