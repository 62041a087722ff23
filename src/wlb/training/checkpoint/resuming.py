"""Which checkpoint a job resumes from: the newest undamaged one, the same on every rank.

Before anything starts, manifests and file sizes are looked at. When the ranks have met, they share out the files and
compare checksums. A checkpoint that is damaged is passed over, with a line that says what is wrong with it, for the one
before it. Where checkpoints exist but none can be used the job stops: to start from scratch is the user's decision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist

from wlb.errors import UserError
from wlb.job.config import CheckpointConfig
from wlb.training.checkpoint.files import find_damage, named_checkpoints
from wlb.training.runtime.collectives import gathered, on_every_rank
from wlb.training.runtime.console import say


def newest_checkpoint(config: CheckpointConfig, *, contents: bool = False) -> Path | None:
    """The newest checkpoint that is whole, as one process sees it; None for a new job.

    Manifests and file sizes are looked at, with ``contents`` checksums too. Raises ``UserError`` where a job that may
    not resume would write among another job's checkpoints, and where there are checkpoints and none can be used.
    """
    return _newest_whole(_candidates(config), lambda path: find_damage(path, contents=contents))


def agreed_checkpoint(config: CheckpointConfig) -> Path | None:
    """The newest undamaged checkpoint, called on every rank; every file of it has been read and compared.

    Raises ``UserError`` on every rank: for what ``newest_checkpoint`` raises it, and where a rank sees another newest
    checkpoint than rank 0, as ranks that continue from different steps would wait for each other in vain.
    """
    candidates = on_every_rank(lambda: _candidates(config))
    names = gathered([path.name for path in candidates])
    newest = [seen[-1] if seen else "none" for seen in names]
    for rank, name in enumerate(newest):
        if name != newest[0]:
            raise UserError(
                f"checkpoint.dir {config.dir} must be shared by all machines: the newest checkpoint in it is "
                f"{newest[0]} for rank 0 and {name} for rank {rank}"
            )
    return _newest_whole([(config.dir or Path()) / name for name in names[0]], _damage_seen_by_any_rank)


def _candidates(config: CheckpointConfig) -> list[Path]:
    named = named_checkpoints(config.dir) if config.dir is not None else []
    if named and not config.resume:
        raise UserError(
            f"checkpoint.dir {config.dir} already holds {named[-1].name} and checkpoint.resume is false; "
            "choose another directory or remove the checkpoints"
        )
    return named


def _newest_whole(candidates: Sequence[Path], damage_of: Callable[[Path], str | None]) -> Path | None:
    damage = None
    for path in reversed(candidates):
        damage = damage_of(path)
        if damage is None:
            return path
    if candidates:
        raise UserError(
            f"none of the {len(candidates)} checkpoints in {candidates[-1].parent} can be used, and of the oldest "
            f"{damage}; restore one, or remove all of them to start anew"
        )
    return None


def _damage_seen_by_any_rank(path: Path) -> str | None:
    share = dist.get_rank(), dist.get_world_size()
    seen = gathered(on_every_rank(lambda: find_damage(path, contents=True, share=share)))
    damage = next(filter(None, seen), None)
    if damage is not None and dist.get_rank() == 0:
        say(f"wlb: warning: checkpoint {path} is damaged and not used: {damage}")
    return damage
