"""Lightning: a planned batch sampler for the data loader, and the loss that goes with it.

    trainer = lightning.Trainer(max_epochs=1, accumulate_grad_batches=4, use_distributed_sampler=False, ...)

Lightning's own distributed sampler has to stay off, as ``PlannedBatchSampler(rank=...)`` deals already, and all epochs
are one pass of the sampler. In automatic optimisation Lightning divides every loss by ``accumulate_grad_batches``, also
in a last step of fewer micro-batches, and DDP and FSDP average gradients over all processes; both are undone here, so
that a step's loss is the sum over its labelled tokens divided by their number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise

import numpy as np
import torch.distributed as dist
from torch import Tensor

from wlb.errors import UserError
from wlb.integrations.batches import PlannedBatchSampler
from wlb.integrations.document_fields import Document, ids_and_labels
from wlb.integrations.packed import packed_loss, summed_over_ranks
from wlb.packing.plan import MicroBatch
from wlb.training.data.batch import IGNORE_LABEL

_Step = tuple[int, Sequence[Sequence[MicroBatch]]]  # number of a plan, and micro-batches rank by rank


class LightningLoss:
    """The loss of a planned micro-batch, for ``training_step`` of a ``LightningModule`` with automatic optimisation.

    Args:
        sampler: The one of the train loader, made for this process (``rank``). Its plans say what is in a step.
        accumulate_grad_batches: The trainer's, and the sampler's ``micro_batches``.
        dataset: The documents that the loader reads, where they have masked tokens (``labels`` or a mask): every
            process reads those of its own micro-batches, and the labelled tokens are summed over processes once a
            step. Without it, all tokens of a document but one count as labelled.

    Steps are those of the trainer, so a run that is resumed with the same settings goes on with the right counts. Its
    loader must go on, too (torchdata's ``StatefulDataLoader``), as Lightning begins a ``DataLoader`` anew.
    Raises ``UserError`` where sampler and trainer disagree in micro-batches, rank or number of processes, where the
    loader yields another step than the trainer's, for a sampler with context parallelism, and in a call for labels that
    no micro-batch of the step has: those of another sampler, or masked ones without ``dataset``.
    """

    def __init__(
        self, sampler: PlannedBatchSampler, accumulate_grad_batches: int, dataset: Sequence[Document] | None = None
    ) -> None:
        if accumulate_grad_batches != (planned := sampler.job.micro_batches_per_rank):
            raise UserError(
                f"accumulate_grad_batches = {accumulate_grad_batches}, but the sampler plans {planned} micro-batches a "
                "step; give both the same number"
            )
        if sampler.job.layout.cp != 1:
            raise UserError(
                f"the sampler lets cp = {sampler.job.layout.cp} processes share micro-batches, and under Lightning "
                'each trains whole ones; plan with cp = 1 and without preset "elastic"'
            )
        self._sampler, self._dataset = sampler, dataset
        self._accumulated = accumulate_grad_batches
        self._step: int | None = None  # the one whose labels are counted
        self._loading, self._loaded = sampler.follow(), -1  # plans that the loader came to, and the number of the last

    def __call__(self, logits: Tensor, labels: Tensor, global_step: int) -> Tensor:
        """Of logits (tokens, vocabulary) and labels (tokens,) to predict there, in the trainer's ``global_step``."""
        if global_step != self._step:
            self._count_labels(global_step)
        # On a GPU this waits for it, which costs less than a step that trains something else.
        if (found := int((labels != IGNORE_LABEL).sum())) not in self._labelled:
            planned = " or ".join(map(str, sorted(set(self._labelled))))
            raise UserError(
                f"a micro-batch of step {global_step} has {found} labelled tokens, by the sampler's plan {planned}; "
                "give LightningLoss the sampler of the train loader and, where tokens are masked, its data set as "
                "well, and resume with the settings of the run before"
            )
        return packed_loss(
            logits, labels, self._loss_tokens, averaged_over=self._sampler.job.layout.dp * self._accumulated
        )

    def _steps(self) -> Iterator[tuple[_Step | None, _Step | None]]:
        """Each trainer's step, and the one after it.

        A plan is one such step; the last may have more micro-batches than are accumulated, and is then several.
        """
        accumulated = self._accumulated
        steps = (
            (plan.step, [rank[first : first + accumulated] for rank in plan.ranks])
            for plan in self._sampler.steps()
            for first in range(0, len(plan.ranks[0]), accumulated)
        )
        end: list[_Step | None] = [None]
        return pairwise(chain(steps, end))

    def _count_labels(self, step: int) -> None:
        """Count the labelled tokens of this process's micro-batches in ``step``, and of the whole step."""
        if self._step is None or step < self._step:
            self._coming = enumerate(self._steps())
        trained, following = next((steps for number, steps in self._coming if number == step), (None, None))
        if trained is None:
            raise UserError(
                f"step {step} is after the last of the sampler's pass; give the sampler all epochs, and the trainer "
                "max_epochs=1"
            )
        plan, ranks = trained
        self._check_loader(plan, step)
        mine = ranks[self._checked_rank()]
        if following is not None and len(mine) != self._accumulated:
            raise UserError(
                f"step {step} has documents for only {len(mine)} of its {self._accumulated} micro-batches, and "
                "Lightning would go on into the next step; plan fewer micro-batches of a larger context_window"
            )
        self._labelled = [self._labelled_tokens(micro_batch) for micro_batch in mine]
        if self._dataset is None:
            self._loss_tokens = sum(self._labelled_tokens(micro_batch) for rank in ranks for micro_batch in rank)
        else:
            own = sum(self._labelled)
            self._loss_tokens = own if self._sampler.job.layout.dp == 1 else summed_over_ranks(own)
        self._step = step

    def _check_loader(self, plan: int, step: int) -> None:
        """That the loader is in the step numbered ``plan``, too, as far as it was seen."""
        if self._loading and self._loading[0].step == plan:
            self._loaded = self._loading.popleft().step
        elif self._loading and self._loaded != plan:
            raise UserError(
                f"the trainer is in step {step}, plan {plan} of the sampler, and its loader yields plan "
                f"{self._loading[0].step}; resume with torchdata's StatefulDataLoader, as Lightning begins others anew"
            )

    def _checked_rank(self) -> int:
        """This process's rank, of those that the sampler plans for."""
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if ranks != self._sampler.job.layout.dp or self._sampler.rank not in ((0, None) if ranks == 1 else (rank,)):
            raise UserError(
                f"process {rank} of {ranks} trains with the sampler of rank = {self._sampler.rank} of "
                f"dp = {self._sampler.job.layout.dp}; make it with rank = {rank}, dp = {ranks}"
            )
        return rank

    def _labelled_tokens(self, micro_batch: MicroBatch) -> int:
        if self._dataset is None:
            return micro_batch.tokens - len(micro_batch.segments)
        labelled = 0
        for document, _, length in micro_batch.segments:
            index = document % len(self._dataset)
            ids, labels = ids_and_labels(self._dataset[index], f"document {index}")
            if len(ids) != length:
                raise UserError(
                    f"document {index} has {len(ids)} tokens, and {length} for the sampler; give the sampler lengths "
                    "without padding, and LightningLoss the data set that the loader reads"
                )
            labelled += int(np.count_nonzero(labels[1:] != IGNORE_LABEL))
        return labelled
