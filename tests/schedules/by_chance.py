"""Lists of operations that a pipeline can run, drawn by chance."""

import random

from wlb.schedules.operations import Operation, RankOperations


def operations_by_chance(seed: int, pp: int, per_rank: int, micro_batches: int) -> RankOperations:
    """Forwards of a stage are ascending, backwards of all stages in one order, whole or in two parts."""
    rng = random.Random(seed)
    stages, backwards = pp * per_rank, rng.sample(range(micro_batches), micro_batches)
    lists: list[list[Operation]] = [[] for _ in range(pp)]
    ahead, back = [0] * stages, [0] * stages
    put_off: list[Operation] = []
    while True:
        ready = [*put_off]
        for stage in range(stages):
            if ahead[stage] < (ahead[stage - 1] if stage else micro_batches):
                ready.append(Operation(stage, ahead[stage], "F"))
            later = back[stage + 1] if stage + 1 < stages else micro_batches
            if back[stage] < later and backwards[back[stage]] < ahead[stage]:
                ready.append(Operation(stage, backwards[back[stage]], rng.choice("BI")))
        if not ready:
            return tuple(map(tuple, lists))
        operation = rng.choice(ready)
        stage, kind = operation.stage, operation.kind
        lists[stage % pp].append(operation)
        if kind == "W":
            put_off.remove(operation)
        elif kind == "I":
            put_off.append(operation._replace(kind="W"))
        ahead[stage] += kind == "F"
        back[stage] += kind in "BI"
