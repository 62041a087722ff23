"""MagiAttention's benchmark of distributed attention, and the simulator's prices for it.

Source: SandAI-org/MagiAttention, ``exps/dist_attn`` (commit 2c64135): one attention layer of 64 query and 8 key/value
heads x 128 in bf16 on H100, FlashAttention-3, 8,192 tokens per GPU, all GPUs in one context-parallel group, one call
per pack of documents. The systems are its baselines; kernels, links and memory are priced as everywhere.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wlb.job.job import Job
from wlb.sharding import MicroBatches, shard_many
from wlb.simulate.job import simulated_job
from wlb.workload import Costs, ModelShape, hardware_preset, make_workload
from wlb.workload.base import Phase
from wlb.workload.costs import QUERY_TILE
from wlb.workload.flops import attention_flops
from wlb.workload.links import group_link, shard_bytes
from wlb_studies.policies.exchange import all_to_all_of_heads
from wlb_studies.policies.megatron import dynamic
from wlb_studies.policies.plan import Ranks

TOKENS_OF_A_GPU = 8192
SHAPE = ModelShape(hidden=8192, layers=1, heads=64, kv_heads=8, head_dim=128, ffn_hidden=28_672, vocab_size=32_000)
HARDWARE = hardware_preset("h100-fa3")

# Quoted: ``doc_length_distribution.csv`` there: bin centres and documents per bin.
_LENGTHS = (5, 30, 75, 150, 350, 762, 1536, 3072, 6144, 12_288, 24_576, 49_152, 98_304, 163_840)
_COUNTS = (
    *(30_254, 391_188, 699_596, 1_377_757, 3_794_735, 3_316_785, 2_106_566),
    *(988_525, 410_002, 173_574, 115_007, 18_428, 22_513, 18_284),
)
_PACKS = 20
_SEED = 42
# Documents of each length in 20 packs of 64K, 128K, 256K and 512K tokens that its generator draws with its seed, 42; a
# document cut at the end of a pack counts as the nearest length. The few expensive lengths decide, and 20 packs differ
# from the distribution: packs of 512K tokens have a quarter less work.
_DRAWN = {
    65_536: (
        (30, 75, 150, 350, 762, 1536, 3072, 6144, 8192, 12_288, 16_384),
        (23, 52, 107, 241, 237, 130, 43, 24, 12, 9, 21),
    ),
    131_072: (
        (5, 30, 75, 150, 350, 762, 1536, 3072, 6144, 12_288, 16_384, 24_576, 32_768),
        (3, 44, 62, 160, 405, 392, 266, 116, 37, 17, 5, 11, 18),
    ),
    262_144: (
        (5, 30, 75, 150, 350, 762, 1536, 3072, 6144, 12_288, 24_576, 32_768, 49_152, 65_536),
        (5, 82, 166, 319, 841, 732, 468, 204, 96, 43, 29, 8, 5, 10),
    ),
    524_288: (
        (5, 30, 75, 150, 350, 762, 1536, 3072, 6144, 12_288, 24_576, 32_768, 49_152, 98_304, 131_072),
        (14, 171, 323, 635, 1698, 1521, 967, 448, 205, 85, 51, 11, 11, 8, 4),
    ),
}

# Reads and writes per value of K and V, counted in its scripts. Forward: reordered after gathering. Backward: reordered
# again, and all gradients cleared (1); for each of two halves of the queries, float32 gradients are cleared, read,
# written narrow and added (8); reordered.
_GATHER_PASSES = {"forward": 2.0, "backward": 2.0 + 1.0 + 2 * 8.0 + 2.0}
# FlashAttention-3's backward starts a block for every 128 keys of the longest document, for every document and head;
# most blocks have no work. Fitted to the four bars of the gathering ring's backward.
_EMPTY_BLOCK_SECONDS = 4e-9
# Reads and writes per query value in each step of a ring: results are added to earlier ones (3); backward, halves of
# queries, outputs and gradients are read separately, and gradients added.
_RING_PASSES = {"forward": 3.0, "backward": 5.0}
# NCCL gives a message to one peer half an adapter (NVIDIA/nccl issue 1272). Derived: bars within a node show the same.
_PEER_SHARE = 0.5

Array = NDArray[np.float64]
Packs = Sequence[Sequence[int]]


@lru_cache(maxsize=16)
def packs(total: int) -> list[list[int]]:
    """Document lengths in packs of ``total`` tokens: the benchmark's packs, or new ones from its distribution.

    As there, longer documents are cut into quarters of a pack, and a document is cut where the pack ends.
    """
    random = np.random.default_rng(_SEED)
    if total in _DRAWN:
        documents = random.permutation(np.repeat(*_DRAWN[total]))
    else:
        sizes, chances = _in_quarters(total)
        mean = float(sizes @ chances)
        documents = random.choice(sizes, int(2 * _PACKS * total / mean) + 1000, p=chances)
    ends = np.cumsum(documents)
    bounds = np.arange(1, min(_PACKS, int(ends[-1]) // total) + 1) * total
    cuts = np.unique(np.concatenate([[0], ends[ends < bounds[-1]], bounds]))
    pack = cuts[:-1] // total
    return [np.diff(cuts)[pack == index].tolist() for index in range(len(bounds))]


def _in_quarters(total: int) -> tuple[NDArray[np.int64], Array]:
    """Lengths up to a quarter of ``total``, and the share of documents that have each."""
    longest = total // 4
    lengths, counts = np.array(_LENGTHS), np.array(_COUNTS)
    sizes = np.append(lengths % longest, longest)
    weights = np.append(np.where(sizes[:-1] > 0, counts, 0), (lengths // longest * counts).sum())
    return sizes, weights / weights.sum()


def stated_flops(lengths: Sequence[int], direction: Phase) -> float:
    """The operations by which the benchmark divides a pack's seconds."""
    return float(attention_flops(SHAPE, lengths, direction).sum())


class _Shared(NamedTuple):
    """Documents cut into heads and tails over GPUs: the attention of the slowest GPU in one launch."""

    seconds: float
    tokens: int  # of each GPU, padding included
    drain: float  # launch overhead, part of the seconds


def gathering_ring(lengths: Sequence[int], gpus: int, direction: Phase) -> float:
    """Gathers all keys and values before attention and reduces their gradients after it; nothing overlaps."""
    shared = _shared(lengths, gpus, direction)
    keys = shared.tokens * gpus * _key_bytes()
    link = group_link(HARDWARE, "all_gather", gpus, stride=1)
    one = 2 * float(link.seconds(shard_bytes(keys / 2, gpus)))  # keys, and values
    copies = _GATHER_PASSES[direction] * keys / HARDWARE.memory_bandwidth
    attention = shared.seconds + shared.drain  # in two launches
    if direction == "forward":
        return attention + one + copies
    blocks = len(lengths) * -(-max(lengths) // QUERY_TILE) * SHAPE.heads
    return attention + 2 * one + copies + 2 * blocks * _EMPTY_BLOCK_SECONDS


def ring(lengths: Sequence[int], gpus: int, direction: Phase) -> float:
    """Keys and values (backward: also gradients) move from GPU to GPU while the previous ones are attended."""
    if gpus == 1:
        return float(_workload().attention_seconds(lengths, direction).sum()) + _drain(max(lengths), direction)
    shared = _shared(lengths, gpus, direction)
    sent = shared.tokens * _key_bytes() * (1 if direction == "forward" else 2)
    adapter = group_link(HARDWARE, "point_to_point", gpus, stride=HARDWARE.node_size)
    wire = adapter.latency + sent / (_PEER_SHARE * adapter.bandwidth)
    query_bytes = shared.tokens * SHAPE.heads * SHAPE.head_dim * HARDWARE.bytes_per_value
    busy = shared.seconds / gpus + _RING_PASSES[direction] * query_bytes / HARDWARE.memory_bandwidth
    return gpus * (max(busy, wire) + HARDWARE.exposed * min(busy, wire))


def megatron_dynamic(lengths: Sequence[int], gpus: int, direction: Phase) -> float:
    """Megatron's hybrid context parallelism: rounds of rings, each with as many GPUs as its document needs."""
    plan = dynamic(np.array(lengths), Ranks(_job(gpus), TOKENS_OF_A_GPU))
    seconds = np.zeros((gpus, plan.slots))
    for group in plan.groups:
        of_group = [lengths[document] for document in group.documents]
        seconds[list(group.ranks), group.slot] = ring(of_group, len(group.ranks), direction)
    rounds = np.split(seconds, sorted(plan.barriers - {0}), axis=1)
    return float(sum(of_round.sum(axis=1).max() for of_round in rounds))


def all_to_all(lengths: Sequence[int], gpus: int, direction: Phase) -> float:
    """Whole sequences for some heads (DeepSpeed-Ulysses): queries, keys and values move there, outputs back."""
    total = sum(lengths)
    wire, received = all_to_all_of_heads(_job(gpus), total, gpus)
    attention = float(_workload().attention_seconds(lengths, direction).sum()) / gpus + _drain(max(lengths), direction)
    copies = 2 * 2 * float(received) / HARDWARE.memory_bandwidth  # reordered on both sides
    return attention + float(wire) + copies


SYSTEMS: dict[str, Callable[[Sequence[int], int, Phase], float]] = {
    "ring_allgather": gathering_ring,
    "ring_p2p": ring,
    "hybrid_dcp": megatron_dynamic,
    "ulysses": all_to_all,
}


def _shared(lengths: Sequence[int], gpus: int, direction: Phase) -> _Shared:
    """Load of the busiest GPU, with per-document sharding (WLB-LLM, section 5.1)."""
    sizes = np.asarray(lengths, np.int64)
    pieces = shard_many(MicroBatches(sizes, np.array([len(sizes)])), gpus, "per_document", _workload())
    attention = np.bincount(pieces.lane, _workload().piece_seconds(pieces.start, pieces.stop, direction), gpus)
    drain = _drain(int(pieces.stop.max()), direction)
    chunks = 2 * gpus
    return _Shared(float(attention.max()) + drain, int((-(-sizes // chunks) * 2).sum()), drain)


def _drain(keys: int, direction: Phase) -> float:
    return float(_workload().drain_seconds(keys, direction))


def _key_bytes() -> float:
    """Bytes of a token's key and value."""
    return 2.0 * SHAPE.kv_heads * SHAPE.head_dim * HARDWARE.bytes_per_value


@lru_cache(maxsize=1)
def _workload() -> Costs:
    return make_workload(SHAPE, HARDWARE)


@lru_cache(maxsize=8)
def _job(gpus: int) -> Job:
    return simulated_job(SHAPE, gpus * TOKENS_OF_A_GPU, "plain-4d", tp=1, cp=1, pp=1, dp=gpus, hardware=HARDWARE)
