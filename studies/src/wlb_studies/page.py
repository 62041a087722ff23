"""The page of ``wlb-studies page``; Streamlit runs this file from top to bottom whenever a choice changes."""

import re
import shlex
import time
from collections.abc import Mapping
from contextlib import redirect_stderr
from io import StringIO
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any, NamedTuple

import altair as alt
import numpy as np
import streamlit as st

from wlb.documents.lengths import read_lengths, what_was_read
from wlb.errors import UserError
from wlb.report.answer import about, columns_of
from wlb.report.evidence import usual_step
from wlb.report.timeline import Timeline
from wlb.simulate.estimate import Estimate, estimate
from wlb.simulate.space import search_space
from wlb.simulate.verdict import Verdict
from wlb.token_count import parse_tokens
from wlb.workload import HARDWARE, MODEL_SHAPES

COMPUTING, WAITING = "computing", "waiting or communicating"
AUTO = "auto"  # assumed as in ``wlb check``
Answer = tuple[list[str], Estimate, dict[str, Timeline]]  # a typical step of the baseline and of the fastest
WINDOWS = [AUTO, "4K", "8K", "16K", "32K", "64K", "128K", "256K", "512K", "1M"]
BATCHES = [AUTO, "1M", "2M", "4M", "8M", "16M", "32M"]
MOST_RANKS, RANK_HEIGHT, NAME_HEIGHT = 16, 11, 24  # ranks of a step; pixels


class Asked(NamedTuple):
    """A question to ``wlb check`` with its options; ``content`` is the content of a file dropped on the page."""

    lengths: str
    options: tuple[tuple[str, str], ...]
    content: bytes | None = None


_SIZES = {"--dp": "1", "--cp": "8", "--tp": "1", "--pp": "1"}  # one layout, so nothing is searched
_JOB = {
    "--model": "llama3-8b",
    "--hardware": "h100",
    "--gpus": "8",
    "--context-window": "64K",
    "--batch-tokens": "256K",
}
EXAMPLE = Asked("synthetic:8000:64K:0", tuple((_JOB | _SIZES).items()))  # answered at once


def asked_of_user() -> Asked:
    """The job chosen on the page; the page's address holds it too."""
    kept: dict[str, Any] = {"bind": "query-params"}
    models, machines, powers = [*MODEL_SHAPES], [*HARDWARE], [2**power for power in range(14)]
    with st.sidebar:
        lengths = st.text_input("Document lengths", "synthetic:20000:128K:0", key="lengths", **kept)
        st.caption("A file, a token store or synthetic:DOCUMENTS:WINDOW:SEED. Nothing leaves this machine.")
        dropped = st.file_uploader("Or drop a file of lengths", max_upload_size=64)
        usual = models.index("llama3-8b")
        options = {
            "--model": st.selectbox("Model", models, usual, key="model", accept_new_options=True, **kept),
            "--hardware": st.selectbox("Hardware", machines, machines.index("h100"), key="hardware", **kept),
            "--gpus": str(st.select_slider("GPUs", powers, 64, key="gpus", **kept)),
            "--context-window": st.select_slider("Context window, tokens", WINDOWS, key="window", **kept),
            "--batch-tokens": st.select_slider("Global batch, tokens per step", BATCHES, key="batch", **kept),
        }
    given = tuple((option, value) for option, value in options.items() if value != AUTO)
    return Asked(lengths, given) if dropped is None else Asked(Path(dropped.name).name, given, dropped.getvalue())


@st.cache_data(max_entries=64, show_spinner=False)
def answered(asked: Asked, at: float) -> Answer:
    """The answer of ``wlb check``; a new ``at`` asks again, since the file may have changed."""
    options, source = dict(asked.options), asked.lengths
    if source == "-":
        raise UserError("lengths - is standard input, which the page does not read; name a file")
    sizes = (options.get(option) for option in ("--context-window", "--batch-tokens"))
    window, batch = (None if size is None else parse_tokens(size) for size in sizes)
    with redirect_stderr(StringIO()) as notes, TemporaryDirectory() as folder:
        if asked.content is not None:
            Path(folder, source).write_bytes(asked.content)
        lengths = read_lengths(source if asked.content is None else f"{folder}/{source}")
        fixed = {option[2:]: int(options[option]) for option in _SIZES if option in options}
        space = search_space(
            options["--model"],
            int(options["--gpus"]),
            window,
            lengths,
            hardware=options["--hardware"],
            batch_tokens=batch,
            source=source,
            fixed=fixed,
        )
    # After a choice changes, Streamlit ends the old run when it next reads its state.
    found = estimate(space, lengths, source=source, on_progress=lambda *_: st.session_state.get("gpus"))
    read = [what_was_read(source, lengths, space.context_window), *notes.getvalue().splitlines()]
    shown = dict.fromkeys((found.verdict.base, found.verdict.fastest))
    return read, found, {name: usual_step(found.verdict, name, lengths) for name in shown}


def show(read: list[str], found: Estimate, steps: Mapping[str, Timeline], asked: Asked) -> None:
    verdict = found.verdict
    st.info(verdict.headline)
    for line in verdict.reasons:
        st.text(line)
    with st.container(horizontal=True):
        st.metric(f"Tokens per second, {verdict.fastest}", f"{verdict.speed(verdict.fastest):.2f}x", width="content")
        st.metric("Delay, steps", f"{verdict.systems[verdict.fastest].token_delay:.2f}", width="content")
        st.metric("GPU-hours saved a day", f"{found.gpu_hours_a_day:,.0f}", width="content")
    st.table(columns_of(verdict), border="horizontal", hide_index=True)
    st.subheader("One step of each")
    st.text("Each row is one rank (a tensor-parallel group of GPUs). Steps are scaled to the same tokens.")
    st.altair_chart(steps_chart(steps, verdict))
    st.subheader("The same in a terminal")
    st.code(shlex.join(["wlb", "check", asked.lengths, *chain.from_iterable(asked.options)]), "bash", wrap_lines=True)
    if found.config:
        st.subheader("Configuration for wlb train")
        st.code(found.config, "toml", wrap_lines=True)
    st.subheader("What was simulated")
    st.text("\n\n".join([*read, *about(found)]))


def steps_chart(steps: Mapping[str, Timeline], verdict: Verdict) -> alt.Chart:
    """A bar of the whole step for each rank, with bars for its operations on top, in seconds."""
    rows: list[dict[str, Any]] = []
    for name, step in steps.items():
        layout, seconds = step.job.layout, steps[verdict.base].seconds / verdict.speed(name)
        ranks = [*np.ndindex(layout.pp, layout.pools, layout.pool_size)]
        shown = np.linspace(0, len(ranks) - 1, min(len(ranks), MOST_RANKS)).astype(int)
        system, scale = f"{name}: {seconds:.3g} s; {len(shown)} of {len(ranks)} ranks", seconds / step.seconds
        for row, (pp, dp, cp) in enumerate(ranks[place] for place in shown):
            rank = {"system": system, "row": row, "told": f"pp {pp}, dp {dp}, cp {cp}"}
            rows.append(rank | {"what": WAITING, "start": 0.0, "end": seconds})
            for place in step.operations_of(dp, cp):
                if step.pipeline_ranks[place, dp] == pp:
                    start, end = step.starts[place, dp], step.starts[place, dp] + step.compute[place, dp, cp]
                    rows.append(rank | {"what": COMPUTING, "start": scale * start, "end": scale * end})
    each = RANK_HEIGHT * (1 + max(row["row"] for row in rows)) + NAME_HEIGHT
    names = alt.Axis(labelAlign="left", labelPadding=0, labelLimit=0, ticks=False, domain=False)
    names.labelOffset = 3 - each / 2  # above the bars
    x = alt.X("start:Q", title=f"seconds for the tokens of a step of {verdict.base}")
    legend = alt.Legend(orient="bottom", direction="vertical", title=None, labelLimit=0)
    chart: alt.Chart = alt.Chart(alt.Data(values=rows), height=alt.Step(each, **{"for": "position"})).mark_bar()
    return chart.encode(
        x=x.scale(domain=[0, max(row["end"] for row in rows)], nice=False),
        x2="end:Q",
        y=alt.Y("system:N", sort=None, title=None, axis=names).scale(padding=NAME_HEIGHT / each),
        yOffset="row:O",
        color=alt.Color("what:N", legend=legend).scale(domain=[COMPUTING, WAITING], range=["#1b9e6b", "#d64545"]),
        tooltip=["what:N", "told:N"],
    )


def main() -> None:
    st.set_page_config("wlb: what imbalance costs", layout="wide")
    asked = asked_of_user()
    st.header("What imbalance costs your job :gray-badge[simulated]")
    busy, example = st.empty(), st.empty()
    unchanging = asked.content is not None or asked.lengths.startswith("synthetic:")
    try:
        if "answered" not in st.session_state:
            with example.container():
                st.caption("An example, while your job is simulated: Llama 3 8B on 8 H100 in windows of 64K")
                show(*answered(EXAMPLE, 0.0), EXAMPLE)
        with busy, st.spinner("Simulating every system in its fastest layout", show_time=True):
            answer = answered(asked, 0.0 if unchanging else time.time())
        st.session_state["answered"] = True
        example.empty()
        show(*answer, asked)
    except UserError as error:
        example.empty()
        st.error(re.sub(r"([^\w\s])", r"\\\1", re.sub(rf"{gettempdir()}/\w+/", "", str(error))))


if __name__ == "__main__":
    main()
