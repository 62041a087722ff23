"""The unit everything downstream handles: a piece of one document.

Packing, sharding and loading never see tokens, only which document a run of tokens comes from, where in that
document it starts and how long it is. A whole document is a segment that starts at 0.
"""

from __future__ import annotations

from typing import NamedTuple


class Segment(NamedTuple):
    """``length`` consecutive tokens of document ``document``, from its token ``start`` on."""

    document: int
    start: int
    length: int
