"""What the page on training quotes of steps: sizes, delay and cuts are those of the plans."""

import json
from pathlib import Path

import numpy as np

from studies.benchmarks import step_sizes


def test_rows_say_what_the_presets_do(tmp_path: Path) -> None:
    window, out = 65_536, tmp_path / "steps.json"
    lengths = np.tile([window, 900, 40_000, 20_000, 700, 3_000], 120)
    np.save(tmp_path / "lengths.npy", lengths)
    asked = ["--job", "7b-64k", "--steps", "12", "--lengths", tmp_path / "lengths.npy", "--out", out]
    assert step_sizes.main([*map(str, asked)]) == 0
    rows = {row["system"]: row for row in json.loads(out.read_text())["rows"]}
    plain, ours, waiting = rows["plain-4d"], rows["balanced"], rows["wlb-llm"]
    assert plain["least"] == plain["most"] == 1
    assert plain["cut_share"] > 0.1 > waiting["cut_share"] == ours["cut_share"] == 0
    assert 0 == plain["token_delay"] <= ours["token_delay"] < waiting["token_delay"]
    assert waiting["cv"] > ours["cv"] > plain["cv"]
    long_tokens = lengths[lengths >= window // 2].sum() / lengths.sum()
    assert abs(plain["long_share"] - long_tokens) < 0.05
