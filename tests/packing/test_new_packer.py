"""The packer that CONTRIBUTING shows is one class: registered, it is a packer like the others."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.packing.streams import SETTINGS, WORKLOADS, check_plans, document_lengths, plan_all, whole_documents
from wlb.job.config import PackingConfig
from wlb.packing.options import METHODS
from wlb.packing.packer import Packer
from wlb.packing.registry import PACKERS, make_packer
from wlb.simulate import simulated_job
from wlb_studies.packing import packer_for

CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"


@pytest.fixture(autouse=True)
def shown_packer(monkeypatch: pytest.MonkeyPatch) -> type[Packer]:
    (code,) = re.findall(r"```python\n(.*?)```", CONTRIBUTING.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    packer: type[Packer] = names["ShortestFirstPacker"]
    monkeypatch.setitem(PACKERS, packer.name, packer)
    monkeypatch.setitem(METHODS, packer.name, {"max_delay": 16})
    return packer


@given(st.data())
@SETTINGS
def test_it_keeps_what_every_packer_keeps(data):
    options = {
        "micro_batches": data.draw(st.integers(1, 5)),
        "context_window": data.draw(st.integers(8, 64)),
        "workload": WORKLOADS["square"],
        "max_delay": data.draw(st.integers(1, 3)),
    }
    lengths = data.draw(document_lengths(options["context_window"]))
    plans = plan_all(make_packer("shortest_first", **options), lengths)
    check_plans(plans, "shortest_first", options, whole_documents(lengths))


def test_it_packs_the_shortest_documents_first():
    packer = make_packer("shortest_first", micro_batches=2, context_window=100, workload=WORKLOADS["square"])
    (plan, *_) = plan_all(packer, [10, 90, 50, 30, 60, 20, 40])
    assert [micro_batch.lengths for micro_batch in plan.micro_batches] == [[10, 50], [30, 60]]


def test_configurations_and_compare_know_it(shown_packer):
    section = PackingConfig.model_validate({"method": "shortest_first", "max_delay": 3})
    packer = section.packer(section.global_batch, 64, WORKLOADS["7b"])
    assert isinstance(packer, shown_packer)
    assert packer.options.max_delay == 3
    compared = packer_for("shortest_first", simulated_job("7b", 64), max_delay=5, max_length_factor=2.0)
    assert (compared.options.max_delay, compared.max_tokens) == (5, 64)
