"""verl's own division of rollouts among ranks and into micro-batches, and the same calls rerouted to ours.

    wlb prepare --stdlib --train-bpe 1024 --out demo/corpus
    python examples/with_verl.py demo/corpus

Runs verl's ``rearrange_micro_batches`` and the division that its trainers make, on batches of documents, without Ray or
a model. Prices are verl's own.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from verl.utils import seqlen_balancing

from wlb.documents.store.reader import TokenStore
from wlb.integrations.verl import reroute_balancing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("store", type=Path)
    parser.add_argument("--max-tokens", type=int, default=8192, help="of a micro-batch, and of a document")
    parser.add_argument("--dp", type=int, default=8)
    parser.add_argument("--rollouts", type=int, default=2048, help="of a step; a multiple of dp")
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    lengths = TokenStore.open(arguments.store).lengths
    lengths = lengths[lengths <= arguments.max_tokens]
    order = np.random.default_rng(0).permutation(len(lengths))[: arguments.rollouts * arguments.steps]
    batches = torch.from_numpy(lengths[order]).reshape(-1, arguments.rollouts)
    results = {"verl": of(batches, arguments)}
    reroute_balancing()  # what a user adds
    results["rerouted"] = of(batches, arguments)
    print(json.dumps(results, indent=2))


def of(batches: torch.Tensor, arguments: argparse.Namespace) -> dict[str, Any]:
    """What verl makes of all batches, with whatever balances now."""
    rank_imbalance, micro_batch_prices, micro_batch_tokens = [], [], []
    once, seconds = True, 0.0
    for lengths in batches:
        prices = seqlen_balancing.calculate_workload(lengths)
        started = time.process_time()
        ranks = seqlen_balancing.get_seqlen_balanced_partitions(prices.tolist(), arguments.dp, equal_size=True)
        seconds += time.process_time() - started
        loads = torch.stack([prices[rank].sum() for rank in ranks]).double()
        rank_imbalance.append(float(loads.max() / loads.mean()))
        trained = []
        for rank in ranks:
            for part in micro_batches_of(lengths[rank], arguments.max_tokens):
                micro_batch_prices.append(float(prices[rank][part].sum()))
                micro_batch_tokens.append(int(lengths[rank][part].sum()))
                trained += [rank[index] for index in part]
        once &= sorted(trained) == list(range(len(lengths)))
    return {
        "rollouts_once": once,
        "imbalance_of_ranks": round(float(np.mean(rank_imbalance)), 6),
        "micro_batches": len(micro_batch_prices),
        "most_tokens_of_a_micro_batch": max(micro_batch_tokens),
        "dearest_micro_batch_over_mean": round(max(micro_batch_prices) / float(np.mean(micro_batch_prices)), 3),
        "balancing_ms_per_step": round(1000 * seconds / len(batches), 2),
    }


def micro_batches_of(lengths: torch.Tensor, max_tokens: int) -> list[list[int]]:
    """The indices of a rank's micro-batches, as verl's engines divide them."""
    mask = torch.arange(int(lengths.max()))[None, :] < lengths[:, None]
    batch = TensorDict({"input_ids": mask.long(), "attention_mask": mask.long()}, batch_size=[len(lengths)])
    _, indices = seqlen_balancing.rearrange_micro_batches(batch, max_token_len=max_tokens)
    parts: list[list[int]] = indices
    return parts


if __name__ == "__main__":
    main()
