"""Replaces Megatron-Core's scheduler ``dp_balanced`` for packed sequences by ``wlb.balance``.

``wrap_data_iterator`` of Megatron-Core gathers the lengths of a global batch from all data-parallel ranks, asks a
scheduler which micro-batch and rank trains which sample, and moves the samples there. Our scheduler equalises the work.
``--sequence-packing-scheduler dp_balanced`` selects it, in dev and in main from #6742 on.
"""

from collections.abc import Sequence
from typing import Any

from wlb.errors import UserError
from wlb.packing.balance import balance
from wlb.runtime.environment import set_up_gpu
from wlb.workload import ModelShape, make_workload
from wlb.workload.base import DocumentPrices

try:
    from megatron.core.datasets.data_schedule import DpBalancedScheduler, scheduler_map
except ImportError as error:
    raise UserError(f"{error}; wlb.integrations.megatron needs Megatron-LM's main from #6742 on, or dev") from error


class BalancedScheduler(DpBalancedScheduler):
    """Makes micro-batches of equal predicted seconds; Megatron-Core keeps sample keys and limits, and moves samples."""

    workload: DocumentPrices = make_workload("7b")  # prices samples; set by register

    def get_groups_and_subsamples(self, sample_id_seqlens: Sequence[tuple[int, int]]) -> list[list[list[int]]]:
        """The ids of the samples of every micro-batch, for every rank of the data- and context-parallel group.

        ``sample_id_seqlens`` are the id and padded length in tokens of every sample of the data-parallel group. Raises
        ``UserError`` for a sample over the token limit, and for fewer samples than micro-batches.
        """
        ids, lengths = zip(*((int(id_), int(length)) for id_, length in sample_id_seqlens), strict=True)
        of_ranks = balance(
            lengths,
            ranks=self.dp_size,
            max_tokens=self.max_seqlen_per_dp_cp_rank * self.cp_size,
            parts_multiple_of=self.microbatch_group_size_per_vp_stage or 1,
            max_documents=getattr(self, "max_num_seqs", None),
            workload=self.workload,
        )
        slots = zip(*of_ranks, strict=True)
        return [[[ids[i] for i in samples] for samples in slot for _ in range(self.cp_size)] for slot in slots]

    def run(self, *arguments: Any) -> Any:
        """Run Megatron-Core's scheduler; the last argument is its configuration, which must allow unequal lengths."""
        config = arguments[-1]
        if not config.calculate_per_token_loss:
            raise UserError("calculate_per_token_loss is off; micro-batches differ in tokens, so switch it on")
        if config.pipeline_model_parallel_size > 1 and not config.variable_seq_lengths:
            raise UserError("variable_seq_lengths is off; micro-batches differ in length, so pipelines need it on")
        if any(getattr(config, f"{kind}_context_parallel", False) for kind in ("hybrid", "dynamic")):
            raise UserError("hybrid or dynamic context parallelism divides samples as well; switch it off")
        return super().run(*arguments)


def register(model: str | ModelShape = "7b", hardware: str = "h100") -> None:
    """Make ``dp_balanced`` of Megatron-Core a ``BalancedScheduler``. Call it before training.

    ``model`` and ``hardware`` price samples, as in ``make_workload``.
    """
    set_up_gpu()
    BalancedScheduler.workload = make_workload(model, hardware)
    key = next(key for key in scheduler_map if getattr(key, "value", key) == "dp_balanced")  # in dev a string
    scheduler_map[key] = BalancedScheduler
