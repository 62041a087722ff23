"""Plans in any loop, without configuration, model or launcher: what to train next as tensors, and one step of it.

What comes in: a ``Job``, documents, and how to read their tokens. What goes out: for each step the ``Batch``es of this
rank, whose ``loss`` is their part of the loss of the step, and a state to continue from. ``wlb train``,
``packed_batches`` and every integration run on this. Read in this order:

1. ``batch.py``: ``Batch``, ``RankSlice`` (the part of a step that a rank has), and the attention over such parts.
   ``reading.py`` makes batches from a token store.
2. ``steps.py``: ``PlannedSteps`` plans and keeps the state; ``RankSteps`` reads, counts labels, and compares ranks.
3. ``loss.py``: the loss, a chunk of rows at a time.
4. ``own_lists.py``: which micro-batches a rank runs (``own_batches``), and forward and backward over them
   (``level_step``, ``in_turn``), so that ranks with different numbers of them neither wait nor deadlock.
5. ``stage.py``: pipelines of any module and any order of operations; ``weight_gradients.py``: backwards in two parts.
6. ``calibration.py`` and ``clock.py``: measured prices. ``collectives.py``: how ranks agree before they start.
   ``environment.py``: settings of GPUs.

What you may touch: a loop of your own needs ``RankSteps`` or ``packed_batches``, and ``level_step``. Private parts of
PyTorch are in ``own_lists.py`` and ``stage.py`` alone. Whatever changes here must stay exact in float64
(``tests/training/test_equivalence.py``) and free of deadlocks (``tests/training/order``).
"""

from wlb.runtime.own_lists import level_step, own_batches

__all__ = ["level_step", "own_batches"]
