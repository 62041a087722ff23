"""Our balance as a sequence-packing scheduler of Megatron-Core.

    register()  # before training; then --sequence-packing-scheduler dp_balanced is ours

Megatron-Core gathers the lengths of a global batch from all data-parallel ranks, asks its scheduler which micro-batch
and rank trains which sample, and moves the samples there. Ours gives every rank micro-batches of equal predicted
seconds, as far as the samples allow, and lets those of like price run at the same time. No sample moves to another
global batch.

The hook is in Megatron-LM's main (0.20); the releases up to 0.19 have none. Megatron-Core itself requires
``calculate_per_token_loss``, ``variable_seq_lengths`` and lengths padded to a multiple of 2 x CP.
"""

from __future__ import annotations

from collections.abc import Sequence

from wlb.errors import UserError
from wlb.packing.balance import balance
from wlb.workload import ModelShape, make_workload
from wlb.workload.base import DocumentPrices

try:
    from megatron.core.datasets.data_schedule import DpBalancedScheduler, PackingSchedulerEnum, scheduler_map
except ImportError as error:
    raise UserError(
        f"this Megatron-Core has no sequence-packing schedulers ({error}); they are in Megatron-LM's main, from 0.20 on"
    ) from error


class BalancedScheduler(DpBalancedScheduler):
    """Micro-batches of equal predicted seconds; ``run``, sample keys and limits are Megatron-Core's.

    ``workload`` prices samples; ``register`` sets it.
    """

    workload: DocumentPrices = make_workload("7b")

    def get_groups_and_subsamples(self, sample_id_seqlens: Sequence[tuple[int, int]]) -> list[list[list[int]]]:
        """Who trains which samples of a global batch.

        Args:
            sample_id_seqlens: Id and padded length in tokens of every sample of the data-parallel group.

        Returns:
            For every micro-batch and every rank of the data- and context-parallel group the ids of its samples; the
            context-parallel ranks of a data-parallel rank get the same. The number of micro-batches is the smallest
            for which ``max_seqlen_per_dp_cp_rank`` holds, and a multiple of ``microbatch_group_size_per_vp_stage``.

        Raises:
            UserError: A sample that no micro-batch can hold, or fewer samples than micro-batches.
        """
        ids, lengths = zip(*((int(id_), int(length)) for id_, length in sample_id_seqlens), strict=True)
        bins = balance(
            lengths,
            None,
            max_tokens=self.max_seqlen_per_dp_cp_rank * self.cp_size,
            multiple_of=self.dp_size * (self.microbatch_group_size_per_vp_stage or 1),
            workload=self.workload,
        )
        prices = self.workload.document_seconds(lengths)
        bins.sort(key=lambda samples: -float(prices[samples].sum()))
        # Neighbours in price run at the same time, and every other slot is dealt backwards, so that ranks' sums agree.
        slots = [bins[first : first + self.dp_size] for first in range(0, len(bins), self.dp_size)]
        slots = [slot[::-1] if index % 2 else slot for index, slot in enumerate(slots)]
        return [[[ids[i] for i in samples] for samples in slot for _ in range(self.cp_size)] for slot in slots]


def register(model: str | ModelShape = "7b", hardware: str = "h100") -> None:
    """Run ``BalancedScheduler`` wherever Megatron-Core is asked for ``dp_balanced``.

    ``model`` and ``hardware`` price samples, as in ``make_workload``. Raises ``UserError`` for an unknown preset.
    """
    BalancedScheduler.workload = make_workload(model, hardware)
    scheduler_map[PackingSchedulerEnum.DP_BALANCED] = BalancedScheduler
