"""``wlb.balance`` beside the planners of other stacks, on the same log-normal lengths: three tables.

    PYTHONPATH=VERL:SLIME:PRIME_RL/src:SKYRL:OPENRLHF:LLAMA_FACTORY \\
        .venv/bin/python -m studies.benchmarks.planners [--documents N ..] [--parts N ..] [--ranks N ..] [--out FILE]

*Parts*: a given number of parts of any size, by predicted seconds of a 7B model on H100, against Karmarkar and Karp's
differencing as verl and OpenRLHF have it and a heap (longest first). Imbalance is the dearest part over the mean.

*Steps*: micro-batches of up to ``--max-tokens`` tokens on all ranks, against those that pack so: first fit decreasing
(SkyRL's collator), LLaMA-Factory's knapsack, arrival order, and the planners of verl, slime and prime-rl, each with its
own prices. Lock step is what ranks take that wait for one another at every micro-batch (the sum over slots of the
dearest), over the mean of the ranks' totals; a rank without a micro-batch in a slot waits. Totals is the dearest rank
over the mean.

*Prompts*: the same, where the rollouts of a prompt (half as long in the median as a response) stay on one rank, and a
micro-batch computes a prompt once for all its rollouts. Whole lengths, with ``groups`` alone, against ``prefixes``.
Both columns are over the ranks' mean if every prompt were computed once in all.

Those that can be imported run. Times are CPU time of the process, medians over the cases.
"""

import argparse
import heapq
import importlib
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from statistics import mean, median
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

import wlb
from benchmarks.parts.measurement import CpuTimer, console, facts, freeze_imports, make_parser, show, write

T = TypeVar("T")
OfRanks = list[list[list[int]]]  # of every rank, of every micro-batch, the indices of its documents
Planner = Callable[[list[int], int, int], OfRanks]

# Llama-2 7B, by the names that slime and prime-rl read.
LLAMA = SimpleNamespace(
    hidden_size=4096, ffn_hidden_size=11008, intermediate_size=11008, num_layers=32, num_hidden_layers=32,
    num_attention_heads=32, num_query_groups=32, num_key_value_heads=32, kv_channels=128, head_dim=128,
    vocab_size=32000, num_experts=None,
)  # fmt: skip
PARTS_COLUMNS = {
    "planner": "{planner}",
    "documents": "{documents:,}",
    "parts": "{parts}",
    "imbalance": "{imbalance:.7f}",
    "ms": "{milliseconds:.1f}",
}
STEPS_COLUMNS = {
    "planner": "{planner}",
    "documents": "{documents:,}",
    "ranks": "{ranks}",
    "micro-batches a rank": "{micro_batches:.1f}",
    "most tokens over limit": "{over_limit:.2f}",
    "lock step": "{lock_step:.3f}",
    "totals": "{totals:.3f}",
    "ms": "{milliseconds:.1f}",
}
PROMPTS_COLUMNS = {name: STEPS_COLUMNS[name] for name in ("planner", "documents", "ranks", "micro-batches a rank")} | {
    "lock step": "{lock_step:.3f}",
    "totals": "{totals:.3f}",
    "ms": "{milliseconds:.1f}",
}
_ROLLOUTS = 8  # of a prompt
Divider = Callable[[list[float], int], list[list[int]]]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--repetitions", type=int, default=10, help="cases of each row")
    parser.add_argument("--documents", type=int, nargs="+", default=[512, 2048, 8192], help="of parts")
    parser.add_argument("--parts", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--step-documents", type=int, default=2048, help="of a step")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8])
    parser.add_argument("--max-tokens", type=int, default=32_768)
    parser.add_argument("--median", type=int, default=1_100, help="tokens of a document")
    parser.add_argument("--spread", type=float, default=1.2, help="sigma of the logarithm of lengths")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    dividers: dict[str, Divider] = {"wlb": of_costs, **installed(DIVIDERS), "heap": heap}
    own: dict[str, Planner] = {"wlb": of_wlb, "first fit decreasing": first_fit_decreasing, "arrival order": next_fit}
    planners: dict[str, Planner] = {**own, **installed(PLANNERS)}
    freeze_imports()
    parts = [
        row for documents in options.documents for number in options.parts
        for row in divide(dividers, documents, number, options)
    ]  # fmt: skip
    steps = [row for ranks in options.ranks for row in compare(planners, ranks, options)]
    prompts = [row for ranks in options.ranks for row in share(ranks, options)]
    results = facts() | {
        "seed": options.seed,
        "max_tokens": options.max_tokens,
        "parts": parts,
        "steps": steps,
        "prompts": prompts,
    }
    console.print("measured on one thread,", results["machine"], results["versions"])
    show("a given number of parts", parts, PARTS_COLUMNS)
    show(f"micro-batches of up to {options.max_tokens:,} tokens", steps, STEPS_COLUMNS)
    show("rollouts that share prompts", prompts, PROMPTS_COLUMNS)
    write(results, options.out)


def lengths_of(random: np.random.Generator, documents: int, options: argparse.Namespace) -> NDArray[np.int64]:
    drawn = random.lognormal(np.log(options.median), options.spread, documents)
    return drawn.astype(np.int64).clip(16, options.max_tokens)


def divide(
    dividers: dict[str, Divider], documents: int, parts: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row for every divider; they take turns, case by case."""
    random = np.random.default_rng([options.seed, documents, parts])
    workload = wlb.make_workload("7b", "h100")
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in dividers}
    for _ in range(options.repetitions):
        lengths = lengths_of(random, documents, options)
        costs = workload.document_seconds(lengths)
        for name, plan in dividers.items():
            timer = CpuTimer()
            divided = timer(plan, costs.tolist(), parts)
            if sorted(chain(*divided)) != list(range(documents)):
                raise AssertionError(f"{name} lost or repeated documents")
            loads = [costs[part].sum() for part in divided]
            seen[name].append((timer.seconds, float(max(loads) / np.mean(loads))))
    rows = []
    for name, cases in seen.items():
        times, imbalances = zip(*cases, strict=True)
        sizes = {"documents": documents, "parts": parts}
        rows.append({"planner": name, **sizes, "imbalance": mean(imbalances), "milliseconds": 1000 * median(times)})
    return rows


def compare(planners: dict[str, Planner], ranks: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for every planner; they take turns, case by case."""
    random = np.random.default_rng([arguments.seed, ranks])
    workload = wlb.make_workload("7b", "h100")
    seen: dict[str, list[tuple[float, ...]]] = {name: [] for name in planners}
    for _ in range(arguments.repetitions):
        lengths = lengths_of(random, arguments.step_documents, arguments)
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
                "documents": arguments.step_documents,
                "ranks": ranks,
                "micro_batches": mean(micro_batches),
                "over_limit": max(most_tokens),
                "lock_step": mean(lock_steps),
                "totals": mean(all_totals),
                "milliseconds": 1000 * median(times),
            }
        )
    return rows


def share(ranks: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row with and one without ``prefixes``; they take turns, case by case."""
    random = np.random.default_rng([arguments.seed, ranks, _ROLLOUTS])
    workload = wlb.make_workload("7b", "h100")
    groups = np.repeat(np.arange(-(-arguments.step_documents // _ROLLOUTS)), _ROLLOUTS)[: arguments.step_documents]
    seen: dict[str, list[tuple[float, ...]]] = {"wlb, groups": [], "wlb, prefixes": []}
    for _ in range(arguments.repetitions):
        prompts = (lengths_of(random, groups[-1] + 1, arguments) + 1) // 2
        lengths = np.minimum(lengths_of(random, len(groups), arguments) + prompts[groups], arguments.max_tokens)
        once = workload.document_seconds(prompts)
        rest = workload.document_seconds(lengths) - once[groups]
        fair = float(once.sum() + rest.sum()) / ranks
        for name, cases in seen.items():
            prefixes = dict(enumerate(prompts.tolist())) if "prefixes" in name else None
            timer = CpuTimer()
            shared: dict[str, Any] = {"groups": groups, "prefixes": prefixes}
            of_ranks = timer(partial(wlb.balance, max_tokens=arguments.max_tokens, ranks=ranks, **shared), lengths)
            loads = np.array([[rest[p].sum() + once[np.unique(groups[p])].sum() for p in own] for own in of_ranks])
            lock_step, totals = float(loads.max(axis=0).sum()) / fair, float(loads.sum(axis=1).max()) / fair
            cases.append((timer.seconds, len(of_ranks[0]), lock_step, totals))
    rows = []
    for name, cases in seen.items():
        times, micro_batches, lock_steps, all_totals = zip(*cases, strict=True)
        figures = {"micro_batches": mean(micro_batches), "lock_step": mean(lock_steps), "totals": mean(all_totals)}
        sizes = {"documents": len(groups), "ranks": ranks, "milliseconds": 1000 * median(times)}
        rows.append({"planner": name, **sizes, **figures})
    return rows


def installed(makers: dict[str, tuple[str, Callable[[Any], T]]]) -> dict[str, T]:
    """What can be imported here of planners, by name."""
    planners = {}
    for name, (module, make) in makers.items():
        try:
            planners[name] = make(importlib.import_module(module))
        except ImportError as error:
            console.print(f"{name} left out: {error}")
    return planners


def of_costs(costs: list[float], parts: int) -> list[list[int]]:
    return wlb.balance([1] * len(costs), parts, costs=costs)


def of_differencing(module: Any) -> Divider:
    def plan(costs: list[float], parts: int) -> list[list[int]]:
        # It compares whole numbers: picoseconds.
        divided: list[list[int]] = module.get_seqlen_balanced_partitions(
            [round(cost * 1e12) for cost in costs], parts, equal_size=False
        )
        return divided

    return plan


def heap(costs: list[float], parts: int) -> list[list[int]]:
    """Longest first, each document into the cheapest part."""
    cheapest = [(0.0, part) for part in range(parts)]
    divided: list[list[int]] = [[] for _ in range(parts)]
    for document in sorted(range(len(costs)), key=lambda index: -costs[index]):
        load, part = cheapest[0]
        divided[part].append(document)
        heapq.heapreplace(cheapest, (load + costs[document], part))
    return divided


def first_fit_decreasing(lengths: list[int], ranks: int, most: int) -> OfRanks:
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    bins: list[list[int]] = []
    rooms: list[int] = []
    for document in order:
        place = next((at for at, room in enumerate(rooms) if room >= lengths[document]), len(bins))
        if place == len(bins):
            bins.append([])
            rooms.append(most)
        bins[place].append(document)
        rooms[place] -= lengths[document]
    return dealt(bins, ranks)


def next_fit(lengths: list[int], ranks: int, most: int) -> OfRanks:
    bins: list[list[int]] = [[]]
    room = most
    for document, length in enumerate(lengths):
        if length > room:
            bins.append([])
            room = most
        bins[-1].append(document)
        room -= length
    return dealt(bins, ranks)


def dealt(bins: list[list[int]], ranks: int) -> OfRanks:
    """In turn; the last micro-batches of some ranks are empty."""
    bins = bins + [[]] * (-len(bins) % ranks)
    return [bins[rank::ranks] for rank in range(ranks)]


def of_knapsack(factory: Any) -> Planner:
    """It gives the lengths of each knapsack, in place of indices."""

    def plan(lengths: list[int], ranks: int, most: int) -> OfRanks:
        of_length: dict[int, list[int]] = {}
        for document, length in enumerate(lengths):
            of_length.setdefault(length, []).append(document)
        packed = factory.greedy_knapsack(list(lengths), most)
        return dealt([[of_length[length].pop() for length in knapsack] for knapsack in packed], ranks)

    return plan


def of_wlb(lengths: list[int], ranks: int, most: int) -> OfRanks:
    return wlb.balance(lengths, ranks=ranks, max_tokens=most)


def of_verl(verl: Any) -> Planner:
    """As its trainers: equally many documents on each rank, then micro-batches (``rearrange_micro_batches``).

    All ranks have one more micro-batch as long as one of any rank is over the limit.
    """
    import torch

    def divided(lengths: list[int], prices: list[float], number: int, most: int) -> list[list[int]] | None:
        parts: list[list[int]] = verl.get_seqlen_balanced_partitions(prices, number, equal_size=False)
        if any(sum(lengths[i] for i in part) > most for part in parts):
            return None
        parts.sort(key=lambda part: (sum(prices[i] for i in part), part[0]), reverse=True)
        return parts[::2][::-1] + parts[1::2]

    def plan(lengths: list[int], ranks: int, most: int) -> OfRanks:
        prices = verl.calculate_workload(torch.tensor(lengths)).tolist()
        of_ranks = verl.get_seqlen_balanced_partitions(prices, ranks, equal_size=True)
        number = max(-(-sum(lengths[i] for i in own) // most) for own in of_ranks)
        while True:
            planned: OfRanks = []
            for own in of_ranks:
                parts = divided([lengths[i] for i in own], [prices[i] for i in own], number, most)
                if parts is None:
                    break
                planned.append([[own[i] for i in part] for part in parts])
            if len(planned) == ranks:
                return planned
            number += 1

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


DIVIDERS: dict[str, tuple[str, Callable[[Any], Divider]]] = {
    "verl": ("verl.utils.seqlen_balancing", of_differencing),
    "OpenRLHF": ("openrlhf.utils.seqlen_balancing", of_differencing),
}
PLANNERS: dict[str, tuple[str, Callable[[Any], Planner]]] = {
    "LLaMA-Factory": ("llamafactory.data.processor.processor_utils", of_knapsack),
    "verl": ("verl.utils.seqlen_balancing", of_verl),
    "slime": ("slime.utils.dp_schedule", of_slime),
    "prime-rl": ("prime_rl.trainer.batch", of_prime_rl),
    "SkyRL": ("skyrl.train.dataset.bin_packing", of_skyrl),
}

if __name__ == "__main__":
    main()
