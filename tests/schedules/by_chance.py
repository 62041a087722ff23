"""Lists of operations that a pipeline can run, drawn by chance."""

import random

from wlb.schedules.operations import Operation, RankOperations, head_ranks


def operations_by_chance(
    seed: int, pp: int, per_rank: int, micro_batches: int, *, deals_head: bool = False
) -> RankOperations:
    """Forwards of a stage are ascending, backwards of all stages in one order, whole or in two parts.

    A dealt head is dealt to some of the ranks that have one, or to all.
    """
    rng = random.Random(seed)
    stages, backwards = pp * per_rank, rng.sample(range(micro_batches), micro_batches)
    lists: list[list[Operation]] = [[] for _ in range(pp)]
    ahead, back = [0] * stages, [0] * stages
    put_off: list[Operation] = []
    with_head = head_ranks(pp)
    some = rng.sample(with_head, rng.randint(1, len(with_head))) if deals_head else []
    heads = {index: Operation(rng.choice(some), index, "H") for index in range(micro_batches) if deals_head}
    while True:
        ready = [*put_off, *(head for index, head in heads.items() if index < ahead[-1])]
        for stage in range(stages):
            if ahead[stage] < (ahead[stage - 1] if stage else micro_batches):
                ready.append(Operation(stage, ahead[stage], "F"))
            later = back[stage + 1] if stage + 1 < stages else micro_batches
            if back[stage] < later and backwards[back[stage]] < ahead[stage]:
                if stage + 1 == stages and backwards[back[stage]] in heads:
                    continue
                ready.append(Operation(stage, backwards[back[stage]], rng.choice("BI")))
        if not ready:
            return tuple(map(tuple, lists))
        operation = rng.choice(ready)
        stage, kind = operation.stage, operation.kind
        lists[stage % pp].append(operation)
        if kind == "H":
            del heads[operation.micro_batch]
            continue
        if kind == "W":
            put_off.remove(operation)
        elif kind == "I":
            put_off.append(operation._replace(kind="W"))
        ahead[stage] += kind == "F"
        back[stage] += kind in "BI"
