"""Replaces verl's balancing, ``get_seqlen_balanced_partitions``, by ``wlb.balance``; prices stay verl's.

verl's controller and its workers are Ray processes of their own. One setting reroutes all of them, with no code:

    python -m verl.trainer.main_ppo ... \\
        +ray_kwargs.ray_init.runtime_env.worker_process_setup_hook=wlb.integrations.verl.reroute_balancing
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import verl.utils.seqlen_balancing as verl_balancing

from wlb.errors import UserError
from wlb.packing.balance import balance

_NAME = "get_seqlen_balanced_partitions"


def balanced_partitions(seqlen_list: Iterable[float], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Stands in for verl's ``get_seqlen_balanced_partitions``: same arguments, same promises.

    ``seqlen_list`` is what each document costs, in any unit. No partition is empty. Raises ``UserError`` for fewer
    documents than partitions, or with ``equal_size`` no multiple of them.
    """
    costs = seqlen_list.tolist() if hasattr(seqlen_list, "tolist") else list(seqlen_list)
    return balance([1] * len(costs), k_partitions, equal_size=equal_size, costs=costs)


def reroute_balancing() -> None:
    """Let verl balance with ``wlb.balance`` in this process, also where trainers have imported the function already.

    May be called repeatedly. Raises ``UserError`` where this verl has no such function.
    """
    theirs = getattr(verl_balancing, _NAME, None)
    if theirs is None:
        raise UserError(f"this verl has no {verl_balancing.__name__}.{_NAME} to replace; versions up to 0.9.1 do")
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "verl" and getattr(module, _NAME, None) is theirs:
            setattr(module, _NAME, balanced_partitions)
