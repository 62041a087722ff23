"""What a real job says of itself, and model FLOPs against a count of every product's operations."""

import re
from itertools import count

import numpy as np
import pytest
import torch.distributed as dist

from tests.training.distributed import run_ranks
from tests.training.jobs import VOCABULARY, job, read_steps, trainer_of, write_store
from wlb.job.config import JobConfig
from wlb.models.configured_model import configured_model
from wlb.runtime import clock
from wlb.training import observe
from wlb.training.observe import live_line
from wlb.workload import HARDWARE, ModelShape
from wlb.workload.flops import model_flops


def _train_by_clock(config: JobConfig, *seconds: float) -> list[str]:
    """Train where a reading of the clock adds ``seconds`` of each rank; returns what its reporter said."""
    said: list[str] = []
    readings = count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(observe, "tell", said.append)
        patch.setattr(clock, "thread_seconds", lambda: next(readings) * seconds[dist.get_rank()])
        trainer_of(config).run()
    return said


def test_a_slow_rank_shows(folder):
    config = job(folder, parallel={"dp": 2}, training={"steps": 2}, metrics={"document_ids": "segments"})
    said, quiet = run_ranks(2, _train_by_clock, config, 1.0, 9.0)
    rows = read_steps(folder)
    for row in rows:
        assert row["rank_seconds"] == [2.0, 18.0]  # a micro-batch with a forward, loss included, and a backward
        assert row["slowest_rank"]["measured"] == 18 / 10
        assert 1 <= row["slowest_rank"]["predicted"] < 18 / 10
        assert {document for document, _, _ in row["segments"]} >= set(row["document_ids"])
        flops = row["mfu"] * row["step_seconds"] * HARDWARE["cpu"].peak_flops * 2  # of one thread on each rank
        lengths = [length for _, _, length in row["segments"]]
        assert flops == pytest.approx(model_flops(configured_model(config.model, VOCABULARY).shape, lengths))
    greeting, *lines, last = said
    assert (quiet, greeting.partition(";")[0]) == ([], "starting on 2 cpu processes")
    assert lines == [live_line(row) for row in rows]
    assert lines[0].endswith(f"/{36 / 20:.2f}")
    trained, *files = last.splitlines()
    assert trained.startswith(f"trained to step 2: {sum(row['tokens'] for row in rows):,} tokens in ")
    assert files == [f"metrics: {folder}/metrics; no checkpoint.dir is set", f"next: wlb report {folder}/metrics"]


def test_the_first_step_without_labels_is_reported(tmp_path):
    store = write_store(tmp_path / "store")
    mask = np.zeros(store.tokens, np.uint8)
    mask[store.lengths_of(np.arange(200)).sum() // 2] = 1  # of one token somewhere, so all steps but one have no label
    (tmp_path / "store.mask").write_bytes(mask.tobytes())
    (said,) = run_ranks(1, _train_by_clock, job(tmp_path, training={"steps": 4}), 1.0)
    (warning,) = (line for line in said if "warning" in line)
    assert re.match(r"wlb: warning: step [12] has no labelled token among its \d+, so its loss", warning)


def test_flops_of_a_step_count_every_product_once_forward_and_twice_backward():
    shape = ModelShape(hidden=8, layers=3, heads=4, kv_heads=2, head_dim=6, ffn_hidden=10, vocab_size=50)
    lengths = [5, 7]
    weights = 3 * (8 * 24 + 2 * 8 * 12 + 24 * 8 + 3 * 8 * 10) + 8 * 50
    pairs = sum(query + 1 for length in lengths for query in range(length))  # keys up to and with its own
    forward = 2 * weights * 12 + 3 * 2 * (2 * 4 * 6) * pairs
    assert model_flops(shape, lengths) == pytest.approx(3 * forward)
