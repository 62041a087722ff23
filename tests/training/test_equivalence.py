"""However documents are packed, sharded and laid out, the gradient is that of the documents alone.

For every preset, steps are planned from random document lengths and run in float64 by real gloo processes in layouts of
data-, pipeline-, context- and tensor-parallel size. Loss and every gradient must equal, to 1e-10 relative, what the
plain model computes in one process from one segment at a time, with the reference attention and no packing anywhere. A
segment is a whole document, except under ``sequential``, which cuts documents at the context window: there the oracle
runs the same pieces, because a cut document is trained as its pieces.

Every other step of a pipeline runs operations in an order drawn at random, another one on each data-parallel rank. Its
output head is on the last stage, and dealt.
Level steps are planned and drawn at random, so that every rank runs micro-batches of its own beside those it shares.

Documents cut into slices go through two stages, forward in order and backward in reverse.

``make equivalence`` (``--all-layouts``) runs every layout of up to 8 processes, and level steps with every kind of
activation checkpointing; without it a selection runs, in which every dimension meets the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import NamedTuple, get_args
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.packing.stage import Prices
from tests.schedules.by_chance import operations_by_chance
from tests.training.distributed import run_ranks
from tests.training.documents import RandomDocuments
from wlb.attention import segment_attention
from wlb.attention.backends import BACKENDS
from wlb.attention.slices import KeptSlices
from wlb.documents.segments import Segment
from wlb.job.config import PRESETS, JobConfig
from wlb.models.initialise import initialise_weights
from wlb.models.transformer import Transformer, TransformerConfig
from wlb.packing.arrange import arrange
from wlb.packing.level import level_groups
from wlb.packing.plan import MicroBatch, StageRanks, StepPlan
from wlb.runtime.batch import RankSlice
from wlb.runtime.loss import IGNORE_LABEL, token_losses
from wlb.runtime.reading import labels_of_segments, make_batch
from wlb.schedules.layout import Layout, split_layers
from wlb.training.parallel.mesh import build_mesh
from wlb.training.parallel.parallelize import Execution, apply_activation_checkpointing, build_stage_modules
from wlb.training.parallel.pipeline import PipelineRunner
from wlb.workload import ModelShape, make_workload
from wlb.workload.base import Checkpointing

# Nothing that tensor parallelism does not need divides evenly: 5 blocks over up to 4 stages (with --all-layouts 9 over
# up to 8), odd widths over 2 shards.
LAYERS, LAYERS_OF_ALL_LAYOUTS = 5, 9
MICRO_BATCHES, MICRO_BATCHES_OF_ALL_LAYOUTS = 4, 8
LEVEL_LAYERS = 2
LEVEL_DOCUMENTS = 24
BY_CHANCE, BY_CHANCE_OF_ALL_LAYOUTS = 2, 12  # level steps
VOCABULARY = 38
SEED = 3
CONTEXT_WINDOW = 24
TOLERANCE, TOLERANCE_OF_SLICES = 1e-10, 1e-12

ALL_LAYOUTS = [
    Layout(dp=dp, pp=pp, cp=cp, tp=tp, virtual_pp=virtual_pp, schedule="interleaved_1f1b" if virtual_pp > 1 else "1f1b")
    for dp, pp, cp, tp, virtual_pp in product((1, 2), (1, 2, 4), (1, 2, 4), (1, 2), (1, 2))
    if dp * pp * cp * tp <= 8 and (virtual_pp == 1 or pp > 1)
]
ALL_LAYOUTS += [replace(one, head="dealt") if one.pp > 1 else replace(one, weights="gathered") for one in ALL_LAYOUTS]
ALL_LAYOUTS_SECONDS = 17_000.0  # less than `make equivalence` gives each test
SELECTED = [  # dp, pp, cp, tp, virtual_pp
    (1, 1, 1, 1, 1),
    (2, 1, 1, 1, 1),
    (1, 2, 1, 1, 2),
    (1, 1, 2, 1, 1),
    (1, 1, 1, 2, 1),
    (1, 2, 2, 1, 1),
    (2, 1, 1, 2, 1),
    (2, 2, 2, 1, 1),
    (1, 2, 2, 2, 2),
    (2, 1, 2, 2, 1),
]


@dataclass(frozen=True)
class Step:
    """A planned step, its documents, the strategy that shards it and what the oracle makes of it."""

    plan: StepPlan
    documents: RandomDocuments
    strategy: str
    loss: float
    gradients: dict[str, Tensor]


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> TransformerConfig:
    layers = LAYERS_OF_ALL_LAYOUTS if request.config.getoption("--all-layouts") else LAYERS
    shape = ModelShape(hidden=14, layers=layers, heads=6, kv_heads=2, head_dim=4, ffn_hidden=22, vocab_size=VOCABULARY)
    return TransformerConfig(shape)


@pytest.fixture(scope="module")
def micro_batches(request: pytest.FixtureRequest) -> int:
    """Of a step: dp ranks share them, and a pipeline needs as many as it has ranks."""
    return MICRO_BATCHES_OF_ALL_LAYOUTS if request.config.getoption("--all-layouts") else MICRO_BATCHES


@pytest.fixture(scope="module")
def documents() -> RandomDocuments:
    lengths = np.random.default_rng(0).geometric(1 / 10, size=90).clip(max=CONTEXT_WINDOW)
    return RandomDocuments(lengths, VOCABULARY)


@pytest.fixture(scope="module")
def steps(documents: RandomDocuments, model: TransformerConfig, micro_batches: int) -> list[Step]:
    """A step of every preset, and one with a single document, whose other micro-batches are empty.

    Two more are steps of documents in which only some tokens are labels.
    """
    jobs = [_job(preset, global_batch=micro_batches) for preset in PRESETS]
    planned = [(_largest_step(job, documents), job.sharding.strategy) for job in jobs]
    alone = MicroBatch((Segment(0, 0, int(documents.lengths[0])),), 1.0)
    planned.append((StepPlan(0, ((alone, *[MicroBatch((), 0.0)] * (micro_batches - 1)),)), "balanced"))
    masked = replace(documents, labelled=0.3)
    steps = [(plan, documents, strategy) for plan, strategy in planned]
    steps += [(plan, masked, strategy) for plan, strategy in planned if strategy in ("per_sequence", "balanced")][:2]
    return [Step(*step, *_one_segment_at_a_time(step[0], step[1], model)) for step in steps]


def _job(preset: str, **packing: object) -> JobConfig:
    sections = {"data": {"store": "none"}, "packing": packing}
    return JobConfig.model_validate({"preset": preset, **sections})


def _largest_step(job: JobConfig, documents: RandomDocuments) -> StepPlan:
    """A step of few tokens may have gradients that are zero but for rounding."""
    packer = job.packing.packer(job.packing.global_batch, CONTEXT_WINDOW, make_workload("tiny"))
    plans = packer.plan(int(length) for length in documents.lengths) + packer.drain()
    return max(plans, key=lambda plan: plan.tokens)


def _one_segment_at_a_time(
    plan: StepPlan, documents: RandomDocuments, config: TransformerConfig
) -> tuple[float, dict[str, Tensor]]:
    model = Transformer(config).double()
    initialise_weights(model, layers=config.shape.layers, seed=SEED)
    labels = [_labels(segment, documents) for segment in plan.segments]
    loss_tokens = sum(int((of_segment != IGNORE_LABEL).sum()) for of_segment in labels)
    total = 0.0
    with mock.patch.dict(BACKENDS, {"reference": BACKENDS["reference"]}, clear=True):
        for segment, of_segment in zip(plan.segments, labels, strict=True):
            tokens = torch.from_numpy(documents.read(*segment).astype(np.int64))
            attend = partial(segment_attention, segment_lengths=(segment.length,))
            scores = model(tokens, torch.arange(segment.length), attend)
            loss = F.cross_entropy(scores, of_segment, reduction="sum") / loss_tokens
            loss.backward()
            total += loss.item()
    return total, {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def _labels(segment: Segment, documents: RandomDocuments) -> Tensor:
    """The next token of every token, where there is one and it is a label."""
    whole = documents.read(segment.document).astype(np.int64)
    mask = documents.loss_mask(segment.document, 0, len(whole))
    followers = np.append(whole if mask is None else np.where(mask, whole, IGNORE_LABEL), IGNORE_LABEL)
    return torch.from_numpy(followers[segment.start + 1 :][: segment.length])


def _errors_of_all_layouts(
    model: TransformerConfig, layouts: list[Layout], steps: list[list[Step]]
) -> list[dict[str, float]]:
    """In every process: the largest relative error of the loss and of each gradient this rank holds, by layout.

    Where the output head is dealt, layouts have the kinds of activation checkpointing in turn.
    """
    dealt = iter(get_args(Checkpointing) * len(layouts))
    kinds: list[Checkpointing] = [next(dealt) if layout.deals_head else "none" for layout in layouts]
    return [_errors(model, *of_layout) for of_layout in zip(layouts, steps, kinds, strict=True)]


def _unlike(steps: list[Step]) -> list[Step]:
    """Steps that differ also where no context-parallel ranks share them: with cut documents, empty micro-batches,
    labels that are masked, and micro-batches over the context window."""
    cut = [step for step in steps if any(segment.start for segment in step.plan.segments)]
    empty = [step for step in steps if not all(micro_batch.segments for micro_batch in step.plan.micro_batches)]
    masked = [step for step in steps if step.documents.labelled < 1.0]
    long = [step for step in steps if max(part.tokens for part in step.plan.micro_batches) > CONTEXT_WINDOW]
    last = [kind[-1] for kind in (cut, empty, masked, long)]
    return [step for step in steps if any(step is chosen for chosen in last)]


def _errors_of_level_steps(
    model: TransformerConfig, jobs: list[LevelJob], steps: list[list[Step]]
) -> list[dict[str, float]]:
    return [_errors(model, job.layout, of_job, job.checkpointing) for job, of_job in zip(jobs, steps, strict=True)]


def _errors(
    model: TransformerConfig,
    parallel: Layout,
    steps: list[Step],
    checkpointing: Checkpointing = "none",
) -> dict[str, float]:
    mesh, device = build_mesh(parallel, "cpu"), torch.device("cpu")
    stages = build_stage_modules(
        model,
        parallel,
        mesh,
        Execution(device, torch.float64),
        seed=SEED,
        activation_checkpointing=checkpointing,
    )
    per_rank = len(steps[0].plan.micro_batches) // parallel.dp
    runner = PipelineRunner(stages, parallel, mesh, per_rank, Execution(device, torch.float64))
    errors: dict[str, float] = {}
    for number, step in enumerate(steps):
        for stage in stages:
            stage.zero_grad()
        share = RankSlice(mesh.rank("dp"), mesh.rank("cp"), parallel, step.strategy, group=mesh.group("cp"))
        plan = arrange(step.plan, parallel.dp)
        batches = share.batches(plan, partial(make_batch, store=step.documents))
        operations = [
            operations_by_chance(
                2 * number + dp, parallel.pp, parallel.virtual_pp, per_rank, deals_head=parallel.deals_head
            )
            for dp in range(parallel.dp)
        ]
        loss = runner.run_step(
            batches, int(labels_of_segments([*plan.segments], step.documents).sum()), operations if number % 2 else ()
        )
        dist.all_reduce(loss)
        found = {"loss": loss} | {
            name: weight.grad.full_tensor()
            for stage in stages
            for name, weight in stage.named_parameters()
            if isinstance(weight.grad, DTensor)
        }
        exact = {"loss": torch.tensor(step.loss, dtype=torch.float64)} | step.gradients
        for name, value in found.items():
            error = float((value - exact[name]).abs().max() / exact[name].abs().max())
            errors[name] = float(np.maximum(errors.get(name, 0.0), error))  # NaN where any is; max() may lose it
    return errors


class LevelJob(NamedTuple):
    """Steps in which every context-parallel rank of ``layout`` runs micro-batches of its own."""

    layout: Layout
    checkpointing: Checkpointing


ALL_LEVEL_JOBS = [
    LevelJob(Layout(cp=cp, tp=tp), kind)
    for cp, tp, kind in product((2, 3, 4, 8), (1, 2), get_args(Checkpointing))
    if cp * tp in (3, 4, 8)
]
SELECTED_LEVEL_JOBS = [
    *(LevelJob(Layout(cp=3), kind) for kind in get_args(Checkpointing)),
    LevelJob(Layout(cp=2, tp=2), "keep_attention"),
    LevelJob(Layout(cp=8), "full"),
]


def _level_plans(ranks: int, documents: RandomDocuments, by_chance: int) -> list[StepPlan]:
    """As they are planned, as nobody would plan them, and some by chance."""

    def micro_batch(of: Sequence[int], *indices: int) -> MicroBatch:
        segments = [Segment(index, 0, int(documents.lengths[index])) for index in indices]
        return MicroBatch(tuple(segments), float(len(of)), tuple(of))

    everyone, last = range(ranks), ranks - 1
    count, rng = len(documents.lengths), np.random.default_rng(ranks)
    of_step, stage = documents.lengths[:LEVEL_DOCUMENTS].tolist(), StageRanks(ranks, ranks)
    planned = level_groups(of_step, CONTEXT_WINDOW // 2, Prices(), stage)
    chosen = [
        [micro_batch(group.ranks, *group.documents) for group in planned],
        # Rank 0 has nothing, and at the end all others share a document that is too short for them.
        [
            micro_batch([last], 1, 2),
            micro_batch(range(1, ranks), 3),
            micro_batch([last], 4),
            micro_batch([last], 5),
            micro_batch(range(1, ranks), int(documents.lengths.argmin())),
        ],
        [micro_batch(everyone, 6), micro_batch([0], 7, 8, 9), micro_batch(everyone, 10), micro_batch([0, last], 11)],
    ]
    for _ in range(by_chance):
        order = iter(rng.permutation(count).tolist())
        step = []
        for _ in range(8):
            group = sorted(rng.choice(ranks, rng.integers(1, ranks + 1), replace=False).tolist())
            several = int(rng.integers(1, 4)) if len(group) == 1 else 1
            step.append(micro_batch(group, *(next(order) for _ in range(several))))
        chosen.append(step)
    return [StepPlan(number, (tuple(step),)) for number, step in enumerate(chosen)]


# Eight processes repeat in larger groups what three prove.
@pytest.mark.parametrize(
    "world_size",
    [
        pytest.param(size, marks=pytest.mark.exhaustive if size > 4 else ())
        for size in sorted({job.layout.world_size for job in ALL_LEVEL_JOBS})
    ],
)
def test_level_steps_have_the_loss_and_gradients_of_one_document_at_a_time(
    world_size: int, model: TransformerConfig, documents: RandomDocuments, request: pytest.FixtureRequest
) -> None:
    every = request.config.getoption("--all-layouts")
    model = replace(model, shape=replace(model.shape, layers=LEVEL_LAYERS))
    jobs = [job for job in (ALL_LEVEL_JOBS if every else SELECTED_LEVEL_JOBS) if job.layout.world_size == world_size]
    steps = {}
    for ranks in {job.layout.cp for job in jobs}:
        plans = _level_plans(ranks, documents, BY_CHANCE_OF_ALL_LAYOUTS if every else BY_CHANCE)
        labelled = [documents, *[replace(documents, labelled=0.3)] * (len(plans) - 1)]
        steps[ranks] = [
            Step(plan, source, "per_document", *_one_segment_at_a_time(plan, source, model))
            for plan, source in zip(plans, labelled, strict=True)
        ]
    # Tensor parallelism and checkpointing do not see who shares a micro-batch, so a selection repeats few steps.
    all_steps = [every or job.layout.cp == 8 or (job.layout.tp == 1 and job.checkpointing == "none") for job in jobs]
    of_jobs = [
        steps[job.layout.cp] if complete else steps[job.layout.cp][-1:]
        for job, complete in zip(jobs, all_steps, strict=True)
    ]
    by_rank = run_ranks(world_size, _errors_of_level_steps, model, jobs, of_jobs)
    for job, errors_of_ranks in zip(jobs, zip(*by_rank, strict=True), strict=True):
        assert {name for errors in errors_of_ranks for name in errors} == {"loss", *steps[job.layout.cp][0].gradients}
        assert all(error < TOLERANCE for errors in errors_of_ranks for error in errors.values()), job


def _slices(documents: RandomDocuments) -> tuple[StepPlan, StepPlan]:
    """A step with two documents in slices, the second cut from its own, and the same with all of them whole."""
    longest, other, *short = np.argsort(-documents.lengths)[:5].tolist()
    length, rest = int(documents.lengths[longest]), int(documents.lengths[other]) - 3
    whole = [Segment(longest, 0, length), Segment(other, 3, rest)]
    shorter = [Segment(document, 0, int(documents.lengths[document])) for document in short]

    def sliced(of: Segment, begin: int, stop: int, *more: Segment) -> MicroBatch:
        segment = Segment(of.document, of.start + begin, stop - begin)
        return MicroBatch((segment, *more), 1.0, earlier=begin, continued=stop < of.length)

    micro_batches = [
        MicroBatch((shorter[0],), 1.0),
        sliced(whole[0], 0, 9),
        sliced(whole[0], 9, 12, shorter[1]),
        sliced(whole[1], 0, 1, shorter[2]),
        sliced(whole[0], 12, length),
        sliced(whole[1], 1, rest),
    ]
    segments = tuple(MicroBatch((segment,), 1.0) for segment in (*whole, *shorter))
    return StepPlan(0, (tuple(micro_batches),)), StepPlan(0, (segments,))


def _gradients_of_slices(
    model: TransformerConfig, documents: RandomDocuments, plan: StepPlan, checkpointing: Checkpointing
) -> dict[str, Tensor]:
    """Of two stages in this process, summed over context-parallel ranks; rows are padded as for two ``tp`` ranks."""
    stages = [Transformer(model, layers).double() for layers in split_layers(model.shape, Layout(pp=2))]
    for stage in stages:
        initialise_weights(stage, layers=model.shape.layers, seed=SEED)
        apply_activation_checkpointing(stage, checkpointing)
    share = RankSlice(cp_rank=dist.get_rank(), layout=Layout(cp=dist.get_world_size(), tp=2))
    losses, kept = [], [KeptSlices() for _ in stages]
    for batch in share.batches(plan, partial(make_batch, store=documents)):
        x, attend = batch.tokens, batch.attention
        assert attend is not None
        for stage, slices in zip(stages, kept, strict=True):
            x = stage(x, batch.position_ids, attend.of_one_stage(slices))
        losses.append(token_losses(x, batch.labels).sum() / labels_of_segments([*plan.segments], documents).sum())
    for loss in reversed(losses):
        loss.backward()
    assert not any(layer for slices in kept for layer in slices.kept.values())
    found = {"loss": torch.stack(losses).sum().detach()}
    found |= {
        name: weight.grad for stage in stages for name, weight in stage.named_parameters() if weight.grad is not None
    }
    for value in found.values():
        dist.all_reduce(value)
    return found


def _gradients_by_checkpointing(
    model: TransformerConfig, documents: RandomDocuments, plan: StepPlan
) -> list[dict[str, Tensor]]:
    return [_gradients_of_slices(model, documents, plan, kind) for kind in get_args(Checkpointing)]


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("cp", [1, 2])
def test_slices_have_the_loss_and_gradients_of_one_document_at_a_time(
    cp: int, window: int | None, model: TransformerConfig, documents: RandomDocuments
) -> None:
    model = replace(model, shape=replace(model.shape, sliding_window=window))
    sliced, whole = _slices(documents)
    loss, gradients = _one_segment_at_a_time(whole, documents, model)
    exact = {"loss": torch.tensor(loss, dtype=torch.float64)} | gradients
    for found in run_ranks(cp, _gradients_by_checkpointing, model, documents, sliced)[0]:
        assert found.keys() == exact.keys()
        errors = {
            name: float((value - exact[name]).abs().max() / exact[name].abs().max()) for name, value in found.items()
        }
        assert all(error < TOLERANCE_OF_SLICES for error in errors.values()), errors


def test_the_steps_cover_the_hard_cases(steps: list[Step], micro_batches: int) -> None:
    all_micro_batches = [micro_batch for step in steps for micro_batch in step.plan.micro_batches]
    assert any(not micro_batch.segments for micro_batch in all_micro_batches)
    assert any(segment.start > 0 for micro_batch in all_micro_batches for segment in micro_batch.segments)
    assert max(micro_batch.tokens for micro_batch in all_micro_batches) > CONTEXT_WINDOW
    assert any(micro_batch.tokens % 2 for micro_batch in all_micro_batches)
    assert all(len(step.plan.micro_batches) == micro_batches for step in steps)
    assert {step.strategy for step in steps} == {"per_sequence", "per_document", "adaptive", "balanced"}


# Eight processes repeat, in layouts of three groups, what four prove of every two of them.
@pytest.mark.parametrize("world_size", [1, 2, 4, pytest.param(8, marks=pytest.mark.exhaustive)])
def test_loss_and_gradients_equal_one_document_at_a_time(
    world_size: int, model: TransformerConfig, steps: list[Step], request: pytest.FixtureRequest
) -> None:
    every = request.config.getoption("--all-layouts")
    layouts = [
        layout
        for layout in ALL_LAYOUTS
        if layout.world_size == world_size
        and (every or (layout.dp, layout.pp, layout.cp, layout.tp, layout.virtual_pp) in SELECTED)
        and (every or layout.keeps_weights or layout.dp_cp > 1)  # a rank that shards nothing gathers nothing
    ]
    # Sharding decides nothing that another dimension sees, nor when weights are gathered, so a selection repeats few.
    all_steps = [layout.cp > 1 and (every or (world_size != 4 and layout.keeps_weights)) for layout in layouts]
    of_layouts = [
        steps if complete else _unlike(steps)[: None if every or layout.keeps_weights else 2]
        for layout, complete in zip(layouts, all_steps, strict=True)
    ]
    by_rank = run_ranks(world_size, _errors_of_all_layouts, model, layouts, of_layouts, seconds=ALL_LAYOUTS_SECONDS)
    for layout, errors_of_ranks in zip(layouts, zip(*by_rank, strict=True), strict=True):
        checked = {name for errors in errors_of_ranks for name in errors}
        assert checked == {"loss", *steps[0].gradients}, layout
        assert all(error < TOLERANCE for errors in errors_of_ranks for error in errors.values()), layout
