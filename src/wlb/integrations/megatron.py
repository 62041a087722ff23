"""Our balance as Megatron-Core's scheduler ``dp_balanced`` for packed sequences.

Its ``wrap_data_iterator`` gathers the lengths of a global batch from all data-parallel ranks, asks a scheduler which
micro-batch and rank trains which sample, and moves the samples there. Ours makes all take equally long.

Where the training loop calls ``wrap_data_iterator`` (``--sequence-packing-scheduler dp_balanced``, in dev and from
#6742 on) ``register`` is all; an earlier main has the function and does not call it, which ``balanced_steps`` does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from wlb.errors import UserError
from wlb.packing.balance import balance
from wlb.workload import ModelShape, make_workload
from wlb.workload.base import DocumentPrices

try:
    from megatron.core.datasets.data_schedule import DpBalancedScheduler, scheduler_map, wrap_data_iterator
    from megatron.core.utils import get_model_config
except ImportError as error:
    raise UserError(f"{error}; wlb.integrations.megatron needs Megatron-LM's main, from 0.20 on, or dev") from error


class BalancedScheduler(DpBalancedScheduler):
    """Micro-batches of equal predicted seconds; sample keys, limits and the moving of samples are Megatron-Core's."""

    workload: DocumentPrices = make_workload("7b")  # prices samples; set by register

    def get_groups_and_subsamples(self, sample_id_seqlens: Sequence[tuple[int, int]]) -> list[list[list[int]]]:
        """For every micro-batch, and in it every rank of the data- and context-parallel group, the ids of its samples.

        ``sample_id_seqlens`` are the id and padded length in tokens of every sample of the data-parallel group. Raises
        ``UserError`` for a sample that no micro-batch can hold, and fewer samples than micro-batches.
        """
        ids, lengths = zip(*((int(id_), int(length)) for id_, length in sample_id_seqlens), strict=True)
        of_ranks = balance(
            lengths,
            ranks=self.dp_size,
            max_tokens=self.max_seqlen_per_dp_cp_rank * self.cp_size,
            multiple_of=self.microbatch_group_size_per_vp_stage or 1,
            workload=self.workload,
        )
        allowed, longest = getattr(self, "max_num_seqs", None), max(len(part) for own in of_ranks for part in own)
        if allowed is not None and longest > allowed:
            raise UserError(f"a micro-batch has {longest} samples; raise thd_max_packed_sequences over {allowed}")
        return [
            [[ids[i] for i in samples] for samples in slot for _ in range(self.cp_size)]
            for slot in zip(*of_ranks, strict=True)
        ]

    def run(self, *arguments: Any) -> Any:
        """Megatron-Core's; the last argument is its configuration, which must fit unequal micro-batches."""
        config = arguments[-1]
        if not config.calculate_per_token_loss:
            raise UserError("balanced steps need --calculate-per-token-loss, as micro-batches differ in tokens")
        if config.pipeline_model_parallel_size > 1 and not config.variable_seq_lengths:
            raise UserError("balanced steps need variable_seq_lengths = True with pipeline stages, as lengths differ")
        if any(getattr(config, f"{kind}_context_parallel", False) for kind in ("hybrid", "dynamic")):
            raise UserError(
                "hybrid or dynamic context parallelism divides samples, too; leave it out of balanced steps"
            )
        return super().run(*arguments)


def register(model: str | ModelShape = "7b", hardware: str = "h100") -> None:
    """Run ``BalancedScheduler`` wherever Megatron-Core is asked for ``dp_balanced``; call it before training.

    ``model`` and ``hardware`` price samples, as in ``make_workload``.
    """
    BalancedScheduler.workload = make_workload(model, hardware)
    key = next(key for key in scheduler_map if getattr(key, "value", key) == "dp_balanced")  # in dev a string
    scheduler_map[key] = BalancedScheduler


def balanced_steps(
    get_forward_backward_func: Callable[..., Callable[..., Any]],
    max_seqlen_per_dp_cp_rank: int,
    model: str | ModelShape = "7b",
    hardware: str = "h100",
) -> Callable[..., Callable[..., Any]]:
    """Stands in for ``megatron.training.training.get_forward_backward_func`` of a main that does not wrap by itself.

    Every call of such a schedule, in training and evaluation, first divides the samples that the data iterator gives
    for ``num_microbatches``, and runs with the new iterator and number. The micro-batch size is 1, and ``forward_step``
    reads by ``get_batch_on_this_rank_for_sequence_packing``. ``max_seqlen_per_dp_cp_rank`` is the most tokens of a
    micro-batch on each context-parallel rank; ``model`` and ``hardware`` are those of ``register``.

    Raises ``UserError`` where Megatron-LM's own loop divides the samples, which would divide them twice.
    """
    if hasattr(sys.modules.get("megatron.training.training"), "wrap_data_iterator"):
        raise UserError(
            "this Megatron-LM divides samples itself; call register(...) alone, and give --sequence-packing-scheduler "
            "dp_balanced --max-seqlen-per-dp-cp-rank N"
        )
    register(model, hardware)

    def balanced_get(*arguments: Any, **options: Any) -> Callable[..., Any]:
        schedule = get_forward_backward_func(*arguments, **options)

        def step(*, data_iterator: Any, model: Any, num_microbatches: int, **others: Any) -> Any:
            config = get_model_config(model[0] if isinstance(model, list) else model)
            config.max_seqlen_per_dp_cp_rank = max_seqlen_per_dp_cp_rank
            config.sequence_packing_scheduler = "dp_balanced"
            packed, number, *_ = wrap_data_iterator(
                data_iterator, config, num_microbatches, others.get("pg_collection")
            )
            return schedule(data_iterator=packed, model=model, num_microbatches=number, **others)

        return step

    return balanced_get
