import numpy as np

from wlb.workload import make_workload


def test_a_document_is_priced_as_its_attention_and_its_share_of_the_rest():
    workload = make_workload("7b")
    lengths = np.array([1, 100, 4096, 131_072])
    together = workload.attention_seconds(lengths) + workload.linear_seconds(lengths)
    np.testing.assert_allclose(workload.document_seconds(lengths), together)
