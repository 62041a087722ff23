"""Packed micro-batches as tensors: for a loop of one's own (``packed_batches``) and for data loaders (the collator).

Whole documents lie one after another without padding; positions restart with each, and no document sees another. The
loss of a step is the sum over its labelled tokens, divided by their number over all ranks (``PackedBatch.loss``).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import IterableDataset

from wlb.documents.segments import OverlongReport, Segment
from wlb.documents.store.reader import TokenStore
from wlb.errors import UserError
from wlb.integrations.batches.arriving import ArrivingDocuments
from wlb.integrations.batches.processes import Processes, check_accumulation, warn
from wlb.integrations.batches.steps import WholeSteps, balanced_job, checked_lengths
from wlb.integrations.document_fields import Document, check_documents, ids_and_labels, token_count
from wlb.packing.plan import MicroBatch, StepPlan
from wlb.runtime.batch import IGNORE_LABEL, TokenBatch, make_batch, read_batch
from wlb.runtime.calibration import Calibration
from wlb.runtime.collectives import device_of, gathered_rows, sharing_group
from wlb.runtime.loss import summed_cross_entropy
from wlb.runtime.own_lists import digest_of, fingerprint_of
from wlb.runtime.sharded_batch import RankSlice, ShardedAttention, ShardedBatch

NO_LABELS = "a step has no labelled token, so its loss and gradients are zero; look at its labels and masks"


@dataclass(frozen=True)
class PackedBatch:
    """One rank's tokens of a micro-batch.

    ``tokens``, ``labels`` and ``position_ids`` are int64 of shape (tokens,). A label is the token to predict there,
    that is the next one of the document, or -100. ``segment_lengths`` are of the whole micro-batch, in packed order.
    ``loss_tokens`` are the labelled tokens of the step over all ``ranks`` (dp x cp). Where several ranks share the
    micro-batch, ``attend(query, key, value)`` is the attention over these rows together with them, with tensors of
    shape (tokens, heads, head_dim); else it is None, and ``wlb.attention.segment_attention`` does the same.

    A Hugging Face causal LM takes it as keywords: ``batch.loss(model(**batch).logits)``. They have no mask, and no
    labels, from which a model would take the mean of its micro-batch. It attends as ``register_attention`` of
    ``wlb.integrations.huggingface`` has it; without ``attend`` flash_attention_2 does as well, but refuses nothing.
    """

    tokens: Tensor
    labels: Tensor
    position_ids: Tensor
    segment_lengths: tuple[int, ...]
    loss_tokens: int
    ranks: int
    attend: ShardedAttention | None = None

    @property
    def is_shared(self) -> bool:
        """Whether other ranks hold parts of the micro-batch."""
        return self.attend is not None

    def loss(self, logits: Tensor) -> Tensor:
        """This micro-batch's share of the step's loss, a scalar in float32, or float64 where logits are.

        ``logits`` are (tokens, vocabulary) or (1, tokens, vocabulary). Gradients are to be averaged over ranks, as DDP
        and FSDP do; where a loop sums them, divide by ``ranks``. In a step without labels it is zero, with a warning.
        """
        rows = logits[0] if logits.shape[:1] == (1,) and logits.dim() == 3 else logits
        if rows.shape[:-1] != self.labels.shape:
            shapes = f"logits have shape {tuple(logits.shape)} and the batch {len(self.labels)} tokens"
            raise UserError(f"{shapes}; give (tokens, vocabulary), or model(**batch).logits of a Hugging Face model")
        return packed_loss(rows, self.labels, self.loss_tokens, averaged_over=self.ranks)

    @cached_property
    def _keywords(self) -> dict[str, Any]:
        rows = {"input_ids": self.tokens[None], "position_ids": self.position_ids[None]}
        shared = {} if self.attend is None else {"attend": self.attend}
        return rows | cu_seqlens_of(self.segment_lengths, self.tokens.device) | shared

    def with_labels(self) -> dict[str, Any]:
        """These keywords and ``labels``, of shape (1, tokens), for code that counts and shifts them, as a Trainer does.

        In a share the next token may lie on another rank. So it has ``shift_labels``, the token to predict at each
        place, and ``labels`` with the same one place further on: one token more, neither attended nor learnt. Elsewhere
        the last token must be the end of a document.
        """
        labels = F.pad(self.labels[None], (1, 0), value=IGNORE_LABEL)
        if self.attend is None:
            return {**self, "labels": labels[:, :-1]}
        rows = {name: F.pad(self[name], (0, 1)) for name in ("input_ids", "position_ids")}
        shifted = F.pad(self.labels[None], (0, 1), value=IGNORE_LABEL)
        return {**self, **rows, "labels": labels, "shift_labels": shifted}

    def keys(self) -> KeysView[str]:
        return self._keywords.keys()

    def __getitem__(self, name: str) -> Any:
        return self._keywords[name]

    def to(self, device: torch.device | str) -> PackedBatch:
        tensors = {name: getattr(self, name).to(device) for name in ("tokens", "labels", "position_ids")}
        return replace(self, **tensors)


def packed_loss(logits: Tensor, labels: Tensor, loss_tokens: int, *, averaged_over: int) -> Tensor:
    """A micro-batch's share of the loss of a step of ``loss_tokens`` labels, as ``PackedBatch.loss`` has it.

    ``logits`` are (tokens, vocabulary), ``labels`` (tokens,). Gradients are averaged over ``averaged_over`` ranks
    afterwards; 1 where they are summed.
    """
    if loss_tokens == 0:
        warn(NO_LABELS)
    return summed_cross_entropy(logits, labels) * averaged_over / max(loss_tokens, 1)


@dataclass(frozen=True)
class PackedStep:
    """One rank's micro-batches of an optimizer step, its labelled tokens over all ranks, and the plan of all ranks."""

    batches: tuple[PackedBatch, ...]
    loss_tokens: int
    plan: StepPlan

    def to(self, device: torch.device | str) -> PackedStep:
        return replace(self, batches=tuple(batch.to(device) for batch in self.batches))


class PackedSteps(Iterator[PackedStep]):
    """The steps of one process over ``documents``, and the state to go on after the last of them.

    Args:
        documents: A token store, a sequence or a stream of token ids, or of dictionaries that
            ``wlb.integrations.document_fields`` reads. A stream, which has no length, is read once, in order: every
            process reads all of it and keeps what waits. With ``state`` it begins again and is passed over.
        context_window: Tokens of a micro-batch on average, and most of a document.
        micro_batches: Of a step on each data-parallel rank.
        dp: Data-parallel ranks, by default all processes over ``cp``.
        cp: Neighbouring processes that share every micro-batch, by the strategy ``sharding``.
        rank: This process's place among dp x cp; by default that in ``group``. Where processes train the same
            micro-batches, as those of a tensor-parallel group do, give dp and the same rank for all of them.
        epochs: None never ends.
        own_lists: Whether every process runs its own number of micro-batches, for ``wlb.runtime.level_step``.
        sharding: See ``cp``.
        overlong: "split", "truncate", "drop" or "error" documents over the window. A warning says that there are some,
            and ``overlong`` of the steps counts them.
        calibrate: Every so many steps, plan by prices and, with ``own_lists``, rank speeds that they measured; 0 is
            never. Give ``level_step`` the steps' ``calibration``, which does the measuring.
        state: What ``state_dict`` gave, with any number of processes, micro-batches, window, packing and model.
        group: The processes that train, by default all; with tensor or pipeline parallelism, the data-parallel ones.
        settings: Further keywords of ``balanced_job``: model, hardware, profile, preset, seed, shuffle and the like.

    Every process makes this with the same arguments. Where dp x cp > 1, ``next`` is a collective call: the first after
    a state compares lengths, settings, states and ranks, and every one compares plans and counts labels. Raises
    ``UserError`` for what cannot be planned, on every process where they would train different plans, and for a
    ``state`` of other documents, ``seed`` or ``shuffle``.
    """

    def __init__(
        self,
        documents: TokenStore | Sequence[Document] | Iterable[Document],
        *,
        context_window: int,
        micro_batches: int,
        dp: int | None = None,
        cp: int = 1,
        rank: int | None = None,
        epochs: int | None = 1,
        own_lists: bool = False,
        sharding: str = "balanced",
        overlong: str = "split",
        calibrate: int = 0,
        state: Mapping[str, Any] | None = None,
        group: dist.ProcessGroup | None = None,
        **settings: Any,
    ) -> None:
        if not isinstance(documents, TokenStore):
            check_documents(documents, "documents")
        if own_lists and sharding != "balanced":
            raise UserError("own_lists chooses sharding itself; leave it out")
        self._processes = Processes(rank, dp, cp, group)
        self._rank = self._processes.own_rank()
        self._stream: ArrivingDocuments[Document] | None = None
        lengths: Any = None
        if isinstance(documents, TokenStore):
            lengths, self._read = checked_lengths(documents.lengths), partial(read_batch, store=documents)
        elif hasattr(documents, "__len__") and not isinstance(documents, IterableDataset):
            sized: Any = documents  # iterating a torch data set may not end by itself
            numbered = enumerate(islice(sized, len(sized)))
            lengths = checked_lengths([token_count(one, f"document {index}") for index, one in numbered])
            self._read = partial(_batch_of, documents, lengths)
        elif epochs != 1:
            raise UserError(f"a stream is one epoch, and epochs = {epochs}; leave it out, or repeat documents in it")
        else:
            self._stream = ArrivingDocuments(documents, token_count, context_window if overlong == "drop" else np.inf)
            self._read = partial(_batch_of, self._stream.kept, self._stream.lengths)
            settings |= {"shuffle": False}
        settings |= {"dp": self._processes.dp, "cp": cp, "own_lists": own_lists, "overlong": overlong}
        self.job = balanced_job(lengths, context_window, micro_batches, **settings)
        self.lengths = lengths  # of all documents; None for a stream
        self._steps = WholeSteps(self.job, self.lengths if self._stream is None else self._stream, epochs=epochs)
        layout = replace(self.job.layout, tp=1)
        self._share = RankSlice(*divmod(self._rank, layout.cp), layout, sharding, self.job.costs)
        self._sharing: dist.ProcessGroup | None = None
        self.calibration: Calibration | None = None
        if calibrate:
            if self.job.packed_by is not None:
                raise UserError("calibrate measures prices, and workload gives them; leave one of them out")
            if self.job.layout.cp > 1 and not self.job.levels_steps:
                raise UserError("calibrate cannot time shared micro-batches; leave it out, or cp and pools")
            self.calibration = Calibration(calibrate, self._processes.ranks, device_of(group), group)
        self._measured: tuple[Any, Any] = (None, None)  # prices and speeds that steps are planned by
        self._compared: dict[str, Any] = {"sharding": sharding, "calibrate": calibrate}
        self._begin: dict[str, Any] | None = self._compared | {"state": None}
        if state is not None:
            self.load_state_dict(state)

    def __next__(self) -> PackedStep:
        self.agree()
        if (calibration := self.calibration) is not None:
            found = calibration.prices, calibration.speeds if self.job.levels_steps else None
            if found != self._measured:
                self._steps.plan_by(self.job.measured(*found))
                self._measured = found
        plan = next(self._steps, None)
        shares = () if plan is None else self._share.batches(plan, self._read)
        loss_tokens = self._loss_tokens(plan, shares)
        if plan is None:
            raise StopIteration
        if self.overlong.documents:
            over = f"documents are over context_window = {self.job.context_window}; "
            warn(f"{over}overlong = {self.job.data.overlong!r}, steps.overlong counts them", self._processes.group)
        if self._stream is not None:
            self._stream.forget(self._steps.finished)
        if self.calibration is not None:
            self.calibration.begin_step()
        return PackedStep(tuple(self._packed(share, loss_tokens) for share in shares), loss_tokens, plan)

    @property
    def overlong(self) -> OverlongReport:
        """What became of documents over the context window, also of those taken in for steps to come."""
        return self._steps.overlong

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue after the last step, as JSON-serialisable data; the same on all processes."""
        found = {} if self.calibration is None else {"calibration": self.calibration.state_dict()}
        return self._steps.state_dict() | copy.deepcopy(found)

    def load_state_dict(self, state: Mapping[str, Any], *, inside_step: bool = False) -> None:
        """Continue from ``state``; ``inside_step``: part of the next step was trained, and no setting may change.

        Raises ``UserError`` where that is not possible, or a stream has begun.
        """
        self._steps.load_state_dict(state, inside_step=inside_step)
        if self.calibration is not None and "calibration" in state:
            self.calibration.load_state_dict(state["calibration"])
        self._begin = self._compared | {"state": digest_of(json.dumps(state, sort_keys=True))}

    def plans(self) -> Iterator[StepPlan]:
        """The plans of the steps to come, without taking any of them; not for a stream."""
        return copy.deepcopy(self._steps)

    def agree(self) -> None:
        """Compare what processes are about to train, and join those that share micro-batches, as the first ``next``."""
        if self._begin is None:
            return
        check_accumulation()
        ranks = self._processes.agree(self._steps.settings | self._begin, self._rank)
        count, world, shares = self._processes.ranks, self._processes.world, ranks and self.job.layout.cp > 1
        if (self.calibration is not None or shares) and (ranks or [0] * world) != [*range(count)]:
            must = f"to share micro-batches or to calibrate, the {world} processes must be the dp x cp = {count} ranks"
            raise UserError(f"{must} in order; leave rank = {self._rank} out and give the data-parallel group")
        if shares and self._sharing is None:
            self._sharing = sharing_group(self.job.layout.cp, self._processes.group)
        self._begin = None

    def batch_of(self, documents: Sequence[Document]) -> PackedBatch:
        """This rank's share of a micro-batch of ``documents``, which belongs to no step; ``agree`` comes before."""
        return self._packed(self._share.of(_batch_of_all(documents)), 0)

    def _packed(self, share: ShardedBatch, loss_tokens: int) -> PackedBatch:
        plan, tensors = share.shard_plan, (share.tokens, share.labels, share.positions)
        attend = ShardedAttention(share.local_tokens, plan, self._sharing, share.ranks or None)
        attend_shared = attend if plan.cp_size > 1 else None
        return PackedBatch(*tensors, plan.segment_lengths, loss_tokens, self._processes.ranks, attend_shared)

    def _loss_tokens(self, plan: StepPlan | None, shares: Sequence[ShardedBatch]) -> int:
        """Labelled tokens of the step on all ranks; where there are several processes they also compare ``plan``."""
        ranks, group, world = self._processes.ranks, self._processes.group, self._processes.world
        if ranks > 1 and world == 1 and plan is not None:  # of a process that plans for one of several ranks
            shares = tuple(RankSlice().of(self._read(micro_batch)) for micro_batch in plan.micro_batches)
        labelled = sum(int((share.labels != IGNORE_LABEL).sum()) for share in shares)
        if ranks == 1 or world == 1:
            return labelled
        rows = gathered_rows([labelled, fingerprint_of(plan) if plan else 0], torch.int64, device_of(group), group)
        others = (rows[:, 1] != rows[0, 1]).nonzero().flatten().tolist()
        if others:
            raise UserError(f"process {others[0]} planned another step than process 0; give all the same documents")
        return int(rows[:, 0].sum()) * ranks // world


packed_batches = PackedSteps


def _batch_of_all(documents: Sequence[Document]) -> TokenBatch:
    """``documents`` one after another."""
    lengths = [token_count(one, f"document {number} of the batch") for number, one in enumerate(documents)]
    segments = tuple(Segment(number, 0, length) for number, length in enumerate(lengths))
    return _batch_of(documents, lengths, MicroBatch(segments, 0.0), " of the batch")


def _batch_of(documents: Any, lengths: Any, micro_batch: MicroBatch, where: str = "") -> TokenBatch:
    """The documents of a micro-batch, planned by ``lengths``, one after another."""
    if not micro_batch.segments:
        return make_batch(micro_batch, documents)
    parts = []
    for number, start, length in micro_batch.segments:
        index = number % len(lengths)
        ids, own = ids_and_labels(documents[index], f"document {index}{where}")
        if len(ids) != lengths[index]:
            raise UserError(f"document {index} had {lengths[index]} tokens when it was planned and has {len(ids)} now")
        learnt = np.append(own, IGNORE_LABEL)[start + 1 : start + length + 1]
        parts.append((ids[start : start + length], learnt, np.arange(length)))
    tokens, labels, positions = (torch.from_numpy(np.concatenate(rows)) for rows in zip(*parts, strict=True))
    return TokenBatch(tokens, labels, positions, tuple(micro_batch.lengths))


class FlatteningCollator:
    """Lays the documents of a batch one after another: ``collate_fn`` beside a planned batch sampler.

    Documents are as ``wlb.integrations.document_fields`` reads them. What comes out is what packed models of Hugging
    Face take, without a mask: ``input_ids``, ``position_ids`` (restarting with each document) and ``labels``, int64 of
    shape (1, tokens), and ``cu_seqlens_of`` the documents. Labels are those of the tokens themselves, and -100 for the
    first of each document, which nothing predicts.
    """

    def __call__(self, documents: Sequence[Document]) -> dict[str, Any]:
        check_documents(documents, "the batch")
        if not documents:
            raise UserError("a batch without documents cannot be packed; a planned batch sampler makes none")
        batch = _batch_of_all(documents)
        return PackedBatch(batch.tokens, batch.labels, batch.positions, batch.segment_lengths, 0, 1).with_labels()


def cu_seqlens_of(lengths: Sequence[int], device: torch.device | None = None) -> dict[str, Any]:
    """The keywords by which packed models of Hugging Face know where documents of ``lengths`` tokens end.

    ``seq_idx``, the document of each token, is for layers that carry a state. ``use_cache`` is False, as a cache makes
    other attention functions than ours forget it.
    """
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    ends = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens.clone()}
    numbers = torch.arange(len(lengths), dtype=torch.int32, device=device)
    ends["seq_idx"] = numbers.repeat_interleave(cu_seqlens.diff(), output_size=sum(lengths))[None]
    return {**ends, "max_length_q": max(lengths), "max_length_k": max(lengths), "use_cache": False}
