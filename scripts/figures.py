"""Compute the figures of README and of the docs that take long, and write the tables that show them.

    .venv/bin/python scripts/figures.py            # everything: many hours, but an interrupted run continues
    .venv/bin/python scripts/figures.py validate   # one of RESULTS
    .venv/bin/python scripts/figures.py --tables   # nothing is computed: only the tables are written

Results are in ``studies/docs/results``. In its page a table stands between ``<!-- figures: NAME -->`` and
``<!-- end of figures -->``, and ``tests/test_figures.py`` checks that it shows the results. Short commands and their
output are in no table: the tests run every block of a page. ``scripts/pictures.py`` draws the pictures of docs/images.
"""

import json
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
DIRECTORY = ROOT / "studies" / "docs" / "results"
IMAGES = ROOT / "studies" / "docs" / "images"
WORK = ROOT / "results"  # where commands keep finished jobs, from which an interrupted run continues
_PAPER = ("speedups", "imbalance", "table2", "breakdown", "context-windows", "sharding", "kernel", "gains", "mixtures")
# Of each result: the command, its name there, and its picture in IMAGES.
RESULTS: dict[str, tuple[str, str, str | None]] = {
    "validate": ("wlb_studies validate", "published", "published.png"),
    **{name: (f"wlb_studies paper {name}", name, None) for name in _PAPER},
    "grid": ("wlb_studies paper grid", "grid", "rivals.png"),
    "convergence": ("wlb_studies paper convergence", "convergence", "convergence.png"),
    "calibration": ("studies.benchmarks.calibration --draws 3 --steps 16", "calibration", None),
    "step_sizes": ("studies.benchmarks.step_sizes", "step_sizes", None),
}
_JOB = re.compile(r"llama3-(\w+)-(\w+)-(\d+)(?:-(\w+))?")  # of the grid
_TABLE = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(\n<!-- end of figures -->)", re.DOTALL)


def compute(name: str) -> None:
    """Run the command of a result, and keep what the tables need of it."""
    command, written, picture = RESULTS[name]
    WORK.mkdir(exist_ok=True)
    file = WORK / f"{written}.json"
    out = WORK if command.startswith("wlb_studies ") else file
    subprocess.run([sys.executable, "-m", *command.split(), "--out", str(out)], check=True, cwd=ROOT)
    document = json.loads(file.read_text(encoding="utf-8"))
    if name == "validate":
        document["errors"] = _errors(document.pop("rows"))
    elif "rows" in document:
        document = {"rows": document["rows"]}  # without the machine, which matters to no simulation
    (DIRECTORY / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if picture is not None:
        shutil.copy(WORK / f"{written}.png", IMAGES / picture)


def _errors(rows: Iterable[dict[str, Any]]) -> dict[str, list[float]]:
    """Errors of all predictions, by repository and kind, or table where there is none."""
    found = defaultdict[str, list[float]](list)
    for row in rows:
        if row["predicted_seconds"] is not None and row["measured_seconds"] and not row["left_out"]:
            repository = row["source"].partition(" ")[0]
            error = row["predicted_seconds"] / row["measured_seconds"] - 1
            found[f"{repository}: {row['kind'] or row['table']}"].append(round(error, 4))
    return found


def result(name: str) -> Any:
    return json.loads((DIRECTORY / f"{name}.json").read_text(encoding="utf-8"))


def markdown(heading: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """A table whose first ``words`` columns are text, and the others numbers."""
    rule = "|".join([*["---"] * words, *["---:"] * (len(heading) - words)])
    lines = [f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in (heading, *rows)]
    return "\n".join([lines[0], f"|{rule}|", *lines[1:]])


def printed(name: str, places: Iterable[int], table: int = 0, words: int = 1) -> str:
    """Columns of a table as its command prints them."""
    of = result(name)["tables"][table]
    columns = [(place, of["columns"][place]) for place in places]
    heading = [one["name"] + ", quoted" * (one["kind"] == "quoted") for _, one in columns]
    rows = [[_cell(row[place], one["format"]) for place, one in columns] for row in of["rows"]]
    return markdown(heading, rows, words)


def _cell(value: Any, form: str) -> str:
    return value if isinstance(value, str) else "" if value is None else _signed(format(value, form))


def convergence() -> str:
    """Held-out loss and token delay of each method."""
    ends, orders, *_ = (table["rows"] for table in result("convergence")["tables"])
    rows = [
        (f"`{name}`", f"{loss:.3f} ± {spread:.3f}", "" if over is None else _signed(f"{over:+.1%}"), f"{order[2]:.2f}")
        for (name, *_, loss, spread, over, _), order in zip(ends, orders, strict=True)
    ]
    return markdown(("Method", "Held-out loss", "Over unpacked", "Token delay"), rows)


def benchmark(name: str, rows: dict[str, str], columns: dict[str, str]) -> str:
    """Rows of a benchmark under other names, and columns, whose cells are format strings."""
    of = {next(iter(one.values())): one for one in result(name)["rows"]}
    cells = [[said, *(form.format_map(of[row]) for form in columns.values())] for row, said in rows.items()]
    return markdown(["", *columns], cells)


def gains() -> str:
    """Speedups of balanced, and the advice where it is another one."""
    jobs = [("llama3-8b", 8), ("llama3-8b", 64), ("llama3-8b", 256), ("llama3-70b", 64), ("llama3-70b", 256)]
    return _by_window("gains", jobs, [f"{model.removeprefix('llama3-').upper()}, {gpus} GPUs" for model, gpus in jobs])


def mixtures() -> str:
    models = {
        "Qwen3 30B-A3B": "qwen3-30b-a3b",
        "Qwen3 235B-A22B": "qwen3-235b-a22b",
        "gpt-oss 120B": "gpt-oss-120b",
        "DeepSeek-V3": "deepseek-v3",
    }
    fitting = {
        (model, gpus) for model, _, gpus, lost, *_ in result("mixtures")["tables"][0]["rows"] if lost is not None
    }
    jobs = [(name, gpus) for name in models for gpus in (64, 256) if (models[name], gpus) in fitting]
    return _by_window("mixtures", [(models[name], n) for name, n in jobs], [f"{name}, {n} GPUs" for name, n in jobs])


def _by_window(name: str, jobs: Sequence[tuple[str, int]], headings: Sequence[str]) -> str:
    of = {(model, window, gpus): row for model, window, gpus, *row in result(name)["tables"][0]["rows"]}
    windows = dict.fromkeys(window for _, window, _ in of)
    rows = [[window, *(_gain(of[model, window, gpus]) for model, gpus in jobs)] for window in windows]
    return markdown(["window", *headings], rows)


def _gain(row: Sequence[Any]) -> str:
    _, sharding, speedup, _, _, advice, *_ = row
    if speedup is None:
        return ""
    notes = {"plain-4d": " *keep*", "per-document-4d": f" *sharding alone {sharding:.2f}*"}
    return f"{speedup:.2f}{notes.get(advice, '')}"


# Of each line of the table: who measured, what, and the groups of errors.
SOURCES = [
    ("llm-foundry", "MPT 125M to 70B, bf16, 8 to 512 A100 or H100", ["mosaicml/llm-foundry: dense, bf16"]),
    (
        "fms-fsdp",
        "Llama 2 7B to 70B, bf16, compiled or not, 96 to 128 A100 or H100",
        ["foundation-model-stack/fms-fsdp: dense"],
    ),
    ("torchtitan", "Llama 3, Qwen3 32B, bf16, 8 to 256 H100", ["pytorch/torchtitan: dense, bf16"]),
    (
        "Hugging Face",
        "Qwen3 0.6B to 8B, bf16, 1M to 4M tokens over 8 to 32 H100",
        [f"huggingface/{name}: dense, bf16" for name in ("accelerate", "transformers", "trl")],
    ),
    ("Megatron-Bridge", "Llama 3, FP8, H100 to GB300, 8 to 1,024 GPUs", ["NVIDIA-NeMo/Megatron-Bridge: dense, FP8"]),
    ("", "mixtures of experts, bf16 and FP8", ["NVIDIA-NeMo/Megatron-Bridge: mixture"]),
    (
        "NeMo",
        "GPT-3, Llama, Nemotron, bf16 and FP8, H100",
        ["NVIDIA/NeMo: dense", "NVIDIA/NeMo-Framework-Launcher: dense"],
    ),
    ("InternEvo", "InternLM 7B, bf16, 8 to 1,024 A100, older kernels", ["InternLM/InternEvo: dense, bf16"]),
    (
        "Automodel, Megatron-Bridge",
        "LoRA, 8B to 70B, H100 and newer",
        ["NVIDIA-NeMo/Automodel: LoRA", "NVIDIA-NeMo/Megatron-Bridge: LoRA"],
    ),
    ("transformers", "Qwen2.5 0.5B, three samplers, 2 RTX 5090", ["huggingface/transformers: padded samplers"]),
    (
        "Others",
        "mixtures of experts, bf16, H100 and B200",
        [
            f"{name}: mixture"
            for name in ("mlc-ai/pith-train", "yanring/Megatron-MoE-ModelZoo", "NVIDIA-NeMo/Automodel")
        ],
    ),
    ("DistCA", "plain data parallelism, 16 to 32 H200", ["hao-ai-lab/DistCA: measured batches: plain"]),
    ("", "WLB-LLM on the same data, 16 to 64 H200", ["hao-ai-lab/DistCA: measured batches: WLB-LLM"]),
    ("", "DistCA itself", ["hao-ai-lab/DistCA: measured batches: DistCA"]),
    (
        "VocabularyParallelism",
        "GPT 4B, FP16, pipelines of 8 A100, head on the last stage",
        ["sail-sg/VocabularyParallelism: pipeline, head on the last stage"],
    ),
    ("", "their stages of blocks: forward", ["sail-sg/VocabularyParallelism: stages of blocks, forward"]),
    ("", "their stages of blocks: backward", ["sail-sg/VocabularyParallelism: stages of blocks, backward"]),
    (
        "",
        "their last stages, with the head: forward",
        ["sail-sg/VocabularyParallelism: stages of blocks and head, forward"],
    ),
    (
        "",
        "their last stages, with the head: backward",
        ["sail-sg/VocabularyParallelism: stages of blocks and head, backward"],
    ),
    ("", "steps, from the measured stages", ["sail-sg/VocabularyParallelism: steps of measured stages"]),
]


def validation() -> str:
    errors, rows = result("validate")["errors"], []
    for who, what, groups in SOURCES:
        found = np.array([error for key, of in errors.items() if key.startswith(tuple(groups)) for error in of])
        within = float(np.quantile(abs(found), 0.9, method="higher"))
        rows.append((who, what, str(len(found)), _percent(float(np.median(found)), "+"), _percent(within)))
    return markdown(("Measured by", "What", "Rows", "Median", "90% of rows within"), rows, words=2)


def missing() -> str:
    rows = [one for one in result("validate")["summaries"] if one["by"] == "missing"]
    numbers = [
        (str(one["count"]), _percent(one["median_error"], "+"), _percent(one["median_absolute_error"])) for one in rows
    ]
    lines = sorted(zip((one["name"] for one in rows), numbers, strict=True), key=lambda line: -int(line[1][0]))
    return markdown(("Missing", "Rows", "Median", "Median absolute"), [(name, *of) for name, of in lines])


def ratios() -> str:
    (table,) = (one for one in result("validate")["tables"] if one["title"].startswith("predicted minus measured"))
    rows = [
        (kind, f"{pairs}", _signed(f"{median:+.1f}"), f"{size:.1f}", _signed(f"{worst:+.1f}"))
        for kind, pairs, median, size, worst in table["rows"]
    ]
    return markdown(("Systems", "Pairs", "Median", "Median absolute", "Worst"), rows)


def rivals() -> str:
    """Each synthetic job: ours, the fastest other, and the paper's policies, with the range of draws."""
    rows = []
    for name, of in _jobs(synthetic=True).items():
        (ours, least, most), others = (
            of["balanced"],
            {policy: one for policy, one in of.items() if policy != "balanced"},
        )
        ahead = max(others, key=lambda policy: others[policy][0])
        fastest, *spread = others[ahead]
        cells = [f"{ours:.2f}", f"{least:.2f} to {most:.2f}", f"`{ahead}`", f"{fastest:.2f}"]
        cells += ["{:.2f} to {:.2f}".format(*spread), f"{of['per-document-4d'][0]:.2f}", f"{of['wlb-llm'][0]:.2f}"]
        first = 0 if ours >= fastest else 3
        cells[first] = f"**{cells[first]}**"
        rows.append([name, *cells])
    heading = (
        "model, window, GPUs",
        "`balanced`",
        "draws",
        "fastest other",
        "",
        "draws",
        "`per-document-4d`",
        "`wlb-llm`",
    )
    return markdown(heading, rows)


def rivals_on_source() -> str:
    """Each policy on source code; the fastest of a job is bold."""
    jobs = _jobs(synthetic=False)
    policies = sorted({policy for of in jobs.values() for policy in of}, key=lambda policy: -_mean(jobs, policy))
    best = {name: max(of.values()) for name, of in jobs.items()}
    rows = []
    for policy in policies:
        cells = [(of.get(policy), best[name]) for name, of in jobs.items()]
        shown = ["" if one is None else f"**{one[0]:.2f}**" if one == most else f"{one[0]:.2f}" for one, most in cells]
        rows.append([f"`{policy}`", *shown])
    return markdown(["policy", *jobs], rows)


def _mean(jobs: dict[str, dict[str, Any]], policy: str) -> float:
    return float(np.mean([of[policy][0] if policy in of else 0.0 for of in jobs.values()]))


def _jobs(*, synthetic: bool) -> dict[str, dict[str, Any]]:
    """Of each job, by its name in a table: every policy's speedup, and its least and most in draws.

    Where documents wait, the speedup is that of the tables by model, at the work that ours trains with.
    """
    tables, found = result("grid")["tables"], {}
    speeds: dict[tuple[str, str], float] = {}
    for table in tables:
        if (model := table["title"].partition(",")[0]) in ("llama3-8b", "llama3-70b"):
            names = [column["name"] for column in table["columns"]]
            for policy, *row in table["rows"]:
                speeds |= {(f"{model}-{name}", policy): speed for name, speed in zip(names[1:], row, strict=True)}
    for table in tables:
        if named := _JOB.fullmatch(table["title"]):
            model, window, gpus, source = named.groups()
            if synthetic == (source is None):
                job = f"{model.upper()}, {window.upper()}, {source or f'{int(gpus):,}'}"
                rows = ((policy, least, most) for policy, _, _, least, most, *_ in table["rows"])
                found[job] = {policy: (speeds[table["title"], policy], *spread) for policy, *spread in rows}
    return found


def _percent(value: float, sign: str = "") -> str:
    """Two digits, as far as they are before the point or after it."""
    return _signed(f"{value:{sign}.{0 if abs(value) >= 0.0995 else 1}%}")


def _signed(text: str) -> str:
    return text.replace("-", "\u2212")


TABLES: dict[str, Callable[[], str]] = {
    "gains": gains,
    "mixtures": mixtures,
    "validation": validation,
    "missing": missing,
    "ratios": ratios,
    "rivals": rivals,
    "rivals-on-source": rivals_on_source,
    "speedups": partial(printed, "speedups", (0, 1, *range(3, 9))),
    "largest": partial(printed, "speedups", (0, 2, 1), table=1, words=2),
    "paper-layouts": partial(printed, "speedups", (0, *range(2, 11)), table=2),
    "imbalance": partial(printed, "imbalance", range(6)),
    "table2": partial(printed, "table2", range(3)),
    "breakdown": partial(printed, "breakdown", range(4)),
    "context-windows": partial(printed, "context-windows", range(8)),
    "sharding": partial(printed, "sharding", range(4), table=1),
    "kernel": partial(printed, "kernel", range(3)),
    "convergence": convergence,
    "calibration": partial(
        benchmark,
        "calibration",
        {
            "attention x0.6": "attention takes 0.6 of the predicted time (64 GPUs)",
            "1 of 32 GPUs 10% slow": "1 of 32 GPUs 10% slow",
        },
        {"Not calibrated": "{without:.1%}", "Calibrated": "{calibrated:.1%}", "Least possible": "{least:.1%}"},
    ),
    "step-sizes": partial(
        benchmark,
        "step_sizes",
        {name: name for name in ("balanced", "wlb-llm", "plain-4d")},
        {
            "Global batches in a step": "{least:.2f} to {most:.2f}",
            "Tokens of cut documents": "{cut_share:.0%}",
            "Token delay, steps": "{token_delay:.2f}",
            "Imbalance": "{imbalance:.2f}",
        },
    ),
}
PAGES = (
    "README.md",
    "docs/presets.md",
    "docs/workload.md",
    *(f"studies/docs/{name}.md" for name in ("validate", "rivals", "paper")),
)


def written(page: str) -> str:
    """The page with its tables from the results."""
    return _TABLE.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n{found[3]}", page)


def main(arguments: Sequence[str]) -> None:
    if unknown := {*arguments} - {*RESULTS, "--tables"}:
        sys.exit(f"{', '.join(sorted(unknown))} is no result; choose some of {', '.join(RESULTS)}, or --tables")
    for name in [] if "--tables" in arguments else arguments or RESULTS:
        compute(name)
    for name in PAGES:
        page = (ROOT / name).read_text(encoding="utf-8")
        (ROOT / name).write_text(written(page), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
