"""The trainer of ``wlb train``: a transformer, pp x dp x cp x tp, checkpoints and a console, around ``wlb.runtime``.

What comes in: a configuration (``JobConfig``) and token stores. What goes out: checkpoints, ``steps.jsonl``, and exit
statuses. Read in this order:

1. ``launcher.py`` starts the ranks and restarts them; ``worker.py`` is one rank; ``process.py`` ends it.
2. ``preflight.py`` decides the job and checks everything before it starts; ``dry_run.py`` does the same alone.
3. ``trainer.py``: ``Trainer.steps`` from top to bottom, and ``train_step``. ``steps.py`` opens its ``RankSteps``.
4. ``rank_model.py``, ``parallel/``: the model of a rank, and forward and backward of a step (``pipeline.py``).
5. ``optimizer.py``, ``checkpoint/`` and ``evaluation.py``; ``observe.py`` reports; ``stalls.py`` names ranks that
   hang.

What you may touch: anything that keeps ``tests/training/test_equivalence.py`` and ``test_steps_equivalence.py``. What
any loop could use belongs in ``wlb.runtime``.
"""
