"""Training: from a token store and a configuration to a trained model, on as many processes as it takes.

In the order in which a step passes through: ``wlb.job.planner`` has the next documents packed and dealt to ranks,
``data`` makes tokens of the plan ahead of time, ``parallel`` runs them forward and backward through the model that it
spread over the processes, and ``optimizer`` updates it. ``trainer`` is the loop around this, ``phases`` builds what it
loops over; ``observe`` measures and reports it, ``checkpoint`` saves it, ``evaluation`` scores it on held-out
documents. ``launcher``, ``preflight``, ``worker`` and ``stalls`` start the processes and tell the user how they ended.
"""
