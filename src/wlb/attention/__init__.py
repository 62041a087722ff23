"""Exact causal attention over packed documents, on whichever back end the device offers.

``segment_attention`` is the one function a model calls: it takes query, key and value of a whole
micro-batch and the lengths of its segments, and no token attends outside its segment. Each back end is one
file beside this one:

- ``reference``: dense masked scores, any device and type; slow, and the oracle that the others are checked
  against;
- ``cpu``: PyTorch's flash attention for CPU, segment by segment, in time proportional to the attended area;
- ``cuda``: PyTorch's variable-length flash attention, one kernel for all segments.

A new back end is one new file and one line in ``backends.py``.
"""

from wlb.attention.backends import segment_attention

__all__ = ["segment_attention"]
