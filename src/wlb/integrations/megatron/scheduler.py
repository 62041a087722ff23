"""Our balance as a sequence-packing scheduler of Megatron-Core, and what makes Megatron-LM's training loop use it.

    from megatron.training import training
    training.get_forward_backward_func = balanced_steps(training.get_forward_backward_func, max_seqlen_per_dp_cp_rank)

Megatron-LM's main (0.20) has ``wrap_data_iterator``: it gathers the lengths of a global batch from all data-parallel
ranks, asks a scheduler which micro-batch and rank trains which sample, and moves the samples there. Its training loop
does not call it, and no command-line option chooses a scheduler. ``balanced_steps`` calls it before every step, with
our scheduler: micro-batches that run at the same time take equally many predicted seconds, as far as the samples allow.
No sample moves to another global batch.

The script's ``forward_step`` reads its micro-batches by ``get_batch_on_this_rank_for_sequence_packing`` of the same
module. The releases up to 0.19 have none of this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from wlb.errors import UserError
from wlb.packing.balance import balance
from wlb.workload import ModelShape, make_workload
from wlb.workload.base import DocumentPrices

try:
    from megatron.core.datasets.data_schedule import (
        DpBalancedScheduler,
        PackingSchedulerEnum,
        scheduler_map,
        wrap_data_iterator,
    )
    from megatron.core.utils import get_model_config
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
        of_ranks = balance(
            lengths,
            ranks=self.dp_size,
            max_tokens=self.max_seqlen_per_dp_cp_rank * self.cp_size,
            multiple_of=self.microbatch_group_size_per_vp_stage or 1,
            workload=self.workload,
        )
        return [
            [[ids[i] for i in samples] for samples in slot for _ in range(self.cp_size)]
            for slot in zip(*of_ranks, strict=True)
        ]


def register(model: str | ModelShape = "7b", hardware: str = "h100") -> None:
    """Run ``BalancedScheduler`` wherever Megatron-Core is asked for ``dp_balanced``, as ``balanced_steps`` asks.

    ``model`` and ``hardware`` price samples, as in ``make_workload``. Raises ``UserError`` for an unknown preset.
    """
    BalancedScheduler.workload = make_workload(model, hardware)
    scheduler_map[PackingSchedulerEnum.DP_BALANCED] = BalancedScheduler


def balanced_steps(
    get_forward_backward_func: Callable[..., Callable[..., Any]],
    max_seqlen_per_dp_cp_rank: int,
    model: str | ModelShape = "7b",
    hardware: str = "h100",
) -> Callable[..., Callable[..., Any]]:
    """Stands in for ``megatron.training.training.get_forward_backward_func``: its schedules train balanced steps.

    Every call of such a schedule, in training and evaluation, first has Megatron-Core's ``wrap_data_iterator`` divide
    the samples that the data iterator gives for ``num_microbatches``, and then runs with the new iterator and number of
    micro-batches. Those numbers may differ from the samples read, so losses must be counted by tokens.

    The micro-batch size is 1. The data set gives a sample an index (``tokens``, ``labels``, ``loss_mask``,
    ``position_ids``, and ``padded_seq_len``, a multiple of 2 x CP), or rows with ``cu_seqlens`` as ``SFTDataset`` does.
    Set ``--calculate-per-token-loss``, and ``variable_seq_lengths`` with pipeline stages.

    Args:
        get_forward_backward_func: Megatron-Core's.
        max_seqlen_per_dp_cp_rank: The most tokens of a micro-batch on each context-parallel rank.
        model: Prices samples, with ``hardware``, as in ``make_workload``.
        hardware: See ``model``.

    Raises:
        UserError: An unknown preset. On the first step: a model without ``calculate_per_token_loss``, with which
            unequal micro-batches would count alike; pipeline stages without ``variable_seq_lengths``; or
            ``hybrid_context_parallel``, which divides the samples itself.
    """
    register(model, hardware)

    def balanced_get(*arguments: Any, **options: Any) -> Callable[..., Any]:
        schedule = get_forward_backward_func(*arguments, **options)

        def step(*, data_iterator: Any, model: Any, num_microbatches: int, **others: Any) -> Any:
            config = get_model_config(model[0] if isinstance(model, list) else model)
            _check(config)
            config.max_seqlen_per_dp_cp_rank = max_seqlen_per_dp_cp_rank
            config.sequence_packing_scheduler = PackingSchedulerEnum.DP_BALANCED.value
            packed, number, *_ = wrap_data_iterator(
                data_iterator, config, num_microbatches, others.get("pg_collection")
            )
            return schedule(data_iterator=packed, model=model, num_microbatches=number, **others)

        return step

    return balanced_get


def _check(config: Any) -> None:
    if not config.calculate_per_token_loss:
        raise UserError("balanced steps need --calculate-per-token-loss: micro-batches hold unequal numbers of tokens")
    if config.pipeline_model_parallel_size > 1 and not config.variable_seq_lengths:
        raise UserError("balanced steps need variable_seq_lengths = True with pipeline stages: micro-batches differ")
    if config.hybrid_context_parallel:
        raise UserError("balanced steps and --hybrid-context-parallel both divide the samples; leave one out")
