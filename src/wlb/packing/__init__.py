"""Documents in, ``StepPlan``s out: which documents a step trains, in which micro-batches, on which ranks.

What comes in: an array of segments (document, start, length) from ``wlb.documents.order``, prices of documents
(``DocumentPrices``) and, in a job, the ranks of a stage (``StageRanks``). What goes out: one ``StepPlan`` for each
global batch. No tokens, no torch, no clock: the same lengths give the same plan on every machine. Read in this order:

1. ``plan.py``: ``StepPlan``, its ``MicroBatch``es, and ``PlannedMicroBatch``, which numbers the documents of a step.
2. ``packer.py``: ``Packer``, what all packers share: arrivals, state, emitting. ``options.py``: the [packing] section.
3. ``balanced.py``: our packer. It only decides which documents are due; a step is then a pure function of their
   lengths: ``level.py`` (every rank runs its own number of micro-batches), ``slices.py`` (long documents are cut, for
   pipelines), or even micro-batches of whole documents.
4. ``sequential.py``, ``carrying.py`` (``fixed_greedy``), ``variable_length.py``: the packers of the paper, which carry
   documents over to later steps. ``registry.py`` makes a packer by its name.
5. ``arrange.py``: deals the micro-batches of a plan to data-parallel ranks, and orders them for the pipeline.
6. ``balance.py``: divides a given set of documents, for trainers that have loaded their batch already, with
   ``division.py``, ``bins.py``, ``exchanges.py``, ``prefixes.py`` and ``padded.py``. They need only NumPy.

What you may touch: a new packer is one file, a line in ``registry.PACKERS`` and a line in ``options.METHODS``
(CONTRIBUTING.md shows one). ``tests/packing`` then checks that it trains every document once and continues from its
state. Importing this package imports nothing.
"""
