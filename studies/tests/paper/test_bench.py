"""The systems that experiments run, what a data loader makes of documents, and that all systems get the same."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.limits import examples
from wlb.job.config import NO_BOUND, PRESETS
from wlb.packing.options import METHODS
from wlb.schedules.layout import Layout
from wlb_studies.experiment import Settings
from wlb_studies.paper.bench import Bench, Documents, corpus, cut_by_loader
from wlb_studies.paper.jobs import PAPER_JOBS, PaperJob

JOB = PaperJob("550m", 4096, Layout(2, 2, 2, 1))


def test_wlb_llm_is_algorithm_1_and_nobody_else_is():
    job = PAPER_JOBS["7b-128k"]
    bench = Bench(job, Documents(np.full(8, job.context_window), "made up"), 1, Settings())

    def options(preset: str, **packing: Any) -> dict[str, Any]:
        settings = bench.job(preset, packing=packing).packing
        return {"method": settings.method} | {name: getattr(settings, name) for name in METHODS[settings.method]}

    published = options("wlb-llm")
    assert published == {
        "method": "variable_length",
        "max_delay": NO_BOUND,
        "max_length_factor": 1.5,
        "outlier_thresholds": None,
    }
    assert options("wlb-llm", max_delay=3) == published | {"max_delay": 3}
    for preset in PRESETS.keys() - {"wlb-llm"}:
        method = options(preset)["method"]
        assert options(preset) == {"method": method} | METHODS[method]


@given(st.lists(st.integers(1, 300), min_size=20, max_size=60), st.integers(64, 200), st.integers(0, 3))
@settings(max_examples=examples(30), deadline=None)
def test_pieces_fill_windows_in_the_order_of_documents(lengths, window, seed):
    if sum(lengths) < window:
        return
    order = np.random.default_rng(seed).permutation(lengths)
    tokens = sum(lengths) // window * window
    pieces, room = [], window  # one token run after another, by hand
    for length in order.tolist():
        while length and tokens:
            piece = min(length, room, tokens)
            pieces.append(piece)
            length, room, tokens = length - piece, room - piece or window, tokens - piece
    assert cut_by_loader(np.array(lengths), window, seed).tolist() == pieces


def test_a_corpus_is_the_samplers_at_128k_and_goes_on_beyond():
    short, long = corpus(Settings()).lengths, corpus(Settings(), longest=2**20).lengths
    np.testing.assert_array_equal(np.minimum(long, short.max()), short)


@pytest.mark.parametrize("preset", ["plain-4d", "fixed-4d", "wlb-llm", "balanced"])
def test_every_system_computes_the_attention_of_pieces_that_the_loader_cut(preset):
    documents = Documents(np.full(4000, 1500), "equal")
    bench = Bench(JOB, documents, 4, Settings())
    assert bench.run(preset).attention_kept == pytest.approx(1.0)
    own = bench.fastest(preset)
    assert own.attention_kept == pytest.approx(1.0)
    assert own.tokens_per_second >= bench.run(preset).tokens_per_second
    assert (own.job.layout.world_size, own.job.global_batch) == (8, 2)
