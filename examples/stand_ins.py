"""Stand-ins for what is yours, so that the examples run as they are: documents, and a tiny Llama."""

import os
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from wlb.documents.prepare.sources import stdlib_documents, stdlib_files, stdlib_root
from wlb.workload import ModelShape

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WINDOW = 4096  # tokens, of a micro-batch on average
DOCUMENTS = 128
MODEL = ModelShape(
    hidden=128, layers=2, heads=4, kv_heads=4, head_dim=32, ffn_hidden=256, vocab_size=256
)  # by which documents are priced; attention costs about as much here as in a 7B model at long context


def documents() -> list[dict[str, Any]]:
    """Definitions in Python's standard library, one token a byte, cut off where they are longer than the window."""
    texts = chain.from_iterable(stdlib_documents(path) for path in list(stdlib_files(stdlib_root()))[::7])
    return [{"input_ids": list(text.encode()[:WINDOW])} for text in islice(filter(None, texts), DOCUMENTS)]


def join() -> None:
    """Join the processes of torchrun, each on a GPU of its own if there are GPUs."""
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")


def llama() -> Any:
    """An unmodified model from Hugging Face."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=MODEL.vocab_size,
        hidden_size=MODEL.hidden,
        intermediate_size=MODEL.ffn_hidden,
        num_hidden_layers=MODEL.layers,
        num_attention_heads=MODEL.heads,
        num_key_value_heads=MODEL.kv_heads,
        head_dim=MODEL.head_dim,
        max_position_embeddings=1 << 17,
        use_cache=False,  # with it, transformers drops the mask between documents
    )
    return LlamaForCausalLM(config)
