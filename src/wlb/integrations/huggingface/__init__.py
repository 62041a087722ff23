"""Hugging Face: packed attention for an unmodified model, and any Trainer with balanced micro-batches.

    register_attention(model)                                    # exact attention inside documents, without a mask
    trainer = balanced(Trainer, context_window=4096)(model=model, args=args, train_dataset=dataset)

``balanced`` makes a subclass of ``Trainer`` or of TRL's ``SFTTrainer`` whose train loader is planned: the documents of
all epochs as one stream, each trained once an epoch, in micro-batches of equal work. With ``cp`` the ranks of a
context-parallel group share every micro-batch by a ``ShardPlan``. Trainer's own loss is right for it, as
``num_items_in_batch`` counts the labelled tokens of all ranks; checkpoints say which documents come next.
"""

from wlb.integrations.huggingface.attention import register_attention
from wlb.integrations.huggingface.check import check_batch
from wlb.integrations.huggingface.context_parallel import context_parallel_group, context_parallel_share
from wlb.integrations.huggingface.trainer import balanced, model_shape_of

__all__ = [
    "balanced",
    "check_batch",
    "context_parallel_group",
    "context_parallel_share",
    "model_shape_of",
    "register_attention",
]
