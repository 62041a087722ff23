"""Training: from a token store and a configuration to a trained model, on as many processes as it takes.

In the order in which a step passes through: ``planner`` has the next documents (``wlb.documents.order``)
packed and dealt to ranks, ``loader`` (with ``prefetch`` and ``batch``) makes tokens of the plan ahead of time,
``pipeline`` runs them forward and backward through the ``model`` that ``parallelize`` spread over the processes, and
``optimizer`` updates it. ``trainer`` is the loop around this, with ``metrics`` and ``checkpoint``. ``launch``,
``preflight``, ``rank`` and ``failures`` start the processes and tell the user how they ended. ``profiling`` measures
what a model costs on this device, for plans made elsewhere.
"""
