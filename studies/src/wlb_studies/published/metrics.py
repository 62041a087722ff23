"""Convert published metrics into seconds of a step."""

import math
import re
from typing import Any

from wlb.errors import UserError
from wlb_studies.published.models import model_flops_per_token, shape_of_row

# Tables that print model TFLOP/s say in which code they count operations; both count six for each weight that a token
# meets (the output head among them, the embedding not) and no recomputation. NVIDIA/NeMo counts attention over all
# pairs (nemo/utils/flops_formulas.py: 12 s / h), Megatron over the causal half (``num_floating_point_operations`` of
# NVIDIA/Megatron-LM). The rows that also print tokens per second agree with this to 2.3%, most to 1%; those of
# DeepSeek-V3 to 4.1%, as some count its layer that predicts one more token. For GPT-OSS, whose attention is windowed,
# releases count 5% to 21% less, each in its own way. Rows of LoRA count no weight gradients, so two thirds.
_COUNTS_CAUSAL_HALF = {
    "NVIDIA/NeMo": False,
    "NVIDIA/NeMo-Framework-Launcher": False,
    "yanring/Megatron-MoE-ModelZoo": True,
    "NVIDIA-NeMo/Megatron-Bridge": True,
}
AUTOMODEL = "NVIDIA-NeMo/Automodel"

Row = dict[str, Any]


def stated(row: Row, name: str) -> str:
    """The field ``name`` of ``row``; raises ``UserError`` if it is missing."""
    if row.get(name) in (None, ""):
        raise UserError(f"its {name} is not published")
    return str(row[name])


def size(row: Row, name: str) -> int:
    """A size from ``row``; raises ``UserError`` if it is missing or not a size."""
    text, found = stated(row, name), whole(row[name])
    if found is None:
        raise UserError(f"its {name} is not a size: {text}")
    return found


def whole(value: Any) -> int | None:
    """``value`` as a positive integer (8.0 counts, True does not), or None."""
    return int(value) if is_positive(value) and value % 1 == 0 else None


def is_positive(value: Any) -> bool:
    """Whether ``value`` is a finite number over 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def positive(row: Row, name: str) -> float:
    """A number from ``row``; raises ``UserError`` if it is missing or not positive."""
    text = stated(row, name)
    if not is_positive(row[name]):
        raise UserError(f"its {name} is not a positive number: {text}")
    return float(row[name])


def note_of(row: Row) -> str:
    return str(row.get("note") or "")


def says(text: str, word: str) -> bool:
    """Whether ``text`` contains the pattern ``word``, also inside another word, without denying it."""
    found = re.search(rf"(\b(?:no|not|non|without)\b|w/o)?[\s-]*[\w.-]*{word}", text, re.IGNORECASE)
    return found is not None and found[1] is None


def trains_adapters(row: Row) -> bool:
    """Whether the step trains LoRA's adapters alone; in Automodel's tables, those that name Triton run its kernels."""
    words = f"{row['table']} {row.get('kind')} {row['model']} {note_of(row)}"
    return says(words, r"\bq?lora") or (row["repo"] == AUTOMODEL and says(words, "triton"))


def micro_batches(row: Row) -> list[list[int]] | None:
    """Document lengths in tokens of every micro-batch of a step, if ``row`` has ``lengths``.

    ``lengths`` is a list of micro-batches, each a list of lengths; a plain list of lengths is one micro-batch.
    """
    lengths = row.get("lengths")
    if lengths is None:
        return None
    listed = lengths if lengths and all(isinstance(one, list) for one in lengths) else [lengths]
    if not all(one and all(whole(length) for length in one) for one in listed):
        raise UserError(f"its lengths are not lists of positive tokens, such as [[4096, 512], [8192]]: {lengths}"[:200])
    return [[int(length) for length in one] for one in listed]


def step_tokens(row: Row) -> int:
    """Tokens of a step. Without a global batch each data-parallel rank runs its micro-batch once (torchtitan)."""
    lengths = micro_batches(row)
    if lengths is not None:
        return sum(map(sum, lengths))
    if row.get("global_batch") is not None:
        return size(row, "global_batch") * size(row, "seq_len")
    dp = size(row, "gpus") // (size(row, "tp") * size(row, "pp") * size(row, "cp"))
    return size(row, "micro_batch") * dp * size(row, "seq_len")


def seconds_of_step(row: Row) -> float:
    """The ``value`` of a row in seconds of a step, by its ``metric``.

    Tokens/s and model TFLOP/s are per GPU; ms and seconds are per step. For model TFLOP/s, operations are counted as
    in the row's repository. A row with another metric can give ``seconds_per_step`` too. Raises ``UserError`` for
    another metric without it, a value that is not positive, or a model whose operations are counted in an unknown way.
    """
    metric, value = stated(row, "metric"), positive(row, "value")
    if metric.startswith("ms/step"):
        return value / 1e3
    if metric.startswith("seconds/step"):
        return value
    if metric == "tokens/s/GPU":
        return step_tokens(row) / size(row, "gpus") / value
    if metric == "model TFLOP/s/GPU":
        if row["repo"] not in _COUNTS_CAUSAL_HALF:
            raise UserError(f"how {row['repo']} counts operations is unknown here")
        causal = _COUNTS_CAUSAL_HALF[row["repo"]]
        shape = shape_of_row(row)
        if shape.window is not None or shape.linear is not None:
            raise UserError("tables differ in how they count operations of windowed, sparse and linear attention")
        of_token = model_flops_per_token(shape, size(row, "seq_len"), causal=causal)
        of_token *= 2 / 3 if trains_adapters(row) else 1
        return step_tokens(row) / size(row, "gpus") * of_token / (value * 1e12)
    if row.get("seconds_per_step") is not None:
        return positive(row, "seconds_per_step")
    raise UserError(f"{metric} is not a metric of a step")
