"""What tables publish, as seconds of a step."""

from __future__ import annotations

from typing import Any

from wlb.errors import UserError
from wlb.reproduce.published.models import model_flops_per_token, published_shape

# Tables that print model TFLOP/s say in which code they count operations; both count six for each weight that a token
# meets (the output head among them, the embedding not) and no recomputation. NVIDIA/NeMo counts attention over all
# pairs (nemo/utils/flops_formulas.py: 12 s / h), Megatron over the causal half (``num_floating_point_operations`` of
# NVIDIA/Megatron-LM). The tables that also print tokens per second agree with this to 1% (tests/reproduce/published).
_COUNTS_CAUSAL_HALF = {"NVIDIA/NeMo": False, "yanring/Megatron-MoE-ModelZoo": True, "NVIDIA-NeMo/Megatron-Bridge": True}


Row = dict[str, Any]


def stated(row: Row, name: str) -> str:
    """What ``row`` says; raises ``UserError`` where it says nothing."""
    if row.get(name) in (None, ""):
        raise UserError(f"its {name} is not published")
    return str(row[name])


def size(row: Row, name: str) -> int:
    """A size that ``row`` says; raises ``UserError`` where it says none."""
    text = stated(row, name)
    if not isinstance(row[name], int) or row[name] < 1:
        raise UserError(f"its {name} is no size: {text}")
    return int(row[name])


def step_tokens(row: Row) -> int:
    """Tokens of a step. Without a global batch each data-parallel rank runs its micro-batch once (torchtitan)."""
    if row.get("global_batch") is not None:
        return size(row, "global_batch") * size(row, "seq_len")
    dp = size(row, "gpus") // (size(row, "tp") * size(row, "pp") * size(row, "cp"))
    return size(row, "micro_batch") * dp * size(row, "seq_len")


def seconds_of_step(row: Row) -> float:
    """The ``value`` of a row in seconds of a step, by its ``metric``.

    Tokens/s and model TFLOP/s are those of one GPU, ms and seconds those of a step. For model TFLOP/s, operations are
    counted as the row's repository counts them. Raises ``UserError`` for a metric of another kind, a value that is not
    positive, and operations of a model or repository that is not known here.
    """
    metric, value = stated(row, "metric"), float(row["value"])
    if not value > 0:
        raise UserError(f"its value is not positive: {row['value']}")
    if metric.startswith("ms/step"):
        return value / 1e3
    if metric.startswith("seconds/step"):
        return value
    if metric == "tokens/s/GPU":
        return step_tokens(row) / size(row, "gpus") / value
    if metric == "model TFLOP/s/GPU":
        if row["repo"] not in _COUNTS_CAUSAL_HALF:
            raise UserError(f"how {row['repo']} counts operations is not known here")
        causal = _COUNTS_CAUSAL_HALF[row["repo"]]
        of_token = model_flops_per_token(published_shape(row["model"]), size(row, "seq_len"), causal=causal)
        return step_tokens(row) / size(row, "gpus") * of_token / (value * 1e12)
    raise UserError(f"{metric} is no metric of a step")
