"""Training: the smallest program over ``wlb.runtime``, from a token store and a configuration to a trained model.

``launcher`` and ``worker`` start the ranks, ``preflight`` checks and decides the job, and ``trainer`` runs its steps.
"""
