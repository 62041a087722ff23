"""The recipes of docs/adoption.md, as they stand there, in the packages they are for or in stand-ins.

Stand-ins have the signatures of slime 624b824, prime-rl 559b447 and SkyRL a956457, and deal micro-batches to ranks as
those do. With checkouts on ``PYTHONPATH`` the packages' own functions run.
"""

from __future__ import annotations

import enum
import importlib
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "adoption.md").read_text()
LENGTHS = np.random.default_rng(0).lognormal(6, 1.2, 200).astype(int).clip(16, 4096).tolist()
RANKS, LIMIT = 8, 4096


def _package(name: str, monkeypatch: pytest.MonkeyPatch, **contents: Any) -> Any:
    """The module ``name``, or a stand-in of ``contents`` where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:count]), ModuleType(".".join(parts[:count])))
        for count in range(1, len(parts)):
            setattr(sys.modules[".".join(parts[:count])], parts[count], sys.modules[".".join(parts[: count + 1])])
        vars(sys.modules[name]).update(contents)
        return sys.modules[name]


def _recipe(first_line: str) -> None:
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.S) if block.startswith(first_line)]
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    exec(code, {"__name__": "recipe"})


def _check(of_ranks: list[list[list[int]]]) -> None:
    """``of_ranks``: for each rank the lengths of every micro-batch."""
    assert {len(of_rank) for of_rank in of_ranks} == {len(of_ranks[0])}
    assert len(of_ranks) == RANKS
    assert all(0 < sum(part) <= LIMIT for of_rank in of_ranks for part in of_rank)
    assert sorted(length for of_rank in of_ranks for part in of_rank for length in part) == sorted(LENGTHS)


def _slime_schedule(args: Any, config: Any, lengths: list[int], *, global_batch_size: int, rollout_indices: Any) -> Any:
    slime = sys.modules["slime.utils.dp_schedule"]
    bins = slime._pack_step_into_mbs(
        lengths,
        args=args,
        use_dynamic_batch_size=True,
        max_per_bin=args.max_tokens_per_gpu * config["cp_size"],
        micro_batch_size=None,
        balance_by_flops=args.balance_by_flops,
    )
    of_ranks = [bins[rank :: config["dp_size"]] for rank in range(config["dp_size"])]
    partitions = [[i for part in of_rank for i in part] for of_rank in of_ranks]
    places = [
        np.split(np.arange(sum(map(len, of)), dtype=int), np.cumsum([len(p) for p in of])[:-1]) for of in of_ranks
    ]
    return partitions, places, [len(of_ranks[0])], [global_batch_size]


def test_slime(monkeypatch: pytest.MonkeyPatch):
    slime = _package(
        "slime.utils.dp_schedule", monkeypatch, build_dp_schedule=_slime_schedule, _pack_step_into_mbs=None
    )
    monkeypatch.setattr(slime, "_pack_step_into_mbs", slime._pack_step_into_mbs)
    _recipe("from slime")
    args = SimpleNamespace(
        use_dynamic_batch_size=True, max_tokens_per_gpu=LIMIT, balance_by_flops=False, balance_data=False
    )
    config = {"dp_size": RANKS, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    indices = list(range(len(LENGTHS)))
    partitions, places, (number,), _ = slime.build_dp_schedule(
        args, config, LENGTHS, global_batch_size=len(LENGTHS), rollout_indices=indices
    )
    of_ranks = [[[LENGTHS[own[i]] for i in part] for part in of] for own, of in zip(partitions, places, strict=True)]
    _check(of_ranks)
    assert len(of_ranks[0]) == number


def test_prime_rl(monkeypatch: pytest.MonkeyPatch):
    prime = _package(
        "prime_rl.trainer.batch",
        monkeypatch,
        _MicroBatchBin=lambda samples, length: SimpleNamespace(samples=samples, length=length),
        _materialize_bin=None,
        packed_samples_into_micro_bs=None,
        _distribute_group=None,
    )
    for name in ("_materialize_bin", "packed_samples_into_micro_bs", "_distribute_group"):
        monkeypatch.setattr(prime, name, getattr(prime, name))
    _recipe("from prime_rl")
    prime._materialize_bin = lambda members: [len(sample.input_ids) for sample in members.samples]
    samples = [SimpleNamespace(input_ids=range(length)) for length in LENGTHS]
    micro_batches = prime.packed_samples_into_micro_bs(samples, LIMIT, RANKS, sum)
    _check(prime._distribute_group(micro_batches, RANKS, sum))


def test_skyrl(monkeypatch: pytest.MonkeyPatch):
    class SeqPacker:
        def __init__(self, bin_capacity: int, min_bin_count: Any = None, bin_count_multiple: Any = None) -> None:
            self.bin_capacity, self.bin_count_multiple = bin_capacity, bin_count_multiple

        def pack(self, sequence_lengths: list[int]) -> list[list[int]]:
            bins: list[list[int]] = self._pack_implementation(sequence_lengths)  # type: ignore[attr-defined]
            return bins

    class Strategies(enum.Enum):
        FIRST_FIT_DECREASING = "first_fit_decreasing"

    packers: dict[Any, Any] = {}
    skyrl = _package(
        "skyrl.train.dataset.bin_packing",
        monkeypatch,
        SeqPacker=SeqPacker,
        PackingStrategy=Strategies,
        _PACKERS=packers,
        make_seq_packer=lambda name, **options: sys.modules["skyrl.train.dataset.bin_packing"]._PACKERS[
            Strategies[name.upper()]
        ](**options),
    )
    monkeypatch.setattr(skyrl, "_PACKERS", dict(skyrl._PACKERS))
    _recipe("from skyrl")
    packer = skyrl.make_seq_packer(
        "first_fit_decreasing", bin_capacity=LIMIT, min_bin_count=RANKS, bin_count_multiple=RANKS
    )
    bins = [[LENGTHS[i] for i in part] for part in packer.pack(LENGTHS)]
    _check([bins[rank::RANKS] for rank in range(RANKS)])
