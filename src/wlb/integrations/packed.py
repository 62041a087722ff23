"""Packed micro-batches as tensors: for your own loop (``packed_batches``) and for data loaders (the collator).

Whole documents are packed without padding. Positions restart with each document, and no document attends another. The
loss of a step is the sum over its labelled tokens, divided by their number on all ranks (``PackedBatch.loss``).
"""

import json
import sys
from collections.abc import Iterable, KeysView, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, islice
from typing import Any, Self, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch.utils.data import IterableDataset

from wlb.documents.arriving import ArrivingDocuments
from wlb.documents.segments import Segment
from wlb.documents.store.reader import TokenStore
from wlb.errors import UserError
from wlb.integrations.batches.processes import Processes
from wlb.integrations.batches.steps import balanced_job, check_names, checked_lengths, loop_settings
from wlb.integrations.document_fields import (
    Document,
    check_documents,
    ids_and_labels,
    mark_of,
    marks_of_some,
    token_count,
)
from wlb.packing.plan import MicroBatch
from wlb.runtime.batch import Batch, RankSlice
from wlb.runtime.calibration import Calibration
from wlb.runtime.collectives import agreeing_group, device_of, sharing_group, warn
from wlb.runtime.environment import set_up_gpu
from wlb.runtime.loss import IGNORE_LABEL
from wlb.runtime.loss import packed_loss as packed_loss
from wlb.runtime.reading import make_batch, read_batch
from wlb.runtime.steps import PlannedSteps, RankStep, RankSteps, digest_of


@dataclass(frozen=True)
class PackedBatch(Batch):
    """The tokens of a rank in a micro-batch; ``wlb.runtime.batch.Batch`` explains its fields.

    A Hugging Face causal LM takes the batch as keywords: ``batch.loss(model(**batch).logits)``. It must attend by
    ``register_attention`` of ``wlb.integrations.huggingface`` or, without ``attend``, flash_attention_2. There is no
    mask, and ``labels`` is None, so that giving labels fails: the model would average over its micro-batch. Other
    models read ``tokens`` and ``position_ids``, and call ``attention(query, key, value)``, with tensors of shape
    (tokens, heads, head_dim).
    """

    @cached_property
    def _keywords(self) -> dict[str, Any]:
        rows = {"input_ids": self.tokens[None], "position_ids": self.position_ids[None], "labels": None}
        shared = {} if self.attend is None else {"attend": self.attend}
        return rows | cu_seqlens_of(self.segment_lengths, self.tokens.device) | shared

    def with_labels(self) -> dict[str, Any]:
        """The keywords and ``labels``, of shape (1, tokens), for code that counts and shifts labels, as a Trainer does.

        In a shared micro-batch the next token may be on another rank. So it has ``shift_labels``, the token to predict
        at each place, and an extra token at the end. In other micro-batches the last token must end a document.
        """
        labels = F.pad(self.labels[None], (1, 0), value=IGNORE_LABEL)
        if self.attend is None:
            return self._keywords | {"labels": labels[:, :-1]}
        rows = {name: F.pad(self[name], (0, 1)) for name in ("input_ids", "position_ids")}
        shifted = F.pad(self.labels[None], (0, 1), value=IGNORE_LABEL)
        return self._keywords | rows | {"labels": labels, "shift_labels": shifted}

    def keys(self) -> KeysView[str]:
        if "transformers" in sys.modules:
            from wlb.integrations.huggingface.attention import check_next_model  # its package imports this module

            check_next_model(self.is_shared)
        return self._keywords.keys()

    def __getitem__(self, name: str) -> Any:
        return self._keywords[name]


class PackedSteps(RankSteps[PackedBatch]):
    """The steps of one process over ``documents``, with a state to continue after any of them.

    Args:
        documents: A token store, a sequence or a stream of token ids, or of dictionaries that
            ``wlb.integrations.document_fields`` reads. A stream has no length: every process reads all of it once, in
            order, and keeps waiting documents. With a ``state``, give it from its beginning.
        context_window: Mean tokens of a micro-batch, and the longest document.
        micro_batches: Number in a step, on each data-parallel rank.
        dp: Data-parallel ranks, by default all processes over ``cp``.
        cp: Neighbouring processes that share every micro-batch, by the strategy ``sharding``.
        rank: The rank of this process among dp x cp, by default its rank in ``group``. In a tensor-parallel group give
            all processes dp and the same rank.
        epochs: None never ends.
        own_lists: Whether every process runs its own number of micro-batches, for ``wlb.runtime.level_step``.
        overlong: "split", "truncate", "drop" or "error" for documents over the window. Such documents cause a warning,
            and ``overlong`` of the steps counts them.
        calibrate: Every so many steps, plan by measured prices and, with ``own_lists``, rank speeds; 0 never does.
            ``level_step`` measures them if you pass it ``calibration`` of the steps.
        state: A result of ``state_dict``. Processes, micro-batches, window, packing and model may differ.
        group: The processes that train, by default all; with tensor or pipeline parallelism, the data-parallel ones.
        device: Where batches arrive, by default the current GPU if this process has begun to use it, and NCCL if it has
            a group; otherwise the CPU.
        settings: Further keywords of ``balanced_job``: model, hardware, profile, preset, seed, shuffle and others.

    Every process makes this with the same arguments and all documents. With dp x cp > 1, ``next`` is a collective call
    on a communicator of its own, so a thread may take steps ahead: the first one compares lengths, some token ids,
    settings, states and ranks, and each compares plans and counts labels. Raises ``UserError`` if it cannot plan, if
    plans differ, for a ``state`` of other documents, ``seed`` or ``shuffle``, and for another loop after the last step.
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
        device: torch.device | str | None = None,
        **settings: Any,
    ) -> None:
        if not isinstance(documents, TokenStore):
            check_documents(documents, "documents")
        if own_lists and sharding != "balanced":
            raise UserError("own_lists chooses sharding itself; leave it out")
        processes = Processes(rank, dp, cp, group)
        own_rank = processes.own_rank()
        stream: ArrivingDocuments[Document] | None = None
        lengths: Any = None
        tokens: str | None = None
        if isinstance(documents, IterableDataset) or not hasattr(documents, "__len__"):
            if epochs != 1:
                once = f"a stream is one epoch, and epochs = {epochs}"
                raise UserError(f"{once}; leave epochs out, or repeat the documents")
            stream = ArrivingDocuments(documents, _measured, context_window if overlong == "drop" else np.inf)
            read: Any = partial(_batch_of, stream.kept, stream.lengths)
            settings |= {"shuffle": False}
        elif isinstance(documents, TokenStore):
            lengths, store = checked_lengths(documents.lengths), documents
            read = partial(_batch_in, store)
            tokens = documents.identity[:14]
            if "content_sha256" not in documents.sidecar:
                tokens = hex(digest_of(marks_of_some(documents.read, lengths)))
        else:
            lengths, rows = _lengths_of(documents), cast(Sequence[Document], documents)
            tokens = hex(digest_of(marks_of_some(rows.__getitem__, lengths)))
            read = partial(_batch_of, documents, lengths)
        check_names(settings, packed_batches)
        settings |= {"dp": processes.dp, "cp": cp, "own_lists": own_lists, "overlong": overlong}
        job = balanced_job(lengths, context_window, micro_batches, **settings)
        set_up_gpu(shares=job.layout.pool_size > 1)
        calibration = None
        if calibrate:
            if job.packed_by is not None:
                raise UserError("calibrate measures prices, and workload sets them; leave one of them out")
            if job.layout.ep > 1 or (job.layout.pool_size > 1 and not job.levels_steps):
                raise UserError("calibrate cannot time shared micro-batches; leave out calibrate, or cp, ep and pools")
            calibration = Calibration(calibrate, processes.ranks, device_of(group), group)
        self.lengths, self._epochs = lengths, epochs  # lengths of all documents; None for a stream
        known = loop_settings(job, lengths, epochs=epochs, tokens=tokens)
        planned = PlannedSteps(job, lengths if stream is None else stream, known, epochs=epochs)
        self._processes, self._rank, self._device = processes, own_rank, device or _used_device(group)
        share = RankSlice(*divmod(own_rank, job.layout.pool_size), replace(job.layout, tp=1), sharding, job.costs)
        self._compared: dict[str, Any] = {"sharding": sharding, "calibrate": calibrate}
        self._begins: dict[str, Any] | None = self._compared | {"state": None}
        super().__init__(planned, read, share, calibration=calibration, state=state)

    def __iter__(self) -> Self:
        if self._ended:
            passes = f"epochs = {self._epochs} is over; give epochs= for more passes, and loop once"
            again = "the stream is over; open it again, and make new steps"
            raise UserError(f"all steps were taken: {passes if self._planned.stream is None else again}")
        return self

    def __next__(self) -> RankStep[PackedBatch]:
        self.agree()
        step = super().__next__()
        if self.overlong.documents:
            over = f"some documents have more than context_window = {self.job.context_window} tokens; "
            warn(f"{over}overlong = {self.job.data.overlong!r}; steps.overlong counts them", self._processes.group)
        if self.calibration is not None:
            self.calibration.begin_step()
        return step.to(self._where())

    def load_state_dict(self, state: Mapping[str, Any], *, inside_step: bool = False) -> None:
        super().load_state_dict(state, inside_step=inside_step)
        self._begins = self._compared | {"state": digest_of(json.dumps(state, sort_keys=True))}

    def agree(self) -> None:
        """Compare the settings of all processes, and group those that share micro-batches, as the first ``next``."""
        if self._begins is None:
            return
        ranks = self._processes.agree(self._planned.settings, self._begins, self._rank)
        count, world, shares = self._processes.ranks, self._processes.world, ranks and self.job.layout.pool_size > 1
        if (self.calibration is not None or shares) and (ranks or [0] * world) != [*range(count)]:
            must = f"to share micro-batches or to calibrate, the {world} processes must be the dp x cp = {count} ranks"
            raise UserError(f"{must} in order; leave out rank = {self._rank}, and give the data-parallel group")
        if shares and self.share.group is None:
            self.share = replace(self.share, group=sharing_group(self.job.layout.pool_size, self._processes.group))
        self._alone, self._group = not ranks, agreeing_group(self._processes.group) if ranks else None
        self._begins = None

    def batch_of(self, documents: Sequence[Document]) -> PackedBatch:
        """The part of this rank in a micro-batch of ``documents`` outside any step; call ``agree`` before."""
        return self.share.of(_batch_of_all(documents)).to(self._where())

    def _where(self) -> torch.device | str:
        return self._device or _used_device(self._processes.group) or "cpu"


packed_batches = PackedSteps


def _used_device(group: dist.ProcessGroup | None) -> torch.device | None:
    """Where this thread trains, once it uses a GPU; a thread that it starts would use the first GPU."""
    if not torch.cuda.is_initialized():
        return None
    used = device_of(group)
    return torch.device("cuda", torch.cuda.current_device()) if used.type == "cuda" else used


def _measured(document: Document) -> tuple[int, int]:
    """Tokens of ``document``, and its mark; 0 if it has no tokens."""
    count = token_count(document)
    return count, mark_of(ids_and_labels(document)[0]) if count else 0


def _lengths_of(documents: Any) -> NDArray[np.int64]:
    numbered = enumerate(islice(documents, len(documents)))  # iterating a torch data set may not end by itself
    return checked_lengths([token_count(one, f"document {number}") for number, one in numbered])


def _batch_in(store: TokenStore, micro_batch: MicroBatch) -> PackedBatch:
    return PackedBatch(**vars(read_batch(micro_batch, store)))


def _batch_of_all(documents: Sequence[Document]) -> PackedBatch:
    """The packed ``documents``."""
    lengths = [token_count(one, f"document {number} of the batch") for number, one in enumerate(documents)]
    segments = tuple(Segment(number, 0, length) for number, length in enumerate(lengths))
    return _batch_of(documents, lengths, MicroBatch(segments, 0.0), " of the batch")


def _batch_of(documents: Any, lengths: Any, micro_batch: MicroBatch, where: str = "") -> PackedBatch:
    """The packed documents of a micro-batch, which was planned by ``lengths``."""
    if not micro_batch.segments:
        return PackedBatch(**vars(make_batch(micro_batch, documents)))
    parts = []
    for number, start, length in micro_batch.segments:
        index = number % len(lengths)
        ids, own = ids_and_labels(documents[index], f"document {index}{where}")
        if len(ids) != lengths[index]:
            raise UserError(f"document {index} changed from {lengths[index]} to {len(ids)} tokens; keep it unchanged")
        learnt = np.append(own, IGNORE_LABEL)[start + 1 : start + length + 1]
        parts.append((ids[start : start + length], learnt, np.arange(length)))
    tokens, labels, position_ids = (torch.from_numpy(np.concatenate(rows)) for rows in zip(*parts, strict=True))
    return PackedBatch(tokens, labels, position_ids, tuple(micro_batch.lengths))


class FlatteningCollator:
    """Packs the documents of a batch: the ``collate_fn`` for a planned batch sampler.

    ``wlb.integrations.document_fields`` describes documents. The result has the keywords of packed Hugging Face models,
    without a mask: ``input_ids``, ``position_ids`` (restarting with each document) and ``labels``, int64 of shape (1,
    tokens), and ``cu_seqlens_of`` the documents. Labels are the tokens, or -100 at the beginning of a document.
    """

    def __call__(self, documents: Sequence[Document]) -> dict[str, Any]:
        check_documents(documents, "the batch")
        if not documents:
            raise UserError("the batch has no documents; give at least one, as a planned batch sampler does")
        return _batch_of_all(documents).with_labels()


def cu_seqlens_of(lengths: Sequence[int], device: torch.device | None = None) -> dict[str, Any]:
    """Keywords that tell packed Hugging Face models where documents of ``lengths`` tokens end.

    ``seq_idx``, the document of each token, is for layers that carry a state. A cache would disable these keywords.
    """
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    ends = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens.clone()}
    numbers = torch.arange(len(lengths), dtype=torch.int32, device=device)
    ends["seq_idx"] = numbers.repeat_interleave(cu_seqlens.diff(), output_size=sum(lengths))[None]
    return {**ends, "max_length_q": max(lengths), "max_length_k": max(lengths), "use_cache": False}
