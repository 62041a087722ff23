"""Who gains: ``wlb check`` by model, context window (8K to 128K) and number of GPUs (8 to 256).

Each system runs in its own fastest layout, on enough documents for the steps of all draws without repeats.
"""

from functools import partial
from itertools import product

from wlb.documents.synthetic import sample_lengths
from wlb.errors import UserError
from wlb.simulate.estimate import estimate
from wlb.simulate.space import BATCH_TOKENS, search_space
from wlb.simulate.verdict import BALANCED, BASELINE, LEAST_GAIN, PER_DOCUMENT, usual_steps
from wlb_studies.experiment import Column, Finding, Report, Settings, Table, Value, grouped_bars

_K = 1024
MODELS = ("llama3-8b", "llama3-70b")
WINDOWS = (8 * _K, 16 * _K, 32 * _K, 64 * _K, 128 * _K)
GPUS = (8, 64, 256)
_SYSTEMS = (BASELINE, PER_DOCUMENT, BALANCED)
_TOKENS_PER_WINDOW = 0.0195  # mean length of a document from ``sample_lengths``


def documents_of(window: int) -> int:
    """Enough documents for the steps of a draw, including warm-up, with some to spare."""
    tokens = 2.2 * usual_steps(BATCH_TOKENS // window) * BATCH_TOKENS
    return int(tokens / (_TOKENS_PER_WINDOW * window))


def run(settings: Settings) -> Report:
    rows: list[tuple[Value, ...]] = []
    for model, window, gpus in product(MODELS, WINDOWS, GPUS):
        settings.on_progress(f"{model}, {window // _K}K, {gpus} GPUs")
        lengths = sample_lengths(documents_of(window), window, settings.seed)
        try:
            space = search_space(model, gpus, window, lengths, batch_tokens=BATCH_TOKENS)
            verdict = estimate(space, lengths, _SYSTEMS, settings.steps, source="synthetic").verdict
        except UserError:  # the model does not fit these GPUs
            rows.append((model, f"{window // _K}K", gpus, *[None] * 5))
            continue
        speeds = [verdict.speed(name) if name in verdict.systems else None for name in _SYSTEMS[1:]]
        low, high = verdict.spread(verdict.fastest)
        lost = sum(verdict.lost.values())
        rows.append((model, f"{window // _K}K", gpus, lost, *speeds, f"{low:.2f} to {high:.2f}", verdict.winner))
    columns = (
        Column("model"),
        Column("window"),
        Column("GPUs", "", ".0f"),
        Column("plain-4d loses", "simulated", ".0%"),
        *(Column(name, "simulated", ".2f") for name in _SYSTEMS[1:]),
        Column("spread of the fastest", "simulated"),
        Column("recommended"),
    )
    kept = [row for row in rows if row[-1] == BASELINE]
    found = [row for row in rows if row[-1] is not None]
    return Report(
        title="Tokens per second over plain-4d, each system in its own fastest layout: three draws together",
        documents="synthetic, as many as fill the steps",
        tables=[Table("by model, context window and GPUs", columns, rows)],
        draw=partial(
            grouped_bars,
            title="tokens per second over plain-4d, simulated",
            groups=[f"{window}\n{gpus} GPUs" for _, window, gpus, *_ in rows[: len(WINDOWS) * len(GPUS)]],
            series={f"{model}, balanced": [_number(row[5]) for row in rows if row[0] == model] for model in MODELS},
            label="speedup over plain-4d",
        ),
        findings=[
            Finding(
                f"some jobs gain under {LEAST_GAIN:.0%} and should keep their setup",
                bool(kept),
                f"{len(kept)} of {len(found)} jobs",
            )
        ],
        notes=[
            f"{BATCH_TOKENS:,} tokens a step, H100 preset, seed {settings.seed}; draws are orders of the corpus",
            "no figure: no layout of these GPUs fits the model and the window",
        ],
    )


def _number(value: Value) -> float | None:
    return value if isinstance(value, float) else None
