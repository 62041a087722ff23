"""``wlb.balance`` beside the planners of reinforcement-learning stacks, which divide a step as it is asked of them.

    PYTHONPATH=SLIME:PRIME_RL/src:SKYRL:VERL .venv/bin/python -m studies.benchmarks.planners [--ranks N ..] [--out FILE]

Runs those that can be imported: verl's division over ranks and into micro-batches, slime's ``build_dp_schedule``,
prime-rl's packing of text and SkyRL's packer. All divide the same log-normal lengths among the same ranks, into
micro-batches of up to ``--max-tokens`` tokens. Each has its own prices for a 7B Llama (SkyRL tokens); all are judged by
the predicted seconds of a 7B model on H100, which ``wlb.balance`` takes by default. Lock step is the sum over slots of
the dearest micro-batch over that of the means, totals the dearest rank over the mean. Times are CPU time of the
process, medians over the cases.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Sequence
from itertools import chain
from statistics import mean, median
from types import SimpleNamespace
from typing import Any

import numpy as np

import wlb
from benchmarks.parts.measurement import CpuTimer, console, facts, freeze_imports, make_parser, show, write

OfRanks = list[list[list[int]]]  # of every rank, of every micro-batch, the indices of its documents
Planner = Callable[[list[int], int, int], OfRanks]

# Llama-2 7B, by the names that slime and prime-rl read.
LLAMA = SimpleNamespace(
    hidden_size=4096, ffn_hidden_size=11008, intermediate_size=11008, num_layers=32, num_hidden_layers=32,
    num_attention_heads=32, num_query_groups=32, num_key_value_heads=32, kv_channels=128, head_dim=128,
    vocab_size=32000, num_experts=None,
)  # fmt: skip
COLUMNS = {
    "planner": "{planner}",
    "documents": "{documents:,}",
    "ranks": "{ranks}",
    "micro-batches a rank": "{micro_batches:.1f}",
    "most tokens over limit": "{over_limit:.2f}",
    "lock step": "{lock_step:.3f}",
    "totals": "{totals:.3f}",
    "ms": "{milliseconds:.1f}",
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--repetitions", type=int, default=10, help="cases of each row")
    parser.add_argument("--documents", type=int, default=1024)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--max-tokens", type=int, default=16_384)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    planners: dict[str, Planner] = {"wlb": of_wlb, **installed()}
    freeze_imports()
    rows = [row for ranks in options.ranks for row in compare(planners, ranks, options)]
    results = facts() | {"seed": options.seed, "max_tokens": options.max_tokens, "rows": rows}
    console.print("measured on one thread,", results["machine"], results["versions"])
    show("planners of a step", rows, COLUMNS)
    write(results, options.out)


def compare(planners: dict[str, Planner], ranks: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for every planner; they take turns, case by case."""
    random = np.random.default_rng([arguments.seed, ranks])
    workload = wlb.make_workload("7b", "h100")
    seen: dict[str, list[tuple[float, ...]]] = {name: [] for name in planners}
    for _ in range(arguments.repetitions):
        lengths = random.lognormal(7, 1.2, arguments.documents).astype(np.int64).clip(16, arguments.max_tokens)
        seconds = workload.document_seconds(lengths)
        for name, plan in planners.items():
            timer = CpuTimer()
            of_ranks = timer(plan, lengths.tolist(), ranks, arguments.max_tokens)
            if sorted(chain(*chain(*of_ranks))) != list(range(len(lengths))):
                raise AssertionError(f"{name} lost or repeated documents")
            loads = np.array([[seconds[part].sum() for part in of_rank] for of_rank in of_ranks])
            most = max(int(lengths[part].sum()) for part in chain(*of_ranks)) / arguments.max_tokens
            lock_step = loads.max(axis=0).sum() / loads.mean(axis=0).sum()
            totals = loads.sum(axis=1).max() / loads.sum(axis=1).mean()
            seen[name].append((timer.seconds, len(of_ranks[0]), most, float(lock_step), float(totals)))
    rows = []
    for name, cases in seen.items():
        times, micro_batches, most_tokens, lock_steps, all_totals = zip(*cases, strict=True)
        rows.append(
            {
                "planner": name,
                "documents": arguments.documents,
                "ranks": ranks,
                "micro_batches": mean(micro_batches),
                "over_limit": max(most_tokens),
                "lock_step": mean(lock_steps),
                "totals": mean(all_totals),
                "milliseconds": 1000 * median(times),
            }
        )
    return rows


def installed() -> dict[str, Planner]:
    """The planners that can be imported here, by name."""
    makers: dict[str, tuple[str, Callable[[Any], Planner]]] = {
        "verl": ("verl.utils.seqlen_balancing", of_verl),
        "slime": ("slime.utils.dp_schedule", of_slime),
        "prime-rl": ("prime_rl.trainer.batch", of_prime_rl),
        "SkyRL": ("skyrl.train.dataset.bin_packing", of_skyrl),
    }
    planners = {}
    for name, (module, make) in makers.items():
        try:
            planners[name] = make(importlib.import_module(module))
        except ImportError as error:
            console.print(f"{name} left out: {error}")
    return planners


def of_wlb(lengths: list[int], ranks: int, most: int) -> OfRanks:
    return wlb.balance(lengths, ranks=ranks, max_tokens=most)


def of_verl(verl: Any) -> Planner:
    """As its trainers: equally many documents on each rank, then micro-batches (``rearrange_micro_batches``)."""
    import torch

    def plan(lengths: list[int], ranks: int, most: int) -> OfRanks:
        prices = verl.calculate_workload(torch.tensor(lengths)).tolist()
        of_ranks = verl.get_seqlen_balanced_partitions(prices, ranks, equal_size=True)
        number = max(-(-sum(lengths[i] for i in own) // most) for own in of_ranks)
        planned = []
        for own in of_ranks:
            own_prices = [prices[i] for i in own]
            parts = verl.get_seqlen_balanced_partitions(own_prices, number, equal_size=False)
            parts.sort(key=lambda part: (sum(own_prices[i] for i in part), part[0]), reverse=True)
            planned.append([[own[i] for i in part] for part in parts[::2][::-1] + parts[1::2]])
        return planned

    return plan


def of_slime(slime: Any) -> Planner:
    args = SimpleNamespace(**vars(LLAMA), use_dynamic_batch_size=True, balance_by_flops=False, balance_data=True)

    def plan(lengths: list[int], ranks: int, most: int) -> OfRanks:
        args.max_tokens_per_gpu = most
        config = {"dp_size": ranks, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
        own, parts, _, _ = slime.build_dp_schedule(
            args, config, lengths, global_batch_size=len(lengths), rollout_indices=list(range(len(lengths)))
        )
        return [[[own[rank][i] for i in part] for part in parts[rank]] for rank in range(ranks)]

    return plan


def of_prime_rl(prime: Any) -> Planner:
    """Its packing and dealing, without copying tokens: a micro-batch is the list of its samples."""
    cost = prime.build_bin_cost(LLAMA)
    prime._materialize_bin = lambda members: SimpleNamespace(
        indices=[sample.index for sample in members.samples],
        sequence_lengths=[len(sample.input_ids) for sample in members.samples],
    )

    def plan(lengths: list[int], ranks: int, most: int) -> OfRanks:
        samples = [
            SimpleNamespace(input_ids=range(length), index=index, routed_experts=None, mm_kwargs=None)
            for index, length in enumerate(lengths)
        ]
        micro_batches = prime.packed_samples_into_micro_bs(samples, most, ranks, cost)
        of_ranks = prime._distribute_group(micro_batches, ranks, cost)
        return [[part.indices for part in of_rank] for of_rank in of_ranks]

    return plan


def of_skyrl(skyrl: Any) -> Planner:
    """As its collator for fine-tuning: first fit decreasing over all ranks, dealt in turn."""

    def plan(lengths: list[int], ranks: int, most: int) -> OfRanks:
        packer = skyrl.make_seq_packer(
            "first_fit_decreasing", bin_capacity=most, min_bin_count=ranks, bin_count_multiple=ranks
        )
        bins = packer.pack(lengths)
        return [bins[rank::ranks] for rank in range(ranks)]

    return plan


if __name__ == "__main__":
    main()
