"""Level steps against the ideal: even ranks that exchange nothing.

Each job runs in the layout without a pipeline in which level steps are fastest, among the layouts of policies without
fixed groups. The same layout also runs level steps planned as if all ranks were on one node, and the trainer's
lock-step pools.
"""

from dataclasses import replace
from functools import partial
from itertools import islice

from wlb.documents.segments import Segment
from wlb.errors import UserError
from wlb.job.job import Job
from wlb.job.memory.fit import fits
from wlb.job.prices import LevelPrices
from wlb.packing.level import level_groups
from wlb.packing.plan import MicroBatch, StageRanks, StepPlan
from wlb.simulate.decide import decide
from wlb.simulate.job import preset_sections
from wlb.simulate.rate import rate, simulate_steps
from wlb.simulate.space import SearchSpace, search_space
from wlb_studies.experiment import Column, Report, Settings, Table, grouped_bars
from wlb_studies.policies.grid import BATCH_TOKENS, DOCUMENTS, K, RivalJob, documents_of
from wlb_studies.policies.layouts import candidate_ranks, no_layout
from wlb_studies.policies.plan import Integers
from wlb_studies.policies.policy import batches_of
from wlb_studies.policies.pricing import ideal_seconds

JOBS = (
    *(RivalJob("llama3-8b", 64, window * K) for window in (128, 256, 1024)),
    *(RivalJob("llama3-8b", 1024, window * K) for window in (128, 512, 1024)),
    RivalJob("llama3-70b", 1024, 1024 * K),
)
_PICTURED = ("8b-128k-64", "8b-256k-64", "8b-128k-1024", "70b-1m-1024")
_STEPS = 2
_POOLS = {"even pools": "even"}


def run(settings: Settings) -> Report:
    shares: dict[str, list[float | None]] = {}
    for job in JOBS:
        settings.on_progress(job.name)
        for name, share in _shares(job, settings).items():
            shares.setdefault(name, []).append(share)
    names = [job.name.removeprefix("llama3-") for job in JOBS]
    return Report(
        title="Level steps",
        documents=settings.lengths or f"synthetic, {DOCUMENTS:,} documents that grow with the window",
        tables=[
            Table(
                "seconds of steps with even ranks and no exchange, over seconds of level steps",
                (Column("steps"), *(Column(name, "simulated") for name in names)),
                [(name, *of_jobs) for name, of_jobs in shares.items()],
            )
        ],
        draw=partial(
            grouped_bars,
            title="level steps, simulated",
            groups=[name.replace(" ", "\n") for name in shares],
            series={name: [of_jobs[names.index(name)] for of_jobs in shares.values()] for name in _PICTURED},
            label="share of the ideal speed",
            origin=0.0,
        ),
        notes=[
            f"{settings.steps or _STEPS} steps of {BATCH_TOKENS:,} tokens, H100 preset, all rows of a job in one "
            "layout without a pipeline; the ideal is taken in the layout in which it is fastest",
            "on any node: groups are planned as if all ranks lay on one node",
            "pools: in lock step, of the size and number of micro-batches that the trainer decides",
        ],
    )


def _shares(job: RivalJob, settings: Settings) -> dict[str, float | None]:
    """Share of the ideal speed for each kind of step."""
    steps = settings.steps or _STEPS
    space = search_space(job.model, job.gpus, job.context_window, batch_tokens=BATCH_TOKENS)
    lengths = documents_of(job, settings)
    batches = [*islice(batches_of(lengths, space), steps)]
    ideal = _ideal(space, batches)
    ranks, level = _fastest(space, lengths, batches[0])
    stage = level.stage_ranks
    return {
        "level": ideal / _seconds(level, stage, batches),
        "level, on any node": ideal / _seconds(level, replace(stage, per_node=stage.count), batches),
    } | {name: _pooled(ranks, space, lengths, batches, grouping, ideal) for name, grouping in _POOLS.items()}


def _ideal(space: SearchSpace, batches: list[Integers]) -> float:
    layouts = candidate_ranks(space, batches[0])
    return sum(min(ideal_seconds(batch, ranks) for ranks in layouts) for batch in batches)


def _fastest(space: SearchSpace, lengths: Integers, batch: Integers) -> tuple[Job, Job]:
    """The layout in which level steps are fastest, and the job in it."""
    fitting = []
    for ranks in candidate_ranks(space, batch, pipelines=False, handlings=("kept",)):
        try:
            job = _decided(ranks.job, space, lengths, "level")
        except UserError:
            continue  # more ranks than a group may have
        if fits(job):
            fitting.append((ranks.job, job))
    if not fitting:
        raise no_layout("balanced without a pipeline", space)
    return min(fitting, key=lambda pair: _seconds(pair[1], pair[1].stage_ranks, [batch]))


def _decided(layout: Job, space: SearchSpace, lengths: Integers, grouping: str) -> Job:
    """The job with the dp ranks of ``layout`` in pools. Raises ``UserError`` if the trainer cannot run it."""
    options = {"global_batch": space.global_batch, "grouping": grouping}
    packing, sharding = preset_sections("balanced", options)
    return decide(replace(layout, packing=packing, sharding=sharding), lengths)


def _seconds(job: Job, stage: StageRanks, batches: list[Integers]) -> float:
    """Share of level steps of ``job`` that train ``batches``, planned for the ranks of ``stage``."""
    return sum(float(simulate_steps([_plan(job, stage, batch)], job).seconds[0]) for batch in batches)


def _plan(job: Job, stage: StageRanks, batch: Integers) -> StepPlan:
    assert isinstance(job.packing_prices, LevelPrices)
    groups = level_groups(batch, -(-job.max_tokens // stage.count), job.packing_prices, stage)
    micro_batches = (
        MicroBatch(
            tuple(Segment(document, 0, int(batch[document])) for document in group.documents),
            group.seconds * len(group.ranks),
            group.ranks,
        )
        for group in groups
    )
    return StepPlan(0, (tuple(micro_batches),))


def _pooled(
    layout: Job, space: SearchSpace, lengths: Integers, batches: list[Integers], grouping: str, ideal: float
) -> float | None:
    """Share of the ideal speed that pools reach, for the same work."""
    job = _decided(layout, space, lengths, grouping)
    if not fits(job):
        return None
    work = sum(float(space.work_prices.document_seconds(batch).sum()) for batch in batches)
    return rate(job, lengths, len(batches), space.work_prices).work_rate * ideal / work
