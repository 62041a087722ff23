"""The recipes of ``examples/planner_recipes.py`` in the packages they are for or in stand-ins.

Stand-ins have the signatures of slime 624b824, prime-rl 559b447, SkyRL a956457, NeMo-RL 7ea279a, OpenRLHF 3c3be62, verl
0.9.1 and TRL 1.16, and deal micro-batches to ranks as those do. With checkouts on ``PYTHONPATH`` the packages' own
functions run, but for verl's trainer.
"""

import importlib
import runpy
import sys
from itertools import chain
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import wlb

SOURCE = Path(__file__).parents[2] / "examples" / "planner_recipes.py"
RECIPES = SimpleNamespace(**runpy.run_path(str(SOURCE)))
LENGTHS = np.random.default_rng(0).lognormal(6, 1.2, 200).astype(int).clip(16, 4096).tolist()
RANKS, LIMIT = 8, 4096
WORKLOAD = wlb.make_workload("7b", "h100")


def _package(name: str, monkeypatch: pytest.MonkeyPatch, **contents: Any) -> Any:
    """The module ``name``, or a stand-in of ``contents`` where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        parent, _, own = name.rpartition(".")
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
        if parent:
            monkeypatch.setattr(_package(parent, monkeypatch), own, module, raising=False)
        return module


def _check(of_ranks: list[list[list[int]]], limit: int = LIMIT) -> None:
    """``of_ranks``: for each rank the lengths of every micro-batch."""
    assert {len(of_rank) for of_rank in of_ranks} == {len(of_ranks[0])}
    assert len(of_ranks) == RANKS
    assert all(0 < sum(part) <= limit for of_rank in of_ranks for part in of_rank)
    assert sorted(length for of_rank in of_ranks for part in of_rank for length in part) == sorted(LENGTHS)


def _slime_schedule(args: Any, config: Any, lengths: list[int], *, global_batch_size: int, rollout_indices: Any) -> Any:
    slime = sys.modules["slime.utils.dp_schedule"]
    bins = slime._pack_step_into_mbs(
        lengths,
        args=args,
        use_dynamic_batch_size=args.use_dynamic_batch_size,
        max_per_bin=args.max_tokens_per_gpu * config["cp_size"] if args.use_dynamic_batch_size else None,
        micro_batch_size=args.micro_batch_size,
        balance_by_flops=args.balance_by_flops,
    )
    of_ranks = [bins[rank :: config["dp_size"]] for rank in range(config["dp_size"])]
    partitions = [[i for part in of_rank for i in part] for of_rank in of_ranks]
    places = [
        np.split(np.arange(sum(map(len, of)), dtype=int), np.cumsum([len(p) for p in of])[:-1]) for of in of_ranks
    ]
    return partitions, places, [len(of_ranks[0])], [global_batch_size]


@pytest.mark.parametrize("dynamic", [True, False])
def test_slime(dynamic: bool, monkeypatch: pytest.MonkeyPatch):
    slime = _package(
        "slime.utils.dp_schedule", monkeypatch, build_dp_schedule=_slime_schedule, _pack_step_into_mbs=None
    )
    monkeypatch.setattr(slime, "_pack_step_into_mbs", slime._pack_step_into_mbs)
    RECIPES.slime(RANKS)
    limits = {"max_tokens_per_gpu": LIMIT, "micro_batch_size": 5}
    args = SimpleNamespace(use_dynamic_batch_size=dynamic, balance_by_flops=False, balance_data=False, **limits)
    config = {"dp_size": RANKS, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    indices = list(range(len(LENGTHS)))
    partitions, places, (number,), _ = slime.build_dp_schedule(
        args, config, LENGTHS, global_batch_size=len(LENGTHS), rollout_indices=indices
    )
    of_ranks = [[[LENGTHS[own[i]] for i in part] for part in of] for own, of in zip(partitions, places, strict=True)]
    _check(of_ranks, limit=LIMIT if dynamic else sum(LENGTHS))
    assert len(of_ranks[0]) == number
    assert dynamic or {len(part) for of_rank in of_ranks for part in of_rank} == {5}


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
    RECIPES.prime_rl()
    prime._materialize_bin = lambda members: [len(sample.input_ids) for sample in members.samples]
    samples = [SimpleNamespace(input_ids=range(length)) for length in LENGTHS]
    micro_batches = prime.packed_samples_into_micro_bs(samples, LIMIT, RANKS, sum)
    _check(prime._distribute_group(micro_batches, RANKS, sum))


class SeqPacker:
    def __init__(self, bin_capacity: int, min_bin_count: Any = None, bin_count_multiple: Any = None) -> None:
        self.bin_capacity, self.bin_count_multiple = bin_capacity, bin_count_multiple

    def pack(self, sequence_lengths: list[int]) -> list[list[int]]:
        return self._pack_implementation(sequence_lengths)

    def _pack_implementation(self, sequence_lengths: list[int]) -> list[list[int]]:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("module", "packer", "make", "algorithm"),
    [
        ("skyrl.train.dataset.bin_packing", "FirstFitDecreasing", "make_seq_packer", "first_fit_decreasing"),
        ("skyrl.train.dataset.bin_packing", "Balanced", "make_seq_packer", "balanced"),
        (
            "nemo_rl.data.packing.algorithms",
            "ModifiedFirstFitDecreasingPacker",
            "get_packer",
            "modified_first_fit_decreasing",
        ),
    ],
)
def test_skyrl_and_nemo_rl(module: str, packer: str, make: str, algorithm: str, monkeypatch: pytest.MonkeyPatch):
    names = {name: type(name, (SeqPacker,), {}) for name in ("FirstFitDecreasing", "Balanced", packer)}
    package = _package(module, monkeypatch, **names, **{make: lambda name, **options: names[packer](**options)})
    for its_own in (getattr(package, name) for name in names if hasattr(package, name)):
        monkeypatch.setattr(its_own, "_pack_implementation", its_own._pack_implementation)
    getattr(RECIPES, module.partition(".")[0])()
    packing = getattr(package, make)(algorithm, bin_capacity=LIMIT, min_bin_count=RANKS, bin_count_multiple=RANKS)
    bins = [[LENGTHS[i] for i in part] for part in packing.pack(LENGTHS)]
    _check([bins[rank::RANKS] for rank in range(RANKS)])
    work = np.array([[sum(map(_price, part)) for part in bins[rank::RANKS]] for rank in range(RANKS)])
    assert work.max(axis=0).sum() < 1.1 * work.mean(axis=0).sum()
    if packer == "Balanced":  # as SkyRL's trainer calls it, for one rank, its limit a soft one
        assert getattr(package, make)(algorithm, bin_capacity=10).pack([3, 12, 4]) == [[1], [0, 2]]
    if module.startswith("skyrl"):  # which pads every sample
        RECIPES.skyrl(multiple_of=16)
        padded = getattr(package, make)(algorithm, bin_capacity=LIMIT, bin_count_multiple=RANKS).pack(LENGTHS)
        held, before = (
            [sum(-(-length // 16) * 16 for length in part) for part in of]
            for of in ([[LENGTHS[i] for i in part] for part in padded], bins)
        )
        assert max(held) <= LIMIT < max(before)


def _price(length: int) -> float:
    return float(WORKLOAD.document_seconds([length])[0])


@pytest.mark.parametrize(("number", "train_batch"), [(200, 200), (200, 40), (203, 40), (30, 40)])
def test_openrlhf(number: int, train_batch: int, monkeypatch: pytest.MonkeyPatch):
    """Its controller gives every rank its samples, and each rank then divides every step into as many micro-batches."""
    utils = "openrlhf.trainer.ppo_utils."
    experience = _package(
        f"{utils}experience", monkeypatch, Experience=None, split_experience_batch=list, make_experience_batch=list
    )
    divides = {"get_seqlen_balanced_partitions": None}
    buffer, maker = (
        _package(f"{utils}{name}", monkeypatch, **divides) for name in ("replay_buffer", "experience_maker")
    )
    trainer = _package("openrlhf.trainer.ppo_trainer", monkeypatch, balance_experiences=None)
    monkeypatch.setattr(trainer, "balance_experiences", trainer.balance_experiences)
    for module in (buffer, maker):
        monkeypatch.setattr(module, "get_seqlen_balanced_partitions", module.get_seqlen_balanced_partitions)
    RECIPES.openrlhf(RANKS, LIMIT)
    make = experience.Experience or SimpleNamespace
    lengths = (LENGTHS + LENGTHS)[:number]
    samples = [
        make(sequences=torch.ones(1, length, dtype=torch.long), total_length=torch.tensor([length]))
        for length in lengths
    ]
    given = [experience.make_experience_batch(samples[at : at + 50]) for at in range(0, len(samples), 50)]
    of_ranks = [
        [int(sample.total_length) for sample in experience.split_experience_batch(own)]
        for own in trainer.balance_experiences(given, SimpleNamespace(train=SimpleNamespace(batch_size=train_batch)))
    ]
    assert sorted(length for own in of_ranks for length in own) == sorted(lengths)
    assert {len(own) for own in of_ranks} <= {number // RANKS, number // RANKS + 1}
    size = train_batch // RANKS
    for at in range(0, size * (number // train_batch), size):  # as its replay buffer takes the steps
        step = [own[at : at + size] for own in of_ranks]
        parts = max(len(wlb.balance(own, max_tokens=LIMIT)) for own in step)
        divided = [buffer.get_seqlen_balanced_partitions(own, parts, equal_size=False) for own in step]
        micro_batches = [[own[i] for i in part] for own, of in zip(step, divided, strict=True) for part in of]
        assert all(0 < sum(part) <= LIMIT for part in micro_batches)
        assert sorted(chain(*micro_batches)) == sorted(chain(*step))
    over = buffer.get_seqlen_balanced_partitions([10, LIMIT + 1, 20], 2, equal_size=False)
    assert over == [[1], [0, 2]]
    forwards = maker.get_seqlen_balanced_partitions(lengths, 2 * RANKS, False)  # dealt to ranks two by two
    assert sorted(chain(*forwards)) == [*range(number)]
    forwarded = [[lengths[i] for i in chain(*forwards[at : at + 2])] for at in range(0, 2 * RANKS, 2)]
    for own_lengths in (of_ranks, forwarded) if number >= 200 else ():  # else too few to be even
        work = [sum(map(_price, own)) for own in own_lengths]
        assert max(work) < {200: 1.001, 40: 1.15}[train_batch] * sum(work) / RANKS


PROMPTS = np.repeat(np.random.default_rng(1).integers(100, 2_000, 32), 8).tolist()
WHOLE = [prompt + length for prompt, length in zip(PROMPTS, (LENGTHS * 2)[:256], strict=True)]


def _shared_price(samples: list[int]) -> float:
    """Of rollouts (eight for each prompt) that compute a prompt once."""
    once = sum(_price(PROMPTS[group * 8]) for group in {i // 8 for i in samples})
    return once + sum(_price(WHOLE[i]) - _price(PROMPTS[i]) for i in samples)


def test_verl_with_prefix_grouper(monkeypatch: pytest.MonkeyPatch):
    """As its controller balances: it asks for equally many whole groups on every rank."""

    def balance_batch(trainer: Any, batch: Any, metrics: Any) -> Any:
        lengths = batch.batch["attention_mask"].sum(1).tolist()
        return utils.seqlen_balancing.get_group_balanced_partitions(
            seqlen_list=lengths, uid_list=list(batch.non_tensor_batch["uid"]), k_partitions=4
        )

    utils = _package("verl.utils", monkeypatch)
    balancing = _package("verl.utils.seqlen_balancing", monkeypatch, get_group_balanced_partitions=None)
    monkeypatch.setattr(balancing, "get_group_balanced_partitions", None)
    trainer = type("RayPPOTrainer", (), {"_balance_batch": balance_batch})
    module = ModuleType("verl.trainer.ppo.ray_trainer")
    vars(module)["RayPPOTrainer"] = trainer
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for parent in ("verl.trainer", "verl.trainer.ppo"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    RECIPES.verl_prefix_grouper()
    mask = torch.zeros(256, 2_000 + max(LENGTHS), dtype=torch.long)
    for row, prompt, length in zip(mask, PROMPTS, WHOLE, strict=True):
        row[2_000 - prompt : 2_000 - prompt + length] = 1
    batch = SimpleNamespace(
        batch={"prompts": torch.zeros(256, 2_000), "attention_mask": mask},
        non_tensor_batch={"uid": np.repeat([f"prompt {i}" for i in range(32)], 8).astype(object)},
    )
    parts = trainer()._balance_batch(batch, {})
    assert sorted(chain(*parts)) == [*range(256)]
    assert all(len(part) == 64 and len({i // 8 for i in part}) == 8 for part in parts)
    work = [_shared_price(part) for part in parts]
    assert max(work) < 1.02 * sum(work) / 4


def test_trl(monkeypatch: pytest.MonkeyPatch):
    class FixedCountBatcher:
        def __init__(self, dataset: Any, num_processes: int, microbatch_size: int) -> None:
            self.dataset, self.num_processes, self.microbatch_size = dataset, num_processes, microbatch_size

    class TreeRow:
        def __init__(self) -> None:
            self.samples: list[Any] = []

        def add(self, sample: Any) -> None:
            self.samples.append(sample)

    trainer = _package(
        "trl.experimental.async_grpo.async_grpo_trainer",
        monkeypatch,
        FixedCountBatcher=FixedCountBatcher,
        TreeRow=TreeRow,
    )
    if not hasattr(trainer, "TreeRow"):
        pytest.skip("this TRL computes a prompt for every rollout")
    monkeypatch.setattr(trainer.FixedCountBatcher, "__iter__", None, raising=False)
    RECIPES.trl()
    samples = [
        {
            "input_ids": np.array(
                [*range(prompt), *np.random.default_rng(i).integers(10_000, 99_999, length - prompt)]
            ),
            "completion_mask": (np.arange(length) >= prompt).astype(np.int64),
            "group_id": i // 8,
            "number": i,
        }
        for i, (prompt, length) in enumerate(zip(PROMPTS, WHOLE, strict=True))
    ]
    batches = [*trainer.FixedCountBatcher(samples, 4, 128)]
    rows = [[sample["number"] for sample in row.samples] for batch in batches for row in batch]
    assert [len(batch) for batch in batches] == [4, 4]
    assert sorted(chain(*rows)) == [*range(256)]
    for own in (rows[:4], rows[4:]):
        work = [_shared_price(row) for row in own]
        assert max(work) < 1.02 * _shared_price([*chain(*own)]) / 4
