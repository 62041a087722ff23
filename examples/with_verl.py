"""verl's own division of rollouts among ranks and into micro-batches, and the same calls rerouted to ours.

    wlb prepare --stdlib --train-bpe 1024 --out demo/corpus
    python examples/with_verl.py demo/corpus

Runs verl's ``rearrange_micro_batches`` and the division that its trainers make, on batches of documents, without Ray or
a model. Prices are verl's own.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from verl.utils import seqlen_balancing

from wlb.documents.store.reader import TokenStore
from wlb.integrations.verl import reroute_balancing

DP = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("store", type=Path)
    parser.add_argument("--max-tokens", type=int, default=8192, help="of a micro-batch, and of a document")
    parser.add_argument("--rollouts", type=int, default=2048, help="of a step; a multiple of 8, the ranks")
    arguments = parser.parse_args()
    lengths = TokenStore.open(arguments.store).lengths
    lengths = lengths[lengths <= arguments.max_tokens]
    order = np.random.default_rng(0).permutation(len(lengths))[: arguments.rollouts]
    rollouts = torch.from_numpy(lengths[order])
    results = {"verl": of(rollouts, arguments.max_tokens)}
    reroute_balancing()  # what a user adds
    results["rerouted"] = of(rollouts, arguments.max_tokens)
    print(json.dumps(results, indent=2))


def of(lengths: torch.Tensor, max_tokens: int) -> dict[str, Any]:
    """What verl makes of a step, with whatever balances now."""
    prices = seqlen_balancing.calculate_workload(lengths)
    ranks = seqlen_balancing.get_seqlen_balanced_partitions(prices.tolist(), DP, equal_size=True)
    loads = torch.stack([prices[rank].sum() for rank in ranks]).double()
    parts = [[rank[i] for i in part] for rank in ranks for part in micro_batches_of(lengths[rank], max_tokens)]
    return {
        "rollouts_once": sorted(i for part in parts for i in part) == list(range(len(lengths))),
        "imbalance_of_ranks": float(loads.max() / loads.mean()),
        "micro_batches": len(parts),
        "most_tokens_of_a_micro_batch": max(int(lengths[part].sum()) for part in parts),
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
