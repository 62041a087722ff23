"""What a killed job left behind its checkpoint is cut off, found from the end of the file."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from wlb.training.observe import step_lines
from wlb.training.observe.step_lines import continue_file, last_step_in


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 14), st.integers(1, 50), st.integers(0, 60)
)
def test_a_file_ends_with_the_step_of_the_checkpoint(paddings, last_step, block_bytes, torn_off):
    rows = [json.dumps({"step": step, "ids": "x" * size}) + "\n" for step, size in enumerate(paddings, 1)]
    whole = "".join(rows)
    left = whole[: max(len(whole) - torn_off, len("".join(rows[:last_step])))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps.jsonl"
        path.write_text(left)
        before, step_lines._BLOCK_BYTES = step_lines._BLOCK_BYTES, block_bytes
        try:
            note = continue_file(path, last_step)
            last = last_step_in(path)
        finally:
            step_lines._BLOCK_BYTES = before
        expected = "".join(rows[:last_step])
        assert path.read_text() == expected
        assert last == min(last_step, len(rows))
        assert (note is None) == (left == expected)


def test_continuing_reads_the_end_of_a_long_file_only(tmp_path):
    path = tmp_path / "steps.jsonl"
    with path.open("wb") as file:
        file.seek(1 << 40)  # a hole: a terabyte that takes no space, and forever to read
        file.write(b'\n{"step": 7}\n{"step": 8}\n')
    assert continue_file(path, 7) == f"{path} goes back to step 7, later lines removed: 1"
    assert last_step_in(path) == 7
