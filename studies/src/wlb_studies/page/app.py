"""The page, which Streamlit runs from top to bottom whenever a choice changes; it stops a run that is not done."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import streamlit as st

from wlb.errors import UserError
from wlb.report.answer import about, columns_of
from wlb.report.timeline import Timeline
from wlb.simulate.verdict import PARTS, Verdict
from wlb.workload import HARDWARE, MODEL_SHAPES
from wlb_studies.page.answer import Answer, Asked, computed

GREEN, RED = "#1b9e6b", "#d64545"
COLOURS = dict(zip(PARTS, (RED, "#ee8a3c", "#f0c04a", "#8aa0b5", "#a78bbf", GREEN), strict=True))
COMPUTING, WAITING = "computing", "waiting or communicating"
AUTO = "auto"  # assumed as in ``wlb check``
WINDOWS = [AUTO, "4K", "8K", "16K", "32K", "64K", "128K", "256K", "512K", "1M"]
BATCHES = [AUTO, "1M", "2M", "4M", "8M", "16M", "32M"]
FILES = ["json", "jsonl", "csv", "tsv", "parquet", "txt", "npy"]
MOST_RANKS = 16  # of a step
BAR_HEIGHT, RANK_HEIGHT, NAME_HEIGHT = 18, 11, 24  # pixels


def asked_of_user() -> Asked:
    """The job as the inputs have it; the address of the page holds it too."""
    kept: dict[str, Any] = {"bind": "query-params"}
    models, machines, powers = [*MODEL_SHAPES], [*HARDWARE], [2**power for power in range(14)]
    with st.sidebar:
        lengths = st.text_input("Document lengths", "synthetic:20000:128K:0", key="lengths", **kept)
        st.caption("A file, a token store or synthetic:DOCUMENTS:WINDOW:SEED. Nothing leaves this machine.")
        dropped = st.file_uploader("Or drop a file of lengths", FILES, max_upload_size=64)
        usual = models.index("llama3-8b")
        options = {
            "--model": st.selectbox("Model", models, usual, key="model", accept_new_options=True, **kept),
            "--hardware": st.selectbox("Hardware", machines, machines.index("h100"), key="hardware", **kept),
            "--gpus": str(st.select_slider("GPUs", powers, 64, key="gpus", **kept)),
            "--context-window": st.select_slider("Context window, tokens", WINDOWS, key="window", **kept),
            "--batch-tokens": st.select_slider("Global batch, tokens per step", BATCHES, key="batch", **kept),
        }
    given = {option: value for option, value in options.items() if value != AUTO}
    return Asked(lengths, given) if dropped is None else Asked(Path(dropped.name).name, given, dropped.getvalue())


@st.cache_data(max_entries=64, show_spinner="Simulating every system in its fastest layout", show_time=True)
def answered(asked: Asked, at: float) -> Answer:
    """The answer to a question, asked ``at`` some time where the file may have changed since it was last asked."""
    # Where a choice has changed, Streamlit ends the run that next asks for its state.
    return computed(asked, while_waiting=lambda: st.session_state.get("gpus"))


def show(answer: Answer, asked: Asked) -> None:
    """The verdict, and what it is made of."""
    found, verdict = answer.found, answer.found.verdict
    st.info(str(verdict))
    with st.container(horizontal=True):
        st.metric(f"Speed of {verdict.fastest}", f"{verdict.speed(verdict.fastest):.2f}x", width="content")
        st.metric("Delay, steps", f"{verdict.token_delay(verdict.fastest):.2f}", width="content")
        st.metric("GPU-hours saved a day", f"{found.gpu_hours_a_day:,.0f}", width="content")
    st.subheader("Where the time goes")
    st.altair_chart(shares_chart(verdict))
    st.table(columns_of(verdict), border="horizontal", hide_index=True)
    st.subheader("One step of each")
    st.text("A row is a rank: the GPUs of a tensor-parallel group. Steps are scaled to equal work.")
    st.altair_chart(steps_chart(answer.steps, verdict))
    st.subheader("The same in a terminal")
    st.code(asked.command, "bash", wrap_lines=True)
    if found.config:
        st.subheader("Configuration for wlb train")
        st.code(found.config, "toml", wrap_lines=True)
    st.subheader("What was simulated")
    st.text("\n\n".join([*answer.read, *about(found)]))


def shares_chart(verdict: Verdict) -> alt.Chart:
    """What the time of each system goes to, one part after the other."""
    rows = []
    for system in verdict.systems:
        end = 0.0
        for part, share in verdict.parts(system).items():
            start, end = end, end + max(0.0, share)
            rows.append({"system": system, "what": part, "start": start, "end": end, "told": f"{share:.1%}"})
    x = alt.X("start:Q", title=f"share of {verdict.base}'s time for the same work", axis=alt.Axis(format="%"))
    return bars(rows, COLOURS, x, BAR_HEIGHT)


def steps_chart(steps: Mapping[str, Timeline], verdict: Verdict) -> alt.Chart:
    """When ranks compute: for each a bar of the whole step, and over it one for each operation."""
    rows: list[dict[str, Any]] = []
    for name, step in steps.items():
        layout, seconds = step.job.layout, steps[verdict.base].seconds / verdict.speed(name)
        ranks = [*np.ndindex(layout.pp, layout.dp, layout.cp)]
        shown = np.linspace(0, len(ranks) - 1, min(len(ranks), MOST_RANKS)).astype(int)
        system, scale = f"{name}: {seconds:.3g} s; {len(shown)} of {len(ranks)} ranks", seconds / step.seconds
        for row, (pp, dp, cp) in enumerate(ranks[place] for place in shown):
            rank = {"system": system, "row": row, "told": f"pp {pp}, dp {dp}, cp {cp}"}
            rows.append(rank | {"what": WAITING, "start": 0.0, "end": seconds})
            for place in step.operations_of(dp, cp):
                if step.pipeline_ranks[place] == pp:
                    start, end = step.starts[place, dp], step.starts[place, dp] + step.compute[place, dp, cp]
                    rows.append(rank | {"what": COMPUTING, "start": scale * start, "end": scale * end})
    x = alt.X("start:Q", title=f"seconds for the work of a step of {verdict.base}")
    height = RANK_HEIGHT * (1 + max(row["row"] for row in rows))
    chart = bars(rows, {COMPUTING: GREEN, WAITING: RED}, x, height, lower=NAME_HEIGHT // 2)  # as Vega does with offsets
    return chart.encode(yOffset="row:O")


def bars(rows: list[dict[str, Any]], colours: dict[str, str], x: alt.X, height: int, lower: int = 0) -> alt.Chart:
    """Bars from ``start`` to ``end`` of each system, under its name, which is so many pixels ``lower``."""
    each = height + NAME_HEIGHT
    names = alt.Axis(labelAlign="left", labelPadding=0, labelLimit=0, ticks=False, domain=False)
    names.labelOffset = 4 + lower - each / 2
    y = alt.Y("system:N", sort=None, title=None, axis=names).scale(padding=NAME_HEIGHT / each)
    legend = alt.Legend(orient="bottom", direction="vertical", title=None, labelLimit=0)
    colour = alt.Color("what:N", legend=legend).scale(domain=[*colours], range=[*colours.values()])
    x = x.scale(domain=[0, max(row["end"] for row in rows)], nice=False)
    chart: alt.Chart = alt.Chart(alt.Data(values=rows), height=alt.Step(each, **{"for": "position"})).mark_bar()
    return chart.encode(x=x, x2="end:Q", y=y, color=colour, tooltip=["what:N", "told:N"])


def main() -> None:
    st.set_page_config("wlb: what imbalance costs", layout="wide")
    asked = asked_of_user()
    st.header("What imbalance costs your job")
    st.badge("simulated", color="gray")
    unchanging = asked.content is not None or asked.lengths.startswith("synthetic:")
    try:
        show(answered(asked, 0.0 if unchanging else time.time()), asked)
    except UserError as error:
        st.error(re.sub(r"([^\w\s])", r"\\\1", str(error)))


if __name__ == "__main__":
    main()
