"""Proves that the communication calls of a job's ranks cannot deadlock.

The calls of all ranks are played against each other under rules stricter than NCCL's: every call blocks its rank until
it is done, whatever stream it would run on. A collective is done when it is the next call of all members of its group,
with the same operation and sizes; messages that were handed over together are done when each has met its counterpart,
messages between the same two ranks in the order in which they were posted; and the first call of a communicator waits
for the first call of all its members, as NCCL sets it up then. Whatever gets through here gets through with calls that
overlap. Nothing in these rules depends on which message arrives first.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from tests.training.order.calls import Call

_MESSAGES = ("send", "receive")


class OrderError(Exception):
    """Ranks whose calls do not fit together, or that wait for each other in a circle."""


class _Stage(NamedTuple):
    """What a rank waits for at once: one collective, or messages that it handed over together."""

    calls: tuple[Call, ...]
    creates: bool = False  # the communicator, and nothing else

    @property
    def first(self) -> Call:
        return self.calls[0]

    @property
    def is_messages(self) -> bool:
        return not self.creates and self.first.operation in _MESSAGES


def check_order(calls: Mapping[int, Sequence[Call]]) -> int:
    """Play the calls of all ranks of a job to their end; returns how many were played.

    ``calls`` has the calls of every rank, in the order in which it makes them. Raises ``OrderError`` that names the
    ranks and calls in the way.
    """
    waiting = {rank: deque(_stages(of_rank)) for rank, of_rank in calls.items()}
    messages: dict[int, list[Call]] = {}  # of the stage that a rank is in, those without a counterpart so far
    played = 0
    pending = deque(waiting)
    while pending:
        rank = pending.popleft()
        if not waiting[rank]:
            continue
        done = _play(rank, waiting, messages)
        played += sum(len(waiting[other].popleft().calls) for other in done)
        pending.extend(done)
    if any(waiting.values()):
        raise OrderError(_what_is_in_the_way(waiting, messages))
    return played


def _stages(calls: Sequence[Call]) -> Iterator[_Stage]:
    created: set[str] = set()
    for _, together in groupby(enumerate(calls), key=_batch):
        stage = _Stage(tuple(call for _, call in together))
        alone = stage.is_messages and stage.first.batch is None  # NCCL sets up two ranks for it
        if not alone and stage.first.group not in created:
            created.add(stage.first.group)
            yield _Stage(stage.calls[:1], creates=True)
        yield stage


def _batch(numbered: tuple[int, Call]) -> tuple[bool, int]:
    """Equal for calls of one batch; a call outside a batch is alone."""
    index, call = numbered
    return (False, index) if call.batch is None else (True, call.batch)


def _play(rank: int, waiting: Mapping[int, deque[_Stage]], messages: dict[int, list[Call]]) -> list[int]:
    """The ranks whose next stage is done, now that ``rank`` has come to its own."""
    stage = waiting[rank][0]
    if stage.is_messages:
        return _exchange(rank, stage, waiting, messages)
    members = stage.first.members
    heads = {member: waiting[member][0] for member in members if waiting.get(member)}
    here = {member: head for member, head in heads.items() if _waits_where(head) == _waits_where(stage)}
    if len(here) < len(members):
        return []
    if not stage.creates:
        _check_sizes({member: head.first for member, head in here.items()})
    return list(members)


def _waits_where(stage: _Stage) -> tuple[str, bool, bool]:
    return stage.first.group, stage.creates, stage.is_messages


def _check_sizes(calls: Mapping[int, Call]) -> None:
    """Raise ``OrderError`` unless all members of a group make the same call."""
    (first, expected), *others = calls.items()
    for rank, call in others:
        same = call.shape == expected.shape or call.operation == "all_to_all"
        if call.operation != expected.operation or not same:
            raise OrderError(f"rank {first} is at {_named(expected)}, rank {rank} at {_named(call)}")
    if expected.operation == "all_to_all":
        members = expected.members
        for i, sender in enumerate(members):
            for j, receiver in enumerate(members):
                sent, received = calls[sender].shape[1][j], calls[receiver].shape[2][i]
                if sent != received:
                    raise OrderError(f"rank {sender} sends {sent} rows to rank {receiver}, which expects {received}")


def _exchange(
    rank: int, stage: _Stage, waiting: Mapping[int, deque[_Stage]], messages: dict[int, list[Call]]
) -> list[int]:
    mine = messages.setdefault(rank, list(stage.calls))
    done = []
    for peer in {call.peer for call in mine}:
        if peer is None or peer not in messages:
            continue
        for call in [call for call in mine if call.peer == peer]:
            counterpart = _counterpart(call, rank, messages[peer])
            if counterpart is None:
                continue
            if counterpart.shape != call.shape:
                raise OrderError(f"rank {rank} is at {_named(call)}, rank {peer} at {_named(counterpart)}")
            mine.remove(call)
            messages[peer].remove(counterpart)
        if not messages[peer]:
            del messages[peer]
            done.append(peer)
    if not mine:
        del messages[rank]
        done.append(rank)
    return done


def _counterpart(call: Call, rank: int, theirs: Sequence[Call]) -> Call | None:
    other = _MESSAGES[1 - _MESSAGES.index(call.operation)]
    return next((c for c in theirs if (c.operation, c.group, c.peer) == (other, call.group, rank)), None)


def _what_is_in_the_way(waiting: Mapping[int, deque[_Stage]], messages: Mapping[int, Sequence[Call]]) -> str:
    """The circle of ranks that wait for each other, or the call whose counterpart never comes."""
    waits_for: dict[int, tuple[int, Call]] = {}
    for rank, stages in waiting.items():
        if not stages:
            continue
        stage = stages[0]
        if stage.is_messages:
            call = messages.get(rank, stage.calls)[0]
            assert call.peer is not None
            waits_for[rank] = (call.peer, call)
        else:
            elsewhere = (
                member
                for member in stage.first.members
                if not waiting.get(member) or _waits_where(waiting[member][0]) != _waits_where(stage)
            )
            waits_for[rank] = (next(elsewhere, stage.first.members[0]), stage.first)
    rank = next(iter(waits_for))
    trail: list[int] = []
    while rank in waits_for and rank not in trail:
        trail.append(rank)
        rank = waits_for[rank][0]
    circle = trail[trail.index(rank) :] if rank in trail else trail
    steps = ", ".join(f"rank {r} at {_named(waits_for[r][1])} waits for rank {waits_for[r][0]}" for r in circle)
    return steps if rank in trail else f"{steps}, which has made all its calls"


def _named(call: Call) -> str:
    peer = "" if call.peer is None else f" {'to' if call.operation == 'send' else 'from'} rank {call.peer}"
    return f"{call.operation}{peer} of {call.shape} ({call.purpose}, group {call.group} of {len(call.members)})"
