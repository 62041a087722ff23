"""``wlb.balance`` in place of the planners of reinforcement-learning stacks: copy the recipe that you need.

Call it before training in every process that divides the step. For OpenRLHF and SkyRL's trainer these are Ray workers:
call it in the function that Ray's ``worker_process_setup_hook`` names. A sample over the limit has a micro-batch of its
own where the stack allows that (slime, SkyRL's ``Balanced``), and is refused elsewhere.
"""

from typing import Any

from wlb import balance


def slime(ranks: int, group: int = 1) -> None:
    """Without ``--balance-data``; micro-batches of a ``group`` of virtual stages.

    Without ``--use-dynamic-batch-size`` all hold ``--micro-batch-size`` samples. For text: images that
    ``--multimodal-aware-packing`` keeps apart would be mixed with it.
    """
    from slime.utils import dp_schedule

    def pack(step_lengths: Any, *, max_per_bin: Any, micro_batch_size: Any, **options: Any) -> Any:
        sizes = {"max_tokens": max_per_bin} if max_per_bin else {"parts": len(step_lengths) // micro_batch_size}
        of_ranks = balance(
            step_lengths, **sizes, ranks=ranks, parts_multiple_of=group, oversize="alone", equal_size=not max_per_bin
        )
        return [micro_batch for slot in zip(*of_ranks, strict=True) for micro_batch in slot]

    dp_schedule._pack_step_into_mbs = pack


def prime_rl() -> None:
    """For text: of images, only compatible ones may share a micro-batch."""
    from prime_rl.trainer import batch

    def pack(samples: Any, max_seq_len: int, num_train_workers: int, bin_cost: Any) -> Any:
        lengths = [len(sample.input_ids) for sample in samples]
        costs = [bin_cost([length]) for length in lengths]
        of_ranks = balance(lengths, ranks=num_train_workers, max_tokens=max_seq_len, costs=costs)
        bins = [[samples[i] for i in part] for slot in zip(*of_ranks, strict=True) for part in slot]
        return [batch._materialize_bin(batch._MicroBatchBin(members, 0)) for members in bins]

    batch.packed_samples_into_micro_bs = pack
    batch._distribute_group = lambda group, workers, bin_cost: [group[rank::workers] for rank in range(workers)]


def skyrl(multiple_of: int = 1) -> None:
    """What its collator for fine-tuning packs with, and its trainer, which takes a sample over the limit.

    On Megatron it pads each sample to the multiple that its ``get_packed_seq_align_size`` gives for tp, cp and FP8, but
    packs without the padding: give this multiple, and the limit holds.
    """
    from skyrl.train.dataset.bin_packing import Balanced, FirstFitDecreasing

    wishes: dict[str, Any] = {"multiple_of": multiple_of}
    FirstFitDecreasing._pack_implementation = lambda packer, lengths: _packed(packer, lengths, **wishes)
    Balanced._pack_implementation = lambda packer, lengths: _packed(packer, lengths, oversize="alone", **wishes)


def nemo_rl() -> None:
    """With its default ``sequence_packing.algorithm``."""
    from nemo_rl.data.packing.algorithms import ModifiedFirstFitDecreasingPacker

    ModifiedFirstFitDecreasingPacker._pack_implementation = _packed


def _packed(packer: Any, sequence_lengths: list[int], **wishes: Any) -> list[list[int]]:
    capacity = packer.bin_capacity - packer.bin_capacity % getattr(packer, "packed_length_multiple", 1)
    ranks = packer.bin_count_multiple or 1
    of_ranks = balance(sequence_lengths, ranks=ranks, max_tokens=capacity, **wishes)
    return [micro_batch for slot in zip(*of_ranks, strict=True) for micro_batch in slot]


def openrlhf(ranks: int, max_tokens: int) -> None:
    """With ``train.dynamic_batch_enable``: its ``max_tokens_per_gpu``, times ranks that share a sample.

    Where samples are no multiple of a step, some ranks have one more, as without this.
    """
    from openrlhf.trainer import ppo_trainer
    from openrlhf.trainer.ppo_utils import experience, experience_maker, replay_buffer

    def shares(experiences: Any, args: Any) -> Any:
        samples = [sample for some in experiences for sample in experience.split_experience_batch(some)]
        size = min(args.train.batch_size, len(samples)) // ranks  # of a rank in a step
        whole = len(samples) // (ranks * size) * ranks * size
        lengths = [int(sample.total_length) for sample in samples[:whole]]
        for_ranks = balance(lengths, whole // size, equal_size=True, ranks=ranks)
        of_ranks = [[samples[i] for part in own for i in part] for own in for_ranks]
        left = [samples[whole + rank :: ranks] for rank in range(ranks)]
        return [experience.make_experience_batch(own + more) for own, more in zip(of_ranks, left, strict=True)]

    def forwards(lengths: Any, parts: int, equal_size: bool) -> Any:
        return [part for own in balance(lengths, parts, ranks=ranks) for part in own]

    def micro_batches(lengths: Any, parts: int, equal_size: bool) -> Any:
        return balance(lengths, parts, max_tokens, equal_size=equal_size, oversize="alone")

    ppo_trainer.balance_experiences = shares
    experience_maker.get_seqlen_balanced_partitions = forwards
    replay_buffer.get_seqlen_balanced_partitions = micro_batches


def verl_prefix_grouper() -> None:
    """With ``actor.use_prefix_grouper``, which computes the prompt of each group once: call it in the controller."""
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer
    from verl.utils import seqlen_balancing

    theirs = RayPPOTrainer._balance_batch
    prompts: list[int] = []

    def balance_batch(trainer: Any, batch: Any, *arguments: Any, **options: Any) -> Any:
        width = batch.batch["prompts"].shape[1]
        prompts[:] = batch.batch["attention_mask"][:, :width].sum(1).tolist()
        return theirs(trainer, batch, *arguments, **options)

    def of_groups(seqlen_list: Any, uid_list: Any, k_partitions: int) -> Any:
        prefixes = dict(zip(uid_list, prompts, strict=True))
        of_ranks = balance(seqlen_list, ranks=k_partitions, groups=uid_list, prefixes=prefixes, equal_size=True)
        return [samples for (samples,) in of_ranks]

    RayPPOTrainer._balance_batch = balance_batch
    seqlen_balancing.get_group_balanced_partitions = of_groups


def trl() -> None:
    """``AsyncGRPOTrainer`` without a ``token_budget``, whose rows compute a prompt once: call it before training.

    A prompt is in several rows where that balances them, instead of only where there are fewer prompts than rows.
    """
    from trl.experimental.async_grpo import async_grpo_trainer as trainer

    def batches(batcher: Any) -> Any:
        batch: list[Any] = []
        for sample in batcher.dataset:
            batch.append(sample)
            if len(batch) == batcher.microbatch_size:
                lengths = [len(sample["input_ids"]) for sample in batch]
                groups = [str(sample["group_id"]) for sample in batch]
                prefixes: dict[str, int] = {}
                for group, sample in zip(groups, batch, strict=True):
                    prompt = int(sample["completion_mask"].argmax())
                    prefixes[group] = min(prompt, prefixes.get(group, prompt))
                parts = balance(lengths, batcher.num_processes, groups=groups, prefixes=prefixes)
                yield [_row(trainer, [batch[i] for i in part]) for part in parts]
                batch = []

    trainer.FixedCountBatcher.__iter__ = batches


def _row(trainer: Any, samples: list[Any]) -> Any:
    row = trainer.TreeRow()
    for sample in samples:
        row.add(sample)
    return row
