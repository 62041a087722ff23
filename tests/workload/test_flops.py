import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wlb.workload import ModelShape, model_shape
from wlb.workload.flops import attention_flops, linear_flops

# Published parameter counts (Hugging Face model cards, safetensors totals).
PARAMETERS = {"7b": 6_738_415_616, "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496}


@given(st.integers(0, 60))
def test_attention_counts_every_query_with_the_keys_before_it(length):
    shape = ModelShape(hidden=8, layers=3, heads=4, kv_heads=2, head_dim=2, ffn_hidden=16, vocab_size=5)
    pairs = np.tril(np.ones((length, length))).sum()
    scores_and_values = 2 * (2 * 4 * 2)  # two products of a multiply-add for each of 4 heads x 2 values
    assert attention_flops(shape, length, "forward") == 3 * pairs * scores_and_values


@pytest.mark.parametrize("name", PARAMETERS)
def test_linear_flops_are_two_for_each_weight_of_a_matrix(name):
    shape = model_shape(name)
    embedding = shape.vocab_size * shape.hidden
    norms = (2 * shape.layers + 1) * shape.hidden
    assert linear_flops(shape, 1, "forward") == 2 * (PARAMETERS[name] - embedding - norms)
    assert linear_flops(shape, 10) == 60 * (PARAMETERS[name] - embedding - norms)


def test_attention_overtakes_the_rest_at_twelve_times_the_hidden_size():
    shape = model_shape("7b")
    length = 12 * shape.hidden
    ratio = attention_flops(shape, length, "forward") / linear_flops(shape, length, "forward")
    assert ratio == pytest.approx(1, rel=0.05)
