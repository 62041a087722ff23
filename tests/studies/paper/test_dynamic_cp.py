"""NVIDIA's measurements of dynamic CP beside their predictions."""

from __future__ import annotations

import numpy as np
import pytest

from wlb.studies.published import dynamic_cp
from wlb.studies.published.dynamic_cp import TABLE, documents, dynamic_cp_row, speed_ratios

ROW = {"table": TABLE, "repo": "NVIDIA/Megatron-LM", "path": "README.md", "commit": "d48bd6be0a85cc", "gpus": 4}


def test_steps_have_the_published_documents():
    """Ranks draw in turn, so the first two documents of rank 0 are the first and the third draw of the seed."""
    lengths = documents(0, 8, 8)
    assert len(lengths) == 2 * 8
    location = np.log(1024) - 1.5**2 / 2
    drawn = [int(np.exp(location + 1.5 * normal)) for normal in (1.764052345967664, 0.9787379841057392)]
    assert drawn == [4687, 1443]
    assert lengths[:2].tolist() == [-(-(length - 1) // 8) * 8 for length in drawn]
    for step in range(3):
        of_step = documents(step, 4, 64)
        assert not (of_step % 64).any()
        assert of_step.min() >= 128
        assert of_step.max() <= 8192


def test_rows_become_predictions():
    rows = [
        ROW | {"policy": "dp_balanced, cp 4", "value": 195.269},
        ROW | {"policy": "default_dynamic_cp", "value": 151.906},
        ROW | {"policy": "another", "value": 1.0},
    ]
    base, dynamic, unknown = map(dynamic_cp_row, rows)
    assert base.measured_seconds is not None
    assert dynamic.measured_seconds is not None
    assert base.measured_seconds / dynamic.measured_seconds == pytest.approx(dynamic_cp.PUBLISHED_RATIOS[4], abs=1e-3)
    assert (base.run, base.row, base.source) == (
        "",
        "dp_balanced, cp 4, 4 GPUs",
        "NVIDIA/Megatron-LM d48bd6be0a85cc README.md",
    )
    assert base.predicted_seconds is not None
    assert dynamic.predicted_seconds is not None
    assert 0 < dynamic.predicted_seconds < base.predicted_seconds < base.measured_seconds  # the host's time is left out
    assert base.assumed is not None
    assert unknown.predicted_seconds is None
    assert unknown.reason == "no policy is called 'another'"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gpus": 5}, "5 GPUs are no multiple of its cp, 4"),
        ({"gpus": None}, "its gpus is not published"),
        ({"policy": None}, "its policy is not published"),
        ({"value": None}, "its value is not published"),
    ],
)
def test_an_odd_row_says_why_it_has_no_prediction(changes, reason):
    one = dynamic_cp_row(ROW | {"policy": "dp_balanced", "value": 1.0} | changes)
    assert (one.predicted_seconds, one.reason) == (None, reason)


def test_ratios_have_a_row_for_every_number_of_gpus(monkeypatch):
    monkeypatch.setattr(dynamic_cp, "PUBLISHED_RATIOS", {4: 1.285})
    table = speed_ratios()
    assert [column.name for column in table.columns][:2] == ["GPUs", "published"]
    ((gpus, published, predicted, share, _),) = table.rows
    assert (gpus, published) == (4, 1.285)
    assert isinstance(predicted, float)
    assert share == predicted / 1.285
