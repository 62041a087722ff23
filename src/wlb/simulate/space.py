"""The job whose fastest layout is asked for: how many GPUs of which kind, what they train, and what was assumed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from wlb.documents.lengths import assumed_window, described_window
from wlb.documents.store.files import names_store
from wlb.documents.store.reader import stored_vocab_size
from wlb.errors import UserError
from wlb.schedules.layout import Layout
from wlb.settings import MOST_MICRO_BATCHES
from wlb.workload import MODEL_SHAPES, Costs, Hardware, ModelShape, hardware_preset, make_workload, model_shape
from wlb.workload.base import Checkpointing
from wlb.workload.profile import WorkloadProfile

BATCH_TOKENS = 2**22  # of a step, where nobody says
PINNED = {"tp", "cp", "pp", "dp"}  # sizes that leave one layout
_ONE_DOCUMENT = np.array([BATCH_TOKENS])
_VOCABULARY_MULTIPLE = 128  # tensor-parallel ranks get equally many rows


@dataclass(frozen=True)
class SearchSpace:
    """How many GPUs of which kind, and what they train.

    ``global_batch`` counts context windows. Only layouts with the ``fixed`` sizes (fields of ``Layout``) are tried, and
    only the given activation ``checkpointing``. Packers that fill windows put ``micro_batch_windows`` of them into a
    micro-batch; None means one or, with experts, as many as are fastest. ``settings`` are further fields of every
    ``Job``, such as a profile. ``priced_by`` names the model, or the profile, and the hardware; ``assumed`` are the
    defaults used.
    """

    gpus: int
    shape: ModelShape
    hardware: Hardware
    context_window: int
    global_batch: int
    fixed: Mapping[str, Any] = field(default_factory=dict, hash=False)
    checkpointing: Checkpointing | None = None
    micro_batch_windows: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    priced_by: Mapping[str, str] = field(default_factory=dict, hash=False)
    assumed: tuple[str, ...] = ()

    @property
    def layout(self) -> Layout | None:
        """The only layout, if all of its sizes are fixed."""
        return Layout(**self.fixed) if self.fixed.keys() >= PINNED else None

    @property
    def batch_tokens(self) -> int:
        return self.global_batch * self.context_window

    @property
    def is_of_a_job(self) -> bool:
        """Whether it describes a job that runs already: a whole layout, or settings that nobody would search for."""
        several = (self.micro_batch_windows or 1) > 1
        return bool(self.layout or self.checkpointing or several or "weights" in self.fixed)

    def fixed_to(self, layout: Layout, checkpointing: Checkpointing | None, micro_batch_windows: int | None) -> Self:
        """The same with ``layout`` only, but for its pools and its blocks of stages."""
        sizes = {name: size for name, size in vars(layout).items() if name not in ("stage_blocks", "pool")}
        return replace(self, fixed=sizes, checkpointing=checkpointing, micro_batch_windows=micro_batch_windows)

    @property
    def work_prices(self) -> Costs:
        """The prices of work for comparing systems: W_a + W_l of a document on a single GPU."""
        return make_workload(self.shape, self.hardware)

    def check_given(self) -> None:
        """Raise ``UserError`` where given sizes do not divide the GPUs, or their layout cannot run the global batch."""
        given = {name: size for name, size in self.fixed.items() if name in PINNED}
        together, layout = prod(given.values()), self.layout
        sizes = " x ".join(f"--{name} {size}" for name, size in given.items()) + f" = {together}" * (len(given) > 1)
        if self.gpus % together:
            raise UserError(
                f"--gpus {self.gpus} is no multiple of {sizes}; change one of the sizes, or give "
                f"--gpus {together * max(1, self.gpus // together)}"
            )
        if layout is None:
            return
        if layout.world_size != self.gpus:
            raise UserError(f"--gpus {self.gpus} contradicts {sizes}; leave out --gpus, or one of the sizes")
        windows, least, together = self.global_batch, layout.dp * layout.pp, self.micro_batch_windows or 1
        if together > 1 and (windows % (layout.dp * together) or windows < least * together):
            raise UserError(
                f"a global batch of {windows} windows cannot be dealt to --dp {layout.dp} ranks, --pp {layout.pp} "
                f"stages, in micro-batches of {together} windows (--micro-batch-tokens); give --batch-tokens "
                f"{least * together * max(1, windows // (least * together)) * self.context_window}"
            )
        if windows % layout.dp:
            raise UserError(
                f"a global batch of {windows} windows cannot be dealt evenly to --dp {layout.dp} ranks; give a "
                f"multiple, such as --batch-tokens {layout.dp * max(1, windows // layout.dp) * self.context_window}"
            )
        if windows < least:
            raise UserError(
                f"a global batch of {windows} windows over --dp {layout.dp} cannot fill --pp {layout.pp} pipeline "
                f"stages; give at least --batch-tokens {least * self.context_window}, or a smaller --pp"
            )


def search_space(
    model: str | ModelShape,
    gpus: int,
    context_window: int | None = None,
    lengths: NDArray[np.int64] = _ONE_DOCUMENT,
    *,
    hardware: str | Hardware = "h100",
    batch_tokens: int | None = None,
    fixed: Mapping[str, Any] | None = None,
    checkpointing: Checkpointing | None = None,
    micro_batch_tokens: int | None = None,
    profile: WorkloadProfile | None = None,
    source: str | None = None,
    assumed: Sequence[str] = (),
) -> SearchSpace:
    """A search space by names, with defaults for the window and the global batch from documents of ``lengths`` tokens.

    The global batch is as many whole windows as ``batch_tokens`` holds. If ``source`` is a token store, the model gets
    at least its vocabulary. With a measured ``profile``, ``hardware`` gives the links only. Raises ``UserError`` for
    values that no job can have.
    """
    if gpus < 1:
        raise UserError(f"gpus = {gpus} is below 1; raise it")
    assumed, fixed = [*assumed], fixed or {}
    if context_window is None:
        context_window = assumed_window(lengths)
        assumed.append(described_window(context_window, lengths))
    windows, rest = divmod(micro_batch_tokens or context_window, context_window)
    if rest or not windows:
        raise UserError(
            f"--micro-batch-tokens {micro_batch_tokens} is no multiple of the context window, {context_window} tokens; "
            f"give {max(1, windows) * context_window}"
        )
    if batch_tokens is None:
        least = windows * fixed.get("dp", 1) * fixed.get("pp", 1)
        batch_tokens, why = _assumed_batch(lengths, context_window, least)
        assumed.append(f"--batch-tokens {batch_tokens}{why}")
    global_batch = batch_tokens // context_window
    if global_batch < 1:
        raise UserError(
            f"--batch-tokens {batch_tokens} is smaller than one context window of {context_window} tokens; raise it"
        )
    if global_batch > MOST_MICRO_BATCHES:
        raise UserError(
            f"a global batch of {batch_tokens} tokens holds {global_batch} windows of {context_window}, over "
            f"{MOST_MICRO_BATCHES}; lower it"
        )
    if global_batch % windows:
        raise UserError(
            f"--batch-tokens {global_batch * context_window} is no multiple of --micro-batch-tokens "
            f"{windows * context_window}; give {windows * context_window * max(1, global_batch // windows)}"
        )
    shape = profile.model if profile else model_shape(model) if isinstance(model, str) else model
    stored = stored_vocab_size(source) if source is not None and names_store(source) else None
    if stored is not None and stored > shape.vocab_size:
        shape = replace(shape, vocab_size=-(-stored // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE)
    named = {"profile": measured_name(profile)} if profile else {"model": str(model)}
    space = SearchSpace(
        gpus,
        shape,
        hardware_preset(hardware) if isinstance(hardware, str) else hardware,
        context_window,
        global_batch,
        fixed,
        checkpointing,
        windows if micro_batch_tokens else None,
        {"profile": profile} if profile else {},
        named | {"hardware": str(hardware)},
        tuple(assumed),
    )
    space.check_given()
    return space


def measured_name(profile: WorkloadProfile) -> str:
    """The name of the measured model."""
    measured = replace(profile.model, vocab_size=1)
    names = (name for name, shape in MODEL_SHAPES.items() if replace(shape, vocab_size=1) == measured)
    return next(names, "MODEL OF THE PROFILE")


def _assumed_batch(lengths: NDArray[np.int64], window: int, least: int) -> tuple[int, str]:
    """4M tokens, or the ``least`` windows that a given layout needs; halved until the documents fill it."""
    windows, tokens, why = max(least, BATCH_TOKENS // window // least * least), int(lengths.sum()), ""
    while windows % (2 * least) == 0 and windows * window > tokens:
        windows, why = windows // 2, f" (the documents have {tokens:,})"
    return windows * window, why
