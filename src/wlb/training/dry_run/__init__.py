"""A job of any size on one CPU: the modules, plans, calls and memory of some of its ranks, without the job.

``job.dry_run`` collects what would stop the job at its start, plans its first step, and runs that step as one or
several of its ranks (``rank``): PyTorch's fake process group stands for all the others (``fake_rank``), tensors have
shapes and no contents, every storage is counted (``meter``) and every call of a communication library written down
(``calls``). ``tests/training/dry_run/order.py`` merges the calls of all ranks and proves that none waits for ever.
"""
