"""The registry of attention back ends, and the function that picks one.

A back end is a module with the three functions of ``AttentionBackend``. None of them knows autograd or other ranks:
``segment_attention`` and ``context_parallel_attention`` make differentiable functions of them.
"""

from typing import Protocol

from torch import Tensor

from wlb.attention.backends import cpu, cuda, reference
from wlb.attention.variable_length import VariableLengthBatch
from wlb.errors import UserError


class AttentionBackend(Protocol):
    """What a module must offer to be registered.

    Queries are (queries, heads, head_dim), keys and values (keys, kv_heads, head_dim) and the log-sum-exp (heads,
    queries), as their letters in ``wlb.attention`` say. The log-sum-exp is float32, or float64 for a float64 query.
    Scores are scaled by 1/sqrt(head_dim). There is at least one sequence.
    """

    def unsupported(self, query: Tensor) -> str | None:
        """Why this back end cannot attend with ``query``; ``None`` if it can."""

    def forward(self, q_QHE: Tensor, k_KGE: Tensor, v_KGE: Tensor, batch: VariableLengthBatch) -> tuple[Tensor, Tensor]:
        """Attention of the queries of each sequence over its keys: output and log-sum-exp of the scores."""

    def backward(
        self,
        grad_QHE: Tensor,
        q_QHE: Tensor,
        k_KGE: Tensor,
        v_KGE: Tensor,
        out_QHE: Tensor,
        log_sum_exp_HQ: Tensor,
        batch: VariableLengthBatch,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What these keys contribute to the gradients of query, key and value; ``grad_QHE`` is that of the output.

        ``out_QHE`` and ``log_sum_exp_HQ`` may cover more keys than these, because outputs are merged.
        """


# In order of preference: "auto" takes the first that supports the query.
BACKENDS: dict[str, AttentionBackend] = {"cuda": cuda, "cpu": cpu, "reference": reference}


def pick_backend(query: Tensor, backend: str = "auto") -> AttentionBackend:
    """The back end named ``backend``, or for ``auto`` the fastest one that supports ``query``.

    Raises ``UserError`` where it does not exist, or does not support this device or type.
    """
    if backend == "auto":
        return next(candidate for candidate in BACKENDS.values() if candidate.unsupported(query) is None)
    if backend not in BACKENDS:
        raise UserError(f"attention back end {backend!r} does not exist; choose auto, {', '.join(BACKENDS)}")
    reason = BACKENDS[backend].unsupported(query)
    if reason is not None:
        raise UserError(f"attention back end {backend!r} cannot be used: {reason}; choose auto")
    return BACKENDS[backend]


def check_inputs(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> None:
    """Raise ``ValueError`` unless the tensors hold the same tokens, heads form groups, and ``window`` is at least 1."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.ndim != 3:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, and packed attention takes (tokens, heads, head_dim); pack "
                f"the rows of a batch (b, s, heads, head_dim) with {name}.flatten(0, 1), and give the lengths of the "
                "segments of all rows"
            )
    tokens, heads, head_dim = query.shape
    if key.shape[:2] != value.shape[:2] or key.shape[0] != tokens or key.shape[2] != head_dim or heads % key.shape[1]:
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} do not fit together; "
            "give all the same tokens, query and key one head_dim, and heads that are a multiple of kv_heads"
        )
    if window is not None and window < 1:
        raise ValueError(f"window = {window} holds no token; give at least 1, or None for full attention")
