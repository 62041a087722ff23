"""What a loader state is valid for, and what a job says that continues it on something else.

The order in which documents train follows from the token store and some settings. Where one of them differs from what a
checkpoint was written with, continuing would repeat some documents and leave out others, so it is refused; with
``checkpoint.allow_changed_data`` the change is deliberate, and ``StepLoader`` carries over what can be.
"""

from __future__ import annotations

from typing import Any

from wlb.config import JobConfig
from wlb.documents.store.reader import TokenStore
from wlb.errors import UserError

STORE = "token store"


def data_identity(store: TokenStore, config: JobConfig) -> dict[str, Any]:
    """What a loader state is valid for: the data, and every setting that decides which document trains when.

    Parallel sizes, micro-batches, the model, the dealing of micro-batches to ranks and settings that the packing method
    has no use for are absent: they may change.
    """
    data = config.data.model_dump(mode="json", exclude={"store"})
    packing = {"method": config.packing.method, **config.packing.options.identity(config.data.context_window)}
    return {
        STORE: store.identity,
        "tokenizer": store.tokenizer_identity,
        **{f"data.{key}": value for key, value in data.items()},
        **{f"packing.{key}": value for key, value in packing.items()},
    }


def check_identity(state: dict[str, Any], current: dict[str, Any], *, allow_changes: bool = False) -> list[str]:
    """The names in which identity ``current`` differs from what loader ``state`` is valid for.

    Raises ``UserError``, naming the first of them, unless there is none or ``allow_changes`` is set.
    """
    saved = state["identity"]
    changed = [name for name, value in current.items() if saved.get(name) != value]
    if changed and not allow_changes:
        name, *others = changed
        more = f" ({len(others)} more settings differ)" if others else ""
        raise UserError(
            f"the checkpoint was written with {name} = {saved.get(name)!r}, this job has {current[name]!r}{more}; "
            "resume with what it was written with, start anew with another checkpoint.dir, or set "
            "checkpoint.allow_changed_data = true to change it on purpose"
        )
    return changed


def accepted_changes(state: dict[str, Any], current: dict[str, Any], changed: list[str]) -> str:
    """The differences ``changed``, with both values."""
    saved = state["identity"]
    return ", ".join(f"{name} was {saved.get(name)!r} and is {current[name]!r}" for name in changed)
