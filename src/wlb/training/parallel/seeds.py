"""The random generators of a rank, seeded by its place in the job.

Initial weights do not depend on them (``initialise``), nor does the order of documents, and the model has no dropout:
they are there for what a user adds to it. Such randomness has to differ between ranks that hold different tokens or
layers, and to be the same on tensor-parallel ranks, which compute the same activations together.
"""

from __future__ import annotations

import numpy as np
import torch

from wlb.training.parallel.parallelize import JobMesh

_DIFFERENT = ("pp", "dp", "cp")


def seed_this_rank(seed: int, mesh: JobMesh) -> None:
    """Seed PyTorch's generators, of the CPU and of every GPU, with ``training.seed`` and the rank's place."""
    torch.manual_seed(rank_seed(seed, *map(mesh.rank, _DIFFERENT)))


def place_of(mesh: JobMesh) -> str:
    """The name of the ranks that share their random numbers with this one, for checkpoints."""
    return ".".join(f"{dimension}{mesh.rank(dimension)}" for dimension in _DIFFERENT)


def rank_seed(seed: int, pp_rank: int, dp_rank: int, cp_rank: int) -> int:
    """A seed for tensor-parallel ranks with this place; it depends on nothing else, such as the sizes of the job."""
    (word,) = np.random.SeedSequence([seed, pp_rank, dp_rank, cp_rank]).generate_state(1, np.uint64)
    return int(word)
