"""Hugging Face: packed attention for an unmodified model, and balanced micro-batches for any Trainer.

trainer = balanced(Trainer, context_window=8192)(model=model, args=args, train_dataset=dataset)
"""

from wlb.integrations.huggingface.attention import register_attention
from wlb.integrations.huggingface.check import check_packing
from wlb.integrations.huggingface.trainer import balanced

__all__ = ["balanced", "check_packing", "register_attention"]
