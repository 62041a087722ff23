"""Exact causal attention over packed documents, on the best back end for the device.

A model calls one of two functions. ``segment_attention`` takes query, key and value of a whole micro-batch and the
lengths of its segments; ``context_parallel_attention`` takes one rank's share of them and the ``ShardPlan``. No token
attends outside its segment. Both cut their work into ``Runs`` of queries against runs of keys, and a back end computes
those:

- ``reference``: dense masked scores, any device and type; slow, and the oracle that the others are checked
  against;
- ``cpu``: PyTorch's flash attention for CPU, run by run, in time proportional to the attended area;
- ``cuda``: PyTorch's variable-length flash attention, one kernel for all runs.

A new back end is one new file and one line in ``backends/__init__.py``.

Names of tensors end in their shape: T tokens that a rank holds · A tokens that arrive there · S tokens that it sends ·
Q queries and K keys of one call of a back end · H query heads · G key/value heads · E head_dim. x_A2GE holds keys and
values side by side.
"""

from wlb.attention.context_parallel import context_parallel_attention
from wlb.attention.segments import segment_attention

__all__ = ["context_parallel_attention", "segment_attention"]
