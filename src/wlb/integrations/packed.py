"""Packed micro-batches as tensors: for a loop of one's own (``packed_batches``) and for data loaders (the collator).

Documents come from a token store, a sequence or a stream: arrays of token ids, or dictionaries whose fields
``wlb.integrations.document_fields`` reads. Whole documents lie one after another without padding; positions restart
with each, and no document sees another. The loss of a step is the sum over its labelled tokens, divided by their number
over all ranks (``PackedBatch.loss``): which micro-batch a document is in cannot change it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from typing import Any, TypeGuard

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset

from wlb.documents.segments import OverlongReport
from wlb.documents.store.reader import TokenStore
from wlb.errors import UserError
from wlb.integrations.batches import PlannedBatchSampler
from wlb.integrations.batches.arriving import ArrivingDocuments
from wlb.integrations.batches.processes import Processes, check_accumulation, digest, warn
from wlb.integrations.batches.steps import WholeSteps, balanced_job, checked_lengths
from wlb.integrations.document_fields import Document, check_documents, chooses_labels, ids_and_labels, token_count
from wlb.job.job import Job
from wlb.packing.plan import MicroBatch, StepPlan
from wlb.runtime.batch import IGNORE_LABEL, TokenBatch, labelled_tokens, make_batch, read_batch
from wlb.runtime.collectives import device_of, gathered_rows, sharing_group
from wlb.runtime.loss import summed_cross_entropy
from wlb.runtime.own_lists import check_same_plan, own_batches
from wlb.runtime.sharded_batch import RankShare, ShardedAttention
from wlb.sharding import ShardPlan
from wlb.terminal import number_of


@dataclass(frozen=True)
class PackedBatch:
    """One rank's tokens of a micro-batch.

    ``tokens``, ``labels`` and ``position_ids`` are int64 of shape (tokens,). A label is the token to predict there,
    that is the next one of the document, or -100. ``segment_lengths`` and ``cu_seqlens`` (int32, of shape
    (documents + 1,)) are of the whole micro-batch, in packed order. ``loss_tokens`` are the labelled tokens of the step
    over all ``ranks`` (dp x cp). Where several ranks share the micro-batch, ``attend`` is the attention over these rows
    together with them: ``attend(query, key, value)`` with tensors of shape (tokens, heads, head_dim). Otherwise it is
    None, and ``wlb.attention.segment_attention`` over ``segment_lengths`` does the same.
    """

    tokens: Tensor
    labels: Tensor
    position_ids: Tensor
    segment_lengths: tuple[int, ...]
    loss_tokens: int
    ranks: int
    attend: ShardedAttention | None = None

    @property
    def shard_plan(self) -> ShardPlan | None:
        """Which of the micro-batch's tokens these are; None where they are all."""
        return None if self.attend is None else self.attend.shard_plan

    @property
    def cu_seqlens(self) -> Tensor:
        return torch.tensor([0, *accumulate(self.segment_lengths)], dtype=torch.int32, device=self.tokens.device)

    @property
    def max_seqlen(self) -> int:
        return max(self.segment_lengths)

    def loss(self, logits: Tensor, *, summed: bool = False) -> Tensor:
        """This micro-batch's share of the step's loss, whose gradients are to be accumulated over the step.

        Args:
            logits: (tokens, vocabulary).
            summed: Whether the loop sums gradients over ranks. By default they are averaged, as DDP and FSDP do, and
                the loss is multiplied by ``ranks``. That is right as well where several processes train the same
                micro-batches and are averaged with the others, as those of a tensor-parallel group may be.

        Returns:
            A scalar in float32, or float64 where logits are. In a step without labelled tokens it is zero, as are its
            gradients, and a warning says so.
        """
        if logits.shape[:-1] != self.labels.shape:
            raise UserError(
                f"logits have shape {tuple(logits.shape)} and the batch {len(self.labels)} tokens; give (tokens, "
                "vocabulary), which is model(**batch.hf_kwargs()).logits[0] of a Hugging Face model"
            )
        if self.loss_tokens == 0:
            warn_of_no_labels()
        total = summed_cross_entropy(logits, self.labels)
        return total * (1 if summed else self.ranks) / max(self.loss_tokens, 1)

    def hf_kwargs(self) -> dict[str, Any]:
        """Keywords of a Hugging Face causal LM: ``model(**batch.hf_kwargs()).logits[0]`` is (tokens, vocabulary).

        ``input_ids`` and ``position_ids`` have shape (1, tokens); ``cu_seq_lens_q`` and the like say where documents
        end, and ``attend`` attends where several ranks share the micro-batch. There is no mask. There are no labels
        either, from which a model would take the mean of its micro-batch: give the logits to ``loss``. The model needs
        ``wlb.integrations.huggingface.register_attention``; where there is no ``attend`` flash_attention_2 does as
        well, but refuses nothing: ``check_packing`` says whether the model is exact.
        """
        rows = {"input_ids": self.tokens[None], "position_ids": self.position_ids[None]}
        shared = {} if self.attend is None else {"attend": self.attend}
        return {**rows, **extents_of(self.segment_lengths, self.tokens.device), **shared}

    def to(self, device: torch.device | str) -> PackedBatch:
        tensors = {name: getattr(self, name).to(device) for name in ("tokens", "labels", "position_ids")}
        return replace(self, **tensors)


@dataclass(frozen=True)
class PackedStep:
    """The micro-batches of one rank in one optimizer step.

    ``loss_tokens`` counts the labelled tokens of the step over all ranks. ``plan`` has the documents of all ranks with
    their predicted seconds; ids count over epochs.
    """

    batches: tuple[PackedBatch, ...]
    loss_tokens: int
    plan: StepPlan

    def to(self, device: torch.device | str) -> PackedStep:
        return replace(self, batches=tuple(batch.to(device) for batch in self.batches))


def packed_batches(
    documents: TokenStore | Sequence[Document] | Iterable[Document],
    *,
    context_window: int,
    micro_batches: int,
    dp: int | None = None,
    cp: int = 1,
    rank: int | None = None,
    epochs: int | None = 1,
    own_lists: bool = False,
    sharding: str = "hybrid",
    overlong: str = "split",
    state: Mapping[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
    **settings: Any,
) -> PackedSteps:
    """The steps of this process over ``documents``, one after another, as ``PackedSteps``.

    Every process calls this with the same arguments, and trains what comes out. Arguments are those of
    ``PlannedBatchSampler``; ``sharding`` is the strategy by which cp ranks share a micro-batch (``rank`` counts them as
    neighbours), ``overlong`` says what becomes of documents over the context window ("split", "truncate", "drop" or
    "error", as ``data.overlong``; a warning says that there are some, and ``PackedSteps.overlong`` counts them), and
    ``state`` is what ``PackedSteps.state_dict`` gave.

    With ``own_lists`` every process gets its own number of micro-batches a step, and all finish together; documents
    that would take one process too long are shared by several. Run them with ``wlb.runtime.level_step``. There is no
    ``cp`` then, the preset is "elastic", ``micro_batches`` are windows a step and process, and every ``next`` is a
    collective call in which the processes compare their plans.

    ``group`` are the processes that train, by default all of ``torch.distributed``. ``rank`` is this process's in it,
    and ``dp`` their number over ``cp``; without a process group both mean one process. With tensor or pipeline
    parallelism of your own, give the group of the data-parallel ranks, or dp and the same rank for all processes that
    train the same micro-batches. The first ``next``, and the first after ``load_state_dict``, is a collective call in
    which all processes compare their lengths, settings, states and ranks: every process has to make it, or the others
    wait until the group's timeout. Nothing is compared where dp = cp = 1 is given: that process trains by itself.

    ``documents`` without a length are a stream: read once, in order of arrival, until it ends. Every process reads all
    of it and keeps what waits to be trained. With ``state`` the stream begins again and is passed over up to there.

    Where documents say which of their tokens are learnt, the labelled tokens of a step are counted over all processes,
    once a step; those of a stream compare in the same call the lengths that came.

    Raises ``UserError`` as the sampler does, and for a ``state`` of other documents, ``seed`` or ``shuffle``, which
    change the order of an epoch that has begun.
    """
    sizes = {"context_window": context_window, "micro_batches": micro_batches, "cp": cp, "own_lists": own_lists}
    if own_lists and (cp != 1 or sharding != "hybrid"):
        raise UserError("own_lists chooses cp and sharding itself; leave them out")
    if epochs is not None and epochs < 1:
        raise UserError(f"epochs must be >= 1, or None for no end; got {epochs}")
    processes = Processes(rank, dp, cp, group)
    steps = PackedSteps(documents, processes, epochs, sharding, overlong=overlong, **sizes, **settings)
    if state is not None:
        steps.load_state_dict(state)
    return steps


def _is_stream(documents: Any) -> TypeGuard[Iterable[Document]]:
    """Whether ``documents`` are read once, in order. Iterable data sets inherit a ``__getitem__`` that only raises."""
    is_sequence = hasattr(documents, "__len__") and hasattr(documents, "__getitem__")
    return isinstance(documents, IterableDataset) or not (is_sequence or isinstance(documents, TokenStore))


class PackedSteps(Iterator[PackedStep]):
    """What ``packed_batches`` returns: the steps of one process, and the state to go on after the last of them."""

    def __init__(
        self,
        documents: TokenStore | Sequence[Document] | Iterable[Document],
        processes: Processes,
        epochs: int | None,
        sharding: str,
        *,
        context_window: int,
        overlong: str,
        **settings: Any,
    ) -> None:
        self._processes, self._epochs = processes, epochs
        self._rank = processes.own_rank()
        self._stream: ArrivingDocuments[Document] | None = None
        check_documents(documents, "documents")
        if _is_stream(documents):
            if epochs != 1:
                raise UserError(
                    f"a stream is one epoch, and epochs = {epochs}; leave epochs out, or repeat documents in it"
                )
            self._stream = ArrivingDocuments(documents, token_count, context_window, overlong)
        kept: Any = documents if self._stream is None else self._stream
        self._source: TokenStore | _Source = kept if isinstance(kept, TokenStore) else _Source(kept)
        lengths = None
        if self._stream is None:
            lengths = checked_lengths(self._source.lengths, context_window if overlong == "error" else None)
        self.job: Job = balanced_job(lengths, context_window, dp=processes.dp, overlong=overlong, **settings)
        self._steps = WholeSteps(self.job, self._stream or self._source.lengths, epochs=epochs)
        self._told_of_overlong = False
        if lengths is not None and (longer := int((lengths > context_window).sum())):
            self._tell_of_overlong(f"{longer:,} of {number_of(len(lengths), 'document')}")
        self._dp_rank, self._cp_rank = divmod(self._rank, self.job.layout.cp)
        self._sharding = "elastic" if self.job.packing.method == "elastic" else sharding
        self._rank_share = RankShare(
            self._dp_rank, self._cp_rank, replace(self.job.layout, tp=1), self._sharding, self.job.costs
        )
        self._sharing: dist.ProcessGroup | None = None  # of the ranks whose lists differ, for what they share
        self._begin: dict[str, Any] | None = self._begins_with(None)

    def __next__(self) -> PackedStep:
        if self._begin is not None:
            check_accumulation()
            self._processes.agree(self._steps.settings | self._begin, self._rank)
            self._begin = None
            together = self._processes.ranks > 1 and dist.is_initialized()
            if self.job.levels_steps and together and self._sharing is None:
                self._sharing = sharing_group(self._processes.ranks, self._processes.group)
        plan = next(self._steps, None)
        if self._sharing is not None:
            check_same_plan(plan, device_of(self._processes.group), self._processes.group)
        if self._stream is not None and not self._told_of_overlong and self.overlong.documents:
            self._tell_of_overlong("documents of the stream")
        own = () if plan is None else own_batches(plan, self._dp_rank, self._cp_rank, self._read)
        loss_tokens = self._loss_tokens(plan, own)
        if plan is None:
            raise StopIteration
        step = PackedStep(tuple(self._share(*batch, loss_tokens) for batch in own), loss_tokens, plan)
        if self._stream is not None:
            self._stream.trained(plan.segments)
        return step

    @property
    def overlong(self) -> OverlongReport:
        """What became of documents over the context window, of all that were taken in, also for steps to come."""
        return self._steps.overlong

    def _tell_of_overlong(self, documents: str) -> None:
        self._told_of_overlong = True
        window, policy = self.job.context_window, self.job.data.overlong
        warn(
            f"over context_window = {window}: {documents}; overlong = {policy!r}, and PackedSteps.overlong counts them"
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue after the last step, as JSON-serialisable data; the same on all processes."""
        return {"planner": self._steps.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``, saved with any number of processes, micro-batches, window, packing and model.

        Raises ``UserError`` where it is of other documents, seed or shuffle, or a stream has begun.
        """
        if not isinstance(state, Mapping) or "planner" not in state:
            raise UserError("state is not what PackedSteps.state_dict gave; give that, or none to begin anew")
        self._steps.load_state_dict(state["planner"])
        self._begin = self._begins_with(state)

    def _begins_with(self, state: Mapping[str, Any] | None) -> dict[str, Any]:
        """What processes compare before they train on, beside the settings of the steps."""
        masks = self._source.has_labels if isinstance(self._source, _Source) else None
        return {"epochs": self._epochs, "sharding": self._sharding, "labels or masks": masks, "state": digest(state)}

    def _read(self, micro_batch: MicroBatch) -> tuple[TokenBatch, tuple[int, ...]]:
        """A micro-batch of this rank, and the ranks that it names."""
        source = self._source
        batch = read_batch(micro_batch, source) if isinstance(source, TokenStore) else source.batch(micro_batch)
        return batch, micro_batch.ranks

    def _share(self, batch: TokenBatch, ranks: tuple[int, ...], loss_tokens: int) -> PackedBatch:
        of_step = (loss_tokens, self._processes.ranks)
        mine, attend = self._rank_share.of(batch, ranks), None
        if mine.shard_plan.cp_size > 1:
            attend = ShardedAttention(mine.local_tokens, mine.shard_plan, self._sharing, ranks or None)
        return PackedBatch(mine.tokens, mine.labels, mine.positions, batch.segment_lengths, *of_step, attend)

    def _loss_tokens(self, plan: StepPlan | None, batches: Sequence[tuple[TokenBatch, tuple[int, ...]]]) -> int:
        """Labelled tokens of the step on all processes. Those of a stream compare on the way what came of it."""
        chosen = plan is not None and isinstance(self._source, _Source) and self._source.choose_labels(plan)
        first = [batch for batch, ranks in batches if self._cp_rank == (ranks or [0])[0]]  # of those that share one
        labelled = sum(int((batch.labels != IGNORE_LABEL).sum()) for batch in first)
        if plan is not None and not chosen:
            source = self._source
            labelled = labelled_tokens(plan, _Arrays(source.lengths, {}) if isinstance(source, _Source) else source)
        ranks = self._processes.ranks
        if ranks == 1 or (self._stream is None and not chosen):
            return labelled
        if not dist.is_initialized():
            if chosen:
                raise UserError(_NO_GROUP)
            return labelled
        come = (0, 0, 0) if self._stream is None else (len(self._stream.lengths), self._stream.digest, plan is None)
        group = self._processes.group
        mine = [labelled, chosen, *come]
        rows = gathered_rows(mine, torch.int64, device_of(group), group)
        for process, row in enumerate(rows[:, 1:]):
            if not torch.equal(row, rows[0, 1:]):
                raise UserError(
                    f"the stream of process {process} differs in lengths or masks from that of process 0, among the "
                    f"first {int(max(row[1], rows[0, 2]))}; give every process the whole stream, in the same order"
                )
        return int(rows[:, 0].sum()) * ranks // len(rows) if chosen else labelled


_NO_GROUP = "labels of several ranks are counted together; call torch.distributed.init_process_group"


def summed_over_ranks(count: int, group: dist.ProcessGroup | None = None) -> int:
    """The sum of every process's ``count`` of labelled tokens; a collective call of ``group``, or the default group."""
    if not dist.is_initialized():
        raise UserError(_NO_GROUP)
    return int(gathered_rows([count], torch.int64, device_of(group), group).sum())


class _Source:
    """Documents of a sequence, or of a stream, as micro-batches."""

    def __init__(self, documents: Sequence[Document] | ArrivingDocuments[Document]) -> None:
        self._documents = documents
        self.has_labels: bool | None = None  # of a stream, not known beforehand
        if not isinstance(documents, ArrivingDocuments):
            lengths, choose = [], False
            for index, document in enumerate(documents):  # once, as reading one may be costly
                lengths.append(token_count(document, f"document {index}"))
                choose = choose or chooses_labels(document)
            self._lengths, self.has_labels = np.array(lengths, np.int64), choose

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Of all documents, or of those of a stream that have come."""
        return self._documents.lengths if isinstance(self._documents, ArrivingDocuments) else self._lengths

    def choose_labels(self, plan: StepPlan) -> bool:
        """Whether labels of ``plan`` have to be counted, as documents choose them; the same on every rank."""
        if not isinstance(self._documents, ArrivingDocuments):
            return bool(self.has_labels)
        return any(chooses_labels(self._documents[segment.document]) for segment in plan.segments)

    def batch(self, micro_batch: MicroBatch) -> TokenBatch:
        lengths = self.lengths
        ids, labels = _Arrays(lengths, {}), _Arrays(lengths, {})
        for index in {segment.document % len(lengths) for segment in micro_batch.segments}:
            ids.of[index], labels.of[index] = ids_and_labels(self._documents[index], f"document {index}")
            if len(ids.of[index]) != lengths[index]:
                raise UserError(
                    f"document {index} had {lengths[index]} tokens when it was planned and has {len(ids.of[index])} "
                    "now; let documents stay as they are"
                )
        return replace(make_batch(micro_batch, ids), labels=make_batch(micro_batch, labels).labels)


@dataclass(frozen=True)
class _Arrays:
    """A ``TokenSource`` of the documents that a micro-batch has: their token ids, or their labels."""

    lengths: NDArray[np.int64]
    of: dict[int, NDArray[np.int64]]

    def __len__(self) -> int:
        return len(self.lengths)

    def lengths_of(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.lengths[documents]

    def read(self, document: int, start: int = 0, length: int | None = None) -> NDArray[np.int64]:
        return self.of[document][start : None if length is None else start + length]

    def loss_mask(self, document: int, start: int, length: int) -> None:
        """None: what is not to be learnt says so by its label."""


def warn_of_no_labels() -> None:
    """Warn of a step that teaches nothing."""
    warn("a step has no labelled token, so its loss and gradients are zero; look at its labels and masks")


class FlatteningCollator:
    """Lays the documents of a batch one after another: ``collate_fn`` beside a planned batch sampler.

    Documents are dictionaries as Hugging Face data sets have them, of which ``wlb.integrations.document_fields`` says
    what is trained (``input_ids``, ``labels``, masks) and what is refused; or the token ids alone. What comes out is
    what packed models of Hugging Face take, with one row:

    - ``input_ids``, ``position_ids`` (restarting with each document) and ``labels``, int64 of shape (1, tokens). Labels
      are those of the tokens themselves, and -100 for the first of each document, which nothing predicts;
    - ``cu_seq_lens_q`` and ``cu_seq_lens_k``, int32 of shape (documents + 1,), ``max_length_q`` and ``max_length_k``;
    - ``seq_idx``, the document of each token, int32 of shape (1, tokens), for layers that carry a state;
    - ``use_cache`` = False, as a cache makes other attention functions than ours forget where documents end;
    - no attention mask.
    """

    def __call__(self, documents: Sequence[Document]) -> dict[str, Any]:
        if not documents:
            raise UserError("a batch without documents cannot be packed; a planned batch sampler makes none")
        tokens, labels = [], []
        for document in documents:
            ids, own = ids_and_labels(document)
            own[0] = IGNORE_LABEL
            tokens.append(ids)
            labels.append(own)
        lengths = [len(ids) for ids in tokens]
        return {
            "input_ids": torch.from_numpy(np.concatenate(tokens))[None],
            "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
            "labels": torch.from_numpy(np.concatenate(labels))[None],
            **extents_of(lengths),
        }


def extents_of(lengths: Sequence[int], device: torch.device | None = None) -> dict[str, Any]:
    """The keywords by which packed models of Hugging Face know where documents of ``lengths`` tokens end."""
    extents = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    numbers = torch.arange(len(lengths), dtype=torch.int32, device=device)
    return {
        "seq_idx": numbers.repeat_interleave(extents.diff(), output_size=sum(lengths))[None],
        "cu_seq_lens_q": extents,
        "cu_seq_lens_k": extents.clone(),
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
        "use_cache": False,
    }


def steps_of(
    loader: Iterable[Mapping[str, Any]], sampler: PlannedBatchSampler
) -> Iterator[tuple[list[Mapping[str, Any]], int]]:
    """One pass over ``loader`` by optimizer steps: this process's micro-batches, and the labelled tokens of all ranks.

    A micro-batch has ``num_items_in_batch``, too, by which Hugging Face models divide the sum over its tokens: the
    step's labelled tokens over the number of ranks, as DDP and FSDP average gradients over them. Where a loop sums
    gradients instead, the labelled tokens themselves are right. A step without any counts as one of a single token, so
    that loss and gradients are zero, and a warning says so.

    Args:
        loader: Reads the micro-batches of ``sampler``, collated by ``FlatteningCollator``; any ``DataLoader``, with
            workers, prepared by Accelerate, or a ``StatefulDataLoader`` that goes on after whole steps.
        sampler: Its batch sampler.

    Every process takes each step, as labels are counted together. Raises ``UserError`` for a batch that is not the
    sampler's next one.
    """
    processes, layout = sampler.processes, sampler.job.layout
    dp_rank, plans = processes.own_rank() // layout.cp, sampler.follow()
    batches = iter(loader)
    for first in batches:
        planned = plans.popleft().ranks[dp_rank] if plans else ()
        step = [first, *islice(batches, max(0, len(planned) - 1))]
        found = [batch["cu_seq_lens_q"].diff().tolist() if "cu_seq_lens_q" in batch else None for batch in step]
        if found != [[segment.length for segment in micro_batch.segments] for micro_batch in planned]:
            raise UserError(
                "the loader's batches are not those that the sampler plans for a step; give the loader this "
                "batch_sampler and collate_fn=FlatteningCollator(), and continue after whole steps"
            )
        labelled = sum(int((batch["labels"] != IGNORE_LABEL).sum()) for batch in step)
        if processes.ranks > 1:  # of which cp train the same micro-batches
            labelled = summed_over_ranks(labelled, processes.group) * layout.dp
            labelled //= dist.get_world_size(processes.group)
        if not labelled:
            warn_of_no_labels()
        items = max(labelled, 1) / processes.ranks
        yield [{**batch, "num_items_in_batch": items} for batch in step], labelled
