"""The page, which Streamlit runs from top to bottom whenever a choice changes; it stops a run that is not done."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import streamlit as st

from wlb.errors import UserError
from wlb.report.answer import about, columns_of
from wlb.simulate.timeline import Timeline
from wlb.simulate.verdict import PARTS, Verdict
from wlb.workload import HARDWARE, MODEL_SHAPES
from wlb_studies.page.answer import AUTO, Answer, Asked

GREEN, RED = "#1b9e6b", "#d64545"
COLOURS = dict(zip(PARTS, (RED, "#ee8a3c", "#f0c04a", "#8aa0b5", "#a78bbf", GREEN), strict=True))
COMPUTING, WAITING = "computing", "waiting or communicating"
WINDOWS = [AUTO, "4K", "8K", "16K", "32K", "64K", "128K", "256K", "512K", "1M"]
BATCHES = [AUTO, "1M", "2M", "4M", "8M", "16M", "32M"]
FILES = ["json", "jsonl", "csv", "tsv", "parquet", "txt", "npy"]
MOST_RANKS = 16  # rows of a timeline


def asked_of_user() -> Asked:
    """The job as the inputs have it; the address of the page holds it too."""
    kept: dict[str, Any] = {"bind": "query-params"}
    models, machines, powers = [*MODEL_SHAPES], [*HARDWARE], [1 << power for power in range(14)]
    with st.sidebar:
        lengths = st.text_input("Document lengths", "synthetic:20000:128K:0", key="lengths", **kept)
        st.caption("A file, a token store or synthetic:DOCUMENTS:WINDOW:SEED. Nothing leaves this machine.")
        dropped = st.file_uploader("Or drop a file of lengths", FILES, max_upload_size=64)
        model = st.selectbox("Model", models, models.index("llama3-8b"), key="model", accept_new_options=True, **kept)
        hardware = st.selectbox("Hardware", machines, machines.index("h100"), key="hardware", **kept)
        gpus = st.select_slider("GPUs", powers, 64, key="gpus", **kept)
        window = st.select_slider("Context window, tokens", WINDOWS, key="window", **kept)
        batch = st.select_slider("Global batch, tokens per step", BATCHES, key="batch", **kept)
    job = model, hardware, gpus, window, batch
    return Asked(lengths, *job) if dropped is None else Asked(Path(dropped.name).name, *job, dropped.getvalue())


@st.cache_data(max_entries=64, show_spinner="Simulating every system in its fastest layout", show_time=True)
def answered(asked: Asked, at: float) -> Answer:
    """The answer, computed in a process of its own; ``at`` makes a question of its own of one that is asked again."""
    command = [sys.executable, "-c", "from wlb_studies.page.answer import main; main()"]
    sent: bytes | None = pickle.dumps(asked)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            while process.returncode is None:
                try:
                    told, _ = process.communicate(sent, timeout=0.1)
                except subprocess.TimeoutExpired:
                    sent = None
                    st.session_state.get("gpus")  # here Streamlit ends this run where a choice has changed
        finally:
            process.terminate()
    if process.returncode:
        raise UserError("the simulation was killed, perhaps for memory; ask for fewer GPUs or documents")
    found: Answer | UserError = pickle.loads(told)
    if isinstance(found, UserError):
        raise found
    return found


def show(answer: Answer, asked: Asked) -> None:
    """The verdict, and what it is made of."""
    found, verdict = answer.found, answer.found.verdict
    st.info(str(verdict))
    with st.container(horizontal=True, gap="large"):
        st.metric(f"Speed of {verdict.fastest}", f"{verdict.speed(verdict.fastest):.2f}x", width="content")
        st.metric("Token delay, steps", f"{verdict.token_delay(verdict.fastest):.2f}", width="content")
        st.metric("GPU-hours saved a day", f"{found.gpu_hours_a_day:,.0f}", width="content")
    st.subheader("Where the time goes")
    st.altair_chart(shares_chart(verdict))
    st.table(columns_of(verdict), border="horizontal", hide_index=True)
    st.subheader("One step of each, of about equal work")
    st.text("A row is a rank: the GPUs of a tensor-parallel group. Red is waiting or communicating.")
    st.altair_chart(steps_chart(answer.steps))
    st.subheader("The same in a terminal")
    st.code(asked.command, "bash", wrap_lines=True)
    if found.config:
        st.subheader("Configuration for wlb train")
        st.code(found.config, "toml", wrap_lines=True)
    st.subheader("What was simulated")
    st.text("\n\n".join([*answer.read, *about(found)]))


def shares_chart(verdict: Verdict) -> alt.Chart:
    """What the time of each system goes to, one part after the other."""
    rows, most = [], 0.0
    for system in verdict.systems:
        end = 0.0
        for part, share in verdict.parts(system).items():
            start, end = end, end + max(0.0, share)
            rows.append({"system": system, "what": part, "start": start, "end": end, "share": f"{share:.1%}"})
        most = max(most, end)
    x = alt.X("start:Q", title=f"share of {verdict.base}'s time for the same work", axis=alt.Axis(format="%"))
    return bars(rows, COLOURS, x, most, ["share:N"]).properties(height=64 * len(verdict.systems) + 190)


def steps_chart(steps: Mapping[str, Timeline]) -> alt.Chart:
    """When ranks compute in each step: on every rank a bar of the whole step, and over it what it computes."""
    rows: list[dict[str, Any]] = []
    for name, step in steps.items():
        ranks = [*np.ndindex(step.job.layout.pp, step.job.layout.dp, step.job.layout.cp)]
        shown = np.linspace(0, len(ranks) - 1, min(len(ranks), MOST_RANKS)).astype(int)
        system = f"{name}: {step.seconds:.3g} s, {step.plan.tokens:,} tokens, {len(shown)} of {len(ranks)} ranks"
        for row, (pp, dp, cp) in enumerate(ranks[place] for place in shown):
            named = {"system": system, "row": row, "rank": f"pp {pp}, dp {dp}, cp {cp}"}
            rows.append(named | {"what": WAITING, "start": 0.0, "end": step.seconds})
            for place in step.operations_of(dp, cp):
                if step.pipeline_ranks[place] == pp:
                    start = float(step.starts[place, dp])
                    end = start + float(step.compute[place, dp, cp])
                    rows.append(named | {"what": COMPUTING, "start": start, "end": end})
    most = max(step.seconds for step in steps.values())
    chart = bars(rows, {COMPUTING: GREEN, WAITING: RED}, alt.X("start:Q", title="seconds"), most, ["rank:N"])
    return chart.encode(yOffset=alt.YOffset("row:O")).properties(height=260 * len(steps) + 100)


def bars(rows: list[dict[str, Any]], colours: dict[str, str], x: alt.X, most: float, told: list[str]) -> alt.Chart:
    """Bars from ``start`` to ``end``, for each system under its name; ``most`` is the end of the axis."""
    names = alt.Axis(
        labelAlign="left",
        labelPadding=0,
        labelBaseline="bottom",
        labelOffset=-22,
        labelLimit=0,
        ticks=False,
        domain=False,
    )
    legend = alt.Legend(orient="bottom", direction="vertical", title=None, labelLimit=0)
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_bar()
        .encode(
            x=x.scale(domain=[0, most], nice=False),
            x2="end:Q",
            y=alt.Y("system:N", sort=None, title=None, axis=names).scale(paddingInner=0.4, paddingOuter=0.4),
            color=alt.Color("what:N", legend=legend).scale(domain=[*colours], range=[*colours.values()]),
            tooltip=["what:N", *told, alt.Tooltip("start:Q", format=".3f"), alt.Tooltip("end:Q", format=".3f")],
        )
    )


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


main()
