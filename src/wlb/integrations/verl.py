"""Replaces verl's balancing, ``get_seqlen_balanced_partitions``, by ``wlb.balance``; verl still computes the prices.

verl runs its controller and workers in separate Ray processes. One setting reroutes all of them, without code:

    python -m verl.trainer.main_ppo ... \\
        +ray_kwargs.ray_init.runtime_env.worker_process_setup_hook=wlb.integrations.verl.reroute_balancing
"""

import sys
from collections.abc import Iterable

import verl.utils.seqlen_balancing as verl_balancing

from wlb.errors import UserError
from wlb.packing.balance import balance

_NAME = "get_seqlen_balanced_partitions"


def balanced_partitions(seqlen_list: Iterable[float], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Replaces verl's ``get_seqlen_balanced_partitions``, with the same arguments and guarantees.

    ``seqlen_list`` has the cost of each document, in any unit. No partition is empty. Raises ``UserError`` for fewer
    documents than partitions, or with ``equal_size`` if their number is not a multiple of the partitions.
    """
    costs = seqlen_list.tolist() if hasattr(seqlen_list, "tolist") else list(seqlen_list)
    return balance([1] * len(costs), k_partitions, equal_size=equal_size, costs=costs)


def reroute_balancing() -> None:
    """Make verl balance with ``wlb.balance`` in this process, even where trainers have imported the function already.

    You may call it repeatedly. Raises ``UserError`` if this verl has no such function.
    """
    theirs = getattr(verl_balancing, _NAME, None)
    if theirs is None:
        raise UserError(f"this verl has no {verl_balancing.__name__}.{_NAME} to replace; use a version up to 0.9.1")
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "verl" and getattr(module, _NAME, None) is theirs:
            setattr(module, _NAME, balanced_partitions)
