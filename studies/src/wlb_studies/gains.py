"""Who gains: ``wlb check`` by model, context window and number of GPUs; of dense models, and of mixtures of experts.

Each system runs in its own fastest layout. Synthetic documents are enough for the steps of all draws without repeats.
A finished job is written to ``OUT/gains/`` and reused with the same settings, so an interrupted run continues.
"""

from collections.abc import Sequence
from functools import partial
from itertools import product

from wlb.documents.lengths import read_lengths
from wlb.documents.synthetic import sample_lengths
from wlb.errors import UserError
from wlb.job.job import Job
from wlb.simulate.estimate import estimate
from wlb.simulate.space import BATCH_TOKENS, search_space
from wlb.simulate.verdict import BALANCED, BASELINE, LEAST_GAIN, PER_DOCUMENT, usual_steps
from wlb.terminal import number_of
from wlb_studies.experiment import Column, Finding, Report, Settings, Table, Value, grouped_bars, stored
from wlb_studies.policies.layouts import layout_of

_K = 1024
MODELS = ("llama3-8b", "llama3-70b")
WINDOWS = (8 * _K, 16 * _K, 32 * _K, 64 * _K, 128 * _K)
GPUS = (8, 64, 256)
MIXTURES = ("qwen3-30b-a3b", "qwen3-235b-a22b", "gpt-oss-120b", "deepseek-v3")
MIXTURE_WINDOWS = (32 * _K, 128 * _K)
MIXTURE_GPUS = (64, 256)
_MIXTURE_BATCH = 128  # windows of a step, or 4M tokens if that is more, or 16K tokens for each GPU
_GPU_TOKENS = 2**14
_SYSTEMS = (BASELINE, PER_DOCUMENT, BALANCED)
_TOKENS_PER_WINDOW = 0.0195  # mean length of a document from ``sample_lengths``


def documents_of(window: int, batch_tokens: int) -> int:
    """Enough documents for the steps of a draw, including warm-up, with some to spare."""
    tokens = 2.2 * usual_steps(batch_tokens // window) * batch_tokens
    return int(tokens / (_TOKENS_PER_WINDOW * window))


def run(settings: Settings) -> Report:
    """Dense models."""
    jobs = [*product(MODELS, WINDOWS, GPUS)]
    return _report(settings, jobs, least_batch=1)


def mixtures(settings: Settings) -> Report:
    """Mixtures of experts; every system searches its own ep too."""
    return _report(settings, [*product(MIXTURES, MIXTURE_WINDOWS, MIXTURE_GPUS)], _MIXTURE_BATCH)


def _report(settings: Settings, jobs: Sequence[tuple[str, int, int]], least_batch: int) -> Report:
    rows: list[tuple[Value, ...]] = []
    for model, window, gpus in jobs:
        settings.on_progress(f"{model}, {window // _K}K, {gpus} GPUs")
        tokens = max(BATCH_TOKENS, least_batch * window, _GPU_TOKENS * gpus)
        find = partial(_row, settings, model, window, gpus, tokens)
        row = stored(settings, f"gains/{model}-{window // _K}k-{gpus}", find, tokens=tokens)
        rows.append((model, f"{window // _K}K", gpus, *(row or [None] * 8)))
    columns = (
        Column("model"),
        Column("window"),
        Column("GPUs", "", ".0f"),
        Column("plain-4d loses", "simulated", ".0%"),
        *(Column(name, "simulated", ".2f") for name in _SYSTEMS[1:]),
        Column("spread of the fastest", "simulated"),
        Column("balanced at equal work", "simulated", ".2f"),
        Column("recommended"),
        Column("plain-4d in"),
        Column("balanced in"),
    )
    kept = [row for row in rows if row[-3] == BASELINE]
    found = [row for row in rows if row[-3] is not None]
    places = [*dict.fromkeys(f"{window // _K}K\n{gpus} GPUs" for _, window, gpus in jobs)]
    models = dict.fromkeys(model for model, *_ in jobs)
    return Report(
        title="Tokens per second over plain-4d, each system in its own fastest layout: three draws together",
        documents=settings.lengths or "synthetic, as many as fill the steps",
        tables=[Table("by model, context window and GPUs", columns, rows)],
        draw=partial(
            grouped_bars,
            title="tokens per second over plain-4d, simulated",
            groups=places,
            series={name: [_number(row[5]) for row in rows if row[0] == name] for name in models},
            label="speedup of balanced over plain-4d",
        ),
        findings=[
            Finding(
                f"some jobs gain under {LEAST_GAIN:.0%} and should keep their setup",
                bool(kept),
                f"{len(kept)} of {len(found)} jobs",
            )
        ],
        notes=[
            f"{BATCH_TOKENS:,} tokens a step, at least {number_of(least_batch, 'window')} and {_GPU_TOKENS:,} a GPU; "
            f"H100 preset, seed {settings.seed}; draws are orders of the corpus",
            "no figure: no layout of these GPUs fits the model and the window",
        ],
    )


def _row(settings: Settings, model: str, window: int, gpus: int, batch_tokens: int) -> list[Value] | None:
    """What ``wlb check`` says of a job; None if the model does not fit these GPUs."""
    if settings.lengths is None:
        lengths = sample_lengths(documents_of(window, batch_tokens), window, settings.seed)
    else:
        lengths = read_lengths(settings.lengths)
    try:
        space = search_space(model, gpus, window, lengths, batch_tokens=batch_tokens)
        found = estimate(space, lengths, _SYSTEMS, settings.steps, source="synthetic")
    except UserError:
        return None
    verdict = found.verdict
    speeds = [verdict.speed(name) if name in verdict.systems else None for name in _SYSTEMS[1:]]
    low, high = verdict.spread(verdict.fastest)
    at_equal_work = verdict.speed_at_equal_work(BALANCED) if BALANCED in verdict.systems else None
    systems = found.verdict.systems
    places = [_place(systems[name].job) if name in systems else None for name in (BASELINE, BALANCED)]
    lost = sum(verdict.lost.values())
    return [lost, *speeds, f"{low:.2f} to {high:.2f}", at_equal_work, verdict.winner, *places]


def _place(job: Job) -> str:
    grouping = f" {job.packing.grouping}" if job.packing.is_balanced else ""
    again = "" if job.activation_checkpointing == "none" else f", recomputes {job.activation_checkpointing}"
    several = f", {windows} windows a micro-batch" if (windows := job.packing.micro_batch_windows) > 1 else ""
    return f"{layout_of(job)}{grouping}{several}{again}"


def _number(value: Value) -> float | None:
    return value if isinstance(value, float) else None
