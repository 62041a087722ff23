"""Pictures of comparisons: who is who, and where things stand."""

from pathlib import Path

import pytest
from matplotlib import pyplot
from matplotlib.colors import to_hex

import wlb_studies.packing as plots
from wlb.packing.registry import PACKERS
from wlb.simulate import simulated_job
from wlb_studies.filling import documents_for
from wlb_studies.packing import colour_of, compare_packer, is_baseline, packer_for
from wlb_studies.plots import BALANCED, BASELINE

METHODS = ["sequential", "fixed_greedy:4", "variable_length:1", "balanced"]


def test_baselines_are_those_that_pack_to_a_fixed_length():
    assert [name for name in [*PACKERS, "fixed_solver"] if is_baseline(name)] == [
        "sequential",
        "fixed_greedy",
        "fixed_solver",
    ]
    assert [colour_of(name) for name in METHODS] == [BASELINE, BASELINE, BALANCED, BALANCED]


def test_the_comparison_colours_by_role_and_nothing_overlaps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import numpy as np

    job = simulated_job("7b", 4096, micro_batches=4, pp=2, tp=8)
    documents, _ = documents_for(np.tile([4096, 100, 700, 1500], 60), 4, 4096)
    results = [compare_packer(name, packer_for(name, job), documents, job) for name in METHODS]
    drawn = []
    monkeypatch.setattr(plots, "save", lambda figure, path: drawn.append(figure))
    plots.plot_comparison(results, tmp_path / "picture.png", title="a title\nof two lines")
    (figure,) = drawn
    figure.canvas.draw()
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [
        "sequential",
        "sequential, arranged",
        *METHODS[1:],
    ]
    for axis in figure.axes:
        colours = [to_hex(bar.get_facecolor()) for bar in axis.patches]
        assert colours == [BASELINE, BASELINE, BASELINE, BALANCED, BALANCED]
        assert not figure._suptitle.get_window_extent().overlaps(axis.title.get_window_extent())
    pyplot.close(figure)
