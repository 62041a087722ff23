"""Draw every picture in docs/images, and print the figures in them.

    .venv/bin/python scripts/pictures.py [FOLDER]

``make demo`` measures and draws demo.png, which is copied if it is there. report.png needs Chromium; the others only
what WLB needs. Computing is blue-grey and waiting is red. Text stays readable when a phone shows a picture 390 pixels
wide.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
from matplotlib.image import imread, imsave

from wlb.sharding import make_shard_plan
from wlb.workload import make_workload
from wlb_studies.sharding import shard_latency

ROOT = Path(__file__).resolve().parent.parent
WIDTH, MARGIN = 640, 20
STYLE = """
    text { fill: #1b2733; font-size: 18px }
    .paper { fill: #ffffff } .long, .rank0 { fill: #4f6f8f } .short { fill: #a9bdd0 } .rank1 { fill: #b4c6d6 }
    .wait { fill: #e03131 } .loud { fill: #c92a2a; font-weight: bold } .inverse { fill: #ffffff; font-weight: bold }
    .bold { font-weight: bold } .mono { font-family: Menlo, Consolas, monospace; font-weight: bold; font-size: 20px }
    .middle { text-anchor: middle } .end { text-anchor: end }
    polygon, .block { stroke: #ffffff; stroke-width: 1.5 } .axis { stroke: #6b7a89 } .grid { stroke: #d5dce3 }
    .room { stroke: #4f6f8f; stroke-width: 1.5 } .plan { fill: #e6edf4 } .torch { fill: #4f6f8f }
    .ground { fill: #f3f5f7; stroke: #8a97a5 } .name { font-weight: bold; font-size: 20px }
    .light { fill: #ffffff }"""


class Chunk(NamedTuple):
    """Tokens ``start`` to ``stop`` of a document."""

    name: str
    start: float
    stop: float

    @property
    def work(self) -> float:
        """Keys that its tokens attend, and OTHER for everything else that a token costs."""
        return OTHER * (self.stop - self.start) + (self.stop**2 - self.start**2) / 2


OTHER = 6.0
LENGTHS = {"A": 14, "B": 5, "C": 4, "D": 3, "E": 3, "F": 3, "G": 15, "H": 5, "I": 4, "J": 3, "K": 3, "L": 2}
Steps = Sequence[tuple[Sequence[Chunk], Sequence[Chunk]]]  # the chunks of both ranks in each step


def whole(names: str) -> list[Chunk]:
    return [Chunk(name, 0, LENGTHS[name]) for name in names]


def head_tail(names: str, rank: int) -> list[Chunk]:
    """A rank's two of the four chunks of each document, next to each other."""
    found = []
    for name in names:
        quarter = LENGTHS[name] / 4
        chunks = [(0, 1), (3, 4)] if rank == 0 else [(1, 3)]
        found += [Chunk(name, first * quarter, last * quarter) for first, last in chunks]
    return found


PLAIN: Steps = [
    ([*whole("A"), Chunk("B", 0, 2)], [Chunk("B", 0, 3), *whole("CDEF")]),
    ([*whole("G"), Chunk("H", 0, 1)], [Chunk("H", 0, 4), *whole("IJKL")]),
]
OURS: Steps = [
    ([*head_tail("AB", 0), *whole("CD")], [*head_tail("AB", 1), *whole("EF")]),
    ([*head_tail("GH", 0), *whole("IL")], [*head_tail("GH", 1), *whole("JK")]),
]


def idea(folder: Path) -> str:
    """Twelve documents on two ranks, as plain-4d and as balanced run them, on one time axis."""
    scale = (WIDTH - 2 * MARGIN) / sum(LENGTHS.values())
    parts = [text(MARGIN, 34, "Twelve documents, A to L, for two steps", "bold")]
    parts.append(text(MARGIN, 58, "Width: tokens. Area: work (attention and the rest)."))
    x, floor, high = float(MARGIN), 172.0, 4.3
    for name, length in LENGTHS.items():
        left, right = floor - OTHER * high, floor - (OTHER + length) * high
        end = x + scale * length
        parts += [shape([(x, floor), (x, left), (end, right), (end, floor)], kind(name))]
        parts += [text((x + end) / 2, floor - 6, name, "middle inverse" if kind(name) == "long" else "middle bold")]
        x = end
    taken = {name: total(steps) for name, steps in (("plain-4d", PLAIN), ("balanced", OURS))}
    unit = (WIDTH - MARGIN - 84) / max(taken.values())
    parts += gantt("plain-4d", "cuts B and H where a window ends", PLAIN, 216, unit)
    parts += gantt("balanced", "shares A, B, G and H between the ranks", OURS, 378, unit)
    parts += [f'<line class="axis" x1="84" y1="528" x2="{WIDTH - MARGIN}" y2="528"/>']
    parts.append(text(84, 552, "time"))
    parts += ['<rect class="wait" x="180" y="538" width="18" height="18"/>', text(204, 553, "waiting")]
    speed = taken["plain-4d"] / taken["balanced"]
    parts.append(text(WIDTH - MARGIN, 553, f"balanced: {speed:.2f}x as fast", "end bold"))
    write(
        folder / "idea.svg",
        570,
        "Twelve documents, A to L, trained in two steps by two ranks. A and G, the longest, are over half of the work. "
        "Under plain-4d rank 1 waits for rank 0 in both steps. Under balanced both ranks share A, B, G and H, and "
        f"finish almost together: {speed:.2f} times as fast.",
        parts,
    )
    return f"balanced {speed:.2f}x as fast"


def kind(name: str) -> str:
    return "long" if name in "AG" else "short"


def ends(step: tuple[Sequence[Chunk], Sequence[Chunk]]) -> list[float]:
    return [sum(chunk.work for chunk in rank) for rank in step]


def total(steps: Steps) -> float:
    return sum(max(ends(step)) for step in steps)


def gantt(preset: str, does: str, steps: Steps, top: float, unit: float) -> list[str]:
    """Rows of two ranks, in which a block is as wide as its work."""
    parts = [text(MARGIN, top, preset, "mono"), text(MARGIN + 110, top, does)]
    parts += [text(MARGIN, top + 43 + 46 * rank, f"rank {rank}") for rank in range(2)]
    began = 0.0
    for number, step in enumerate(steps):
        longest = max(ends(step))
        for rank, chunks in enumerate(step):
            x, y = 84 + unit * began, top + 18 + 46 * rank
            for name in dict.fromkeys(chunk.name for chunk in chunks):
                width = unit * sum(chunk.work for chunk in chunks if chunk.name == name)
                parts.append(box(x, y, width, 38, f"block {kind(name)}"))
                shown = "inverse" if kind(name) == "long" else "bold"
                if width > 18:
                    parts.append(text(x + width / 2, y + 26, name, f"middle {shown}"))
                x += width
            left = 84 + unit * (began + longest) - x
            if left > 1:
                parts.append(box(x, y, left, 38, "block wait"))
                if left > 70:
                    parts.append(text(x + left / 2, y + 25, "waiting", "middle inverse"))
        began += longest
        x = 84 + unit * began
        parts.append(f'<line class="axis" x1="{x:.1f}" y1="{top + 10}" x2="{x:.1f}" y2="{top + 110}"/>')
        parts.append(text(x - 6, top + 126, f"step {number + 1} ends", "end"))
    return parts


DOCUMENTS = (73_728, 24_576, 16_384, 12_288, 4_096)
STRATEGIES = {
    "per_sequence": "cuts the window into four chunks",
    "per_document": "cuts every document into four chunks",
    "balanced": "keeps short documents whole",
}


def sharding(folder: Path) -> str:
    """One window over two context-parallel ranks, as three strategies divide it."""
    workload = make_workload("llama3-8b", "h100")
    gap = 5.0
    scale = (WIDTH - 2 * MARGIN - gap * (len(DOCUMENTS) - 1)) / sum(DOCUMENTS)
    lefts = [MARGIN + scale * sum(DOCUMENTS[:n]) + gap * n for n in range(len(DOCUMENTS))]
    plans = {name: make_shard_plan(DOCUMENTS, 2, name, workload=workload) for name in STRATEGIES}
    prices = {name: shard_latency(plan, workload) for name, plan in plans.items()}
    unit = (WIDTH - 2 * MARGIN - 64 - 80) / max(price.slowest for price in prices.values())
    parts = [text(MARGIN, 34, "Five documents in a window of 128K, on two ranks", "bold")]
    parts += [text(MARGIN, 60, "Width: tokens. Height: keys a token attends. Area: attention.")]
    parts += [text(MARGIN, 86, "Bars: simulated seconds of Llama 3 8B on H100, to one scale.")]
    legend = {"rank0": (0, "rank 0"), "rank1": (110, "rank 1"), "wait": (220, "waiting for the other rank, or for K/V")}
    for kind_of_bar, (x, name) in legend.items():
        parts += [box(MARGIN + x, 104, 18, 18, kind_of_bar), text(MARGIN + x + 26, 119, name)]
    top = 162.0
    for name, does in STRATEGIES.items():
        parts += [text(MARGIN, top, name, "mono"), text(MARGIN + 165, top, does)]
        floor = top + 88
        for rank, pieces in enumerate(plans[name].pieces):
            for document, start, stop in pieces.tolist():
                x, high = lefts[document], 74 / DOCUMENTS[0]
                a, b = x + scale * start, x + scale * stop
                outline = [(a, floor), (a, floor - high * start), (b, floor - high * stop), (b, floor)]
                parts.append(shape(outline, f"rank{rank}"))
        price = prices[name]
        for rank, busy in enumerate((price.attention + price.linear).tolist()):
            y = floor + 10 + 26 * rank
            parts += [text(MARGIN, y + 17, f"rank {rank}"), box(MARGIN + 64, y, unit * busy, 22, f"rank{rank}")]
            parts += [box(MARGIN + 64 + unit * busy, y, unit * (price.slowest - busy), 22, "wait")]
        parts += [text(MARGIN + 72 + unit * price.slowest, floor + 41, f"{price.slowest:.1f} s", "bold")]
        parts += [text(MARGIN, floor + 84, f"{plans[name].kv_gather_fraction:.0%} of keys and values are exchanged")]
        top = floor + 130
    seconds = ", ".join(f"{name} {price.slowest:.1f} s" for name, price in prices.items())
    write(
        folder / "sharding.svg",
        top - 24,
        "Five documents of 72K, 24K, 16K, 12K and 4K tokens on two context-parallel ranks. Simulated seconds of "
        f"Llama 3 8B on H100: {seconds}.",
        parts,
    )
    return seconds


CURVES = {
    "qwen3-30b-a3b": "#1f4e79",
    "deepseek-v3": "#3b8fc4",
    "llama3-8b": "#2f7d6b",
    "llama3-70b": "#7b5ea7",
    "llama3-405b": "#b35c1e",
    "gemma3-27b": "#8a7a1f",
    "mistral-7b": "#5c6670",
}


def attention_share(folder: Path) -> str:
    """How much of a document's seconds is attention, by its length, for models of several kinds."""
    left, right, top, bottom = 66, 464, 84, 420
    lengths = 1024 * 2 ** np.linspace(0, 10, 41)
    x = np.linspace(left, right, len(lengths))
    parts = [text(MARGIN, 34, "Attention's share of the time for one document", "bold")]
    parts.append(text(MARGIN, 58, "simulated, one H100, forward and backward"))
    for share in (0, 0.25, 0.5, 0.75, 1):
        level = bottom - share * (bottom - top)
        parts += [f'<line class="grid" x1="{left}" x2="{right}" y1="{level}" y2="{level}"/>']
        parts.append(text(left - 8, level + 6, f"{share:.0%}", "end"))
    for doubling, name in ((0, "1K"), (2, "4K"), (4, "16K"), (6, "64K"), (8, "256K"), (10, "1M")):
        parts.append(text(left + (right - left) * doubling / 10, bottom + 26, name, "middle"))
    parts.append(text((left + right) / 2, bottom + 52, "tokens in the document", "middle"))
    shares = {}
    for name, colour in CURVES.items():
        workload = make_workload(name, "h100")
        shown = workload.attention_seconds(lengths) / workload.document_seconds(lengths)
        heights = (bottom - shown * (bottom - top)).tolist()
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, heights, strict=True))
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="3" points="{points}"/>')
        shares[name] = float(workload.attention_seconds(131_072) / workload.document_seconds(131_072)), heights[-1]
    labels = apart([end for _, end in shares.values()], 24)
    for (name, colour), label in zip(CURVES.items(), labels, strict=True):
        parts.append(f'<text x="{right + 10}" y="{label + 6:.1f}" style="fill:{colour};font-weight:bold">{name}</text>')
    listed = ", ".join(f"{name} {share:.0%}" for name, (share, _) in shares.items())
    described = f"Attention's share of the time for a document of 128K tokens: {listed}."
    write(folder / "attention-share.svg", bottom + 70, described, parts)
    return f"of 128K tokens: {listed}"


HOUSE = (
    (("cli · integrations · shadow_mode", "commands and frameworks", "plan"),),
    (("report", "HTML and pictures", "plan"), ("training · profiling", "run and measure jobs", "torch")),
    (("simulate", "seconds of a step", "plan"), ("models · runtime · attention", "run the plans", "torch")),
    (("job", "configuration, prices, steps, memory: shared by both sides", "plan"),),
    (("packing", "documents → StepPlan", "plan"), ("sharding", "micro-batch → ShardPlan", "plan")),
    (
        ("documents", "stores, lengths", "plan"),
        ("schedules", "pipeline order", "plan"),
        ("workload", "prices, links", "plan"),
    ),
    (("errors · files · settings · token_count", "lightest · os_limits · terminal", "ground"),),
)


def house(folder: Path) -> str:
    """The packages of src/wlb, each above what it imports."""
    parts = [text(MARGIN, 34, "without torch"), text(WIDTH - MARGIN, 34, "with torch", "end")]
    for floor, rooms in enumerate(HOUSE):
        width = (WIDTH - 2 * MARGIN + 20) / len(rooms)
        for place, (name, holds, classes) in enumerate(rooms):
            parts += room(MARGIN + place * width, 48 + 80 * floor, width - 20, 68, classes, name, holds)
    label = (
        "The packages of src/wlb, each above what it imports. Packages on the left and the lower half never import "
        "torch."
    )
    write(folder / "house.svg", 56 + 80 * len(HOUSE), label, parts)
    return ""


def architecture(folder: Path) -> str:
    """How documents become plans, and who runs them."""
    left, right, wide = MARGIN, 330, 290
    parts = [
        *room(left, 20, wide, 72, "ground", "documents", "only lengths are read"),
        *room(right, 20, wide, 72, "ground", "workload model", "seconds per document"),
        box(MARGIN, 130, WIDTH - 2 * MARGIN, 152, "room plan"),
        text(WIDTH / 2, 160, "Every rank computes the same plan. No torch.", "middle"),
        *room(36, 180, 180, 84, "paper", "pack", "micro-batches"),
        *room(230, 180, 180, 84, "paper", "arrange", "ranks, order"),
        *room(424, 180, 180, 84, "paper", "shard", "cp ranks"),
        *room(left, 322, wide, 112, "plan", "simulate", "wlb check, simulate, report:", "gain on N GPUs"),
        *room(right, 322, wide, 112, "torch", "train", "your trainer,", "or wlb train (torch)"),
        *(part for x in (165, 475) for y in (92, 282) for part in arrow(x, y, x, y + 38)),
        *(part for x in (216, 410) for part in arrow(x, 222, x + 14, 222)),
    ]
    label = (
        "WLB reads document lengths and a workload model. It packs documents into micro-batches, arranges these on "
        "ranks, and shards them over context-parallel ranks. The plan goes to the simulator, to your trainer or to wlb "
        "train."
    )
    write(folder / "architecture.svg", 454, label, parts)
    return ""


JOB = ("synthetic:20000:128K:0",)  # that of README and docs/check.md
TALLEST = 2000  # pixels of the top of a report


def report(folder: Path) -> str:
    """The top of the report on README's job, as a browser shows it on a narrow screen."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        return "left as it was: no chromium or google-chrome on the PATH"
    path = folder / "report.png"
    with TemporaryDirectory() as made:
        page = Path(made, "report.html")
        command = [sys.executable, "-m", "wlb", "report", *JOB, "--out", str(page), "--json"]
        said = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        page.write_text(page.read_text(encoding="utf-8").partition("<section")[0], encoding="utf-8")
        options = (
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={made}/browser",
        )
        shown = (f"--window-size=500,{TALLEST}", f"--screenshot={path.resolve()}", page.as_uri())
        subprocess.run([browser, *options, *shown], check=True, capture_output=True)
    pixels = imread(path)
    drawn = np.flatnonzero((pixels != pixels[-1]).any(axis=(1, 2)))
    imsave(path, pixels[: drawn[-1] + MARGIN])
    return str(said["verdict"])


def demo(folder: Path) -> str:
    """One measured step of each preset."""
    measured = ROOT / "demo" / "demo.png"
    if not measured.exists():
        return "left as it was: `make demo` draws it"
    shutil.copy(measured, folder / "demo.png")
    return "as `make demo` printed"


def room(x: float, y: float, width: float, height: float, classes: str, name: str, *lines: str) -> list[str]:
    """A box with its name and what it holds."""
    light = " light" if classes == "torch" else ""
    middle, first = x + width / 2, y + (height - 24 * len(lines)) / 2 + 7
    below = [text(middle, first + 24 * (n + 1), line, "middle" + light) for n, line in enumerate(lines)]
    return [box(x, y, width, height, f"room {classes}"), text(middle, first, name, "middle name" + light), *below]


def arrow(x: float, y: float, to_x: float, to_y: float) -> list[str]:
    """From one box to the next, to the right or down."""
    back, aside = (9, 0) if to_x > x else (0, 9), (0, 6) if to_x > x else (6, 0)
    tip = [(to_x, to_y), *((to_x - back[0] + n * aside[0], to_y - back[1] + n * aside[1]) for n in (-1, 1))]
    line = f'<line class="axis" x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}"/>'
    return [line, shape(tip, "rank0")]


def apart(places: Sequence[float], least: float) -> list[float]:
    """The places, in order from the top, moved down where two are closer than ``least``."""
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + least) if moved else place)
    return moved


def text(x: float, y: float, content: str, classes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{classes}">{content}</text>'


def box(x: float, y: float, width: float, height: float, classes: str) -> str:
    return f'<rect class="{classes}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'


def shape(corners: Iterable[tuple[float, float]], classes: str) -> str:
    return f'<polygon class="{classes}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in corners)}"/>'


def write(path: Path, height: float, label: str, parts: Iterable[str]) -> None:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" '
        f'viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{label}" '
        'font-family="Helvetica, Arial, sans-serif">'
    )
    paper = f'<rect class="paper" width="{WIDTH}" height="{height:.0f}" rx="8"/>'
    lines = [head, f"  <style>{STYLE}\n  </style>", *(f"  {part}" for part in (paper, *parts)), "</svg>"]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


PICTURES: dict[str, Callable[[Path], str]] = {
    "idea.svg": idea,
    "house.svg": house,
    "architecture.svg": architecture,
    "sharding.svg": sharding,
    "attention-share.svg": attention_share,
    "demo.png": demo,
    "report.png": report,
}

if __name__ == "__main__":
    into = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images"
    into.mkdir(parents=True, exist_ok=True)
    for picture, draw in PICTURES.items():
        print(f"{picture}  {draw(into)}".rstrip())
