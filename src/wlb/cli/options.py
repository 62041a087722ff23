"""Options that several commands share, and what they mean."""

import math
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args

import typer

from wlb.cli.groups import refuse_unused, was_given
from wlb.errors import UserError, check_known
from wlb.schedules.operations import SCHEDULES
from wlb.token_count import parse_tokens

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from wlb.documents.prepare.sources import FileCorpus
    from wlb.simulate.space import SearchSpace
    from wlb.workload.profile import WorkloadProfile

MOST_STEPS = 1_000_000  # of a simulation: days of computing
DEFAULT_MODEL = "llama3-8b"
DEFAULT_GPUS = 64


def tokens(value: str | int) -> int:
    """Parse a number of tokens for Typer, which also passes defaults."""
    try:
        return parse_tokens(str(value))
    except UserError as error:
        raise typer.BadParameter(str(error)) from None


def number(help: str, *, most: int | None = None) -> Any:
    """An option that is a whole number of at least 1."""
    return typer.Option(min=1, max=most, metavar="N", help=help)


def number_of_tokens(help: str) -> Any:
    return typer.Option(metavar="TOKENS", parser=tokens, help=help)


def number_of_steps(help: str) -> Any:
    return number(help, most=MOST_STEPS)


def list_of_names(help: str) -> Any:
    return typer.Option(metavar="A,B,...", help=help)


Lengths = Annotated[
    str,
    typer.Argument(
        metavar="LENGTHS",
        help="Document lengths: .json list, .jsonl, .csv, .tsv or .parquet (column length), .txt, .npy, also as .gz, "
        "- (standard input), .idx, a token store (prefix, directory, quoted glob), or synthetic:DOCUMENTS:WINDOW:SEED.",
    ),
]
LengthColumn = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Column of LENGTHS with the lengths, or lists of tokens; default: length."),
]
BatchTokens = Annotated[int | None, number_of_tokens("Tokens of a step (the global batch), such as 16M; default: 4M.")]
Steps = Annotated[
    int | None, number_of_steps("Steps to simulate per shuffle of the documents; default: 4 to 16, 256 windows.")
]
Model = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Model preset (llama3-8b, 7b, ...), or a Hugging Face model: its directory or its config.json.",
    ),
]
Hardware = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Hardware preset: a100, h100, h200, b200, mi300x, cpu; with newer attention kernels h100-fa3 and others.",
    ),
]
Profile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Costs measured by wlb profile, instead of those of --model and --hardware."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one setting; may be given several times."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object on stdout.")]


def check_writable(path: Path) -> None:
    """Refuse a file that cannot be written, before any work is done."""
    try:
        if path.is_dir():
            raise UserError(f"{path} is a directory; name a file in it")
        if not path.parent.is_dir():
            raise UserError(f"directory {path.parent} of {path} does not exist; make it first")
        if path.exists() and not os.access(path, os.W_OK):
            raise UserError(f"{path} is not writable")
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None


def names_in(option: str, listed: str | None, default: Iterable[str]) -> list[str]:
    """The comma-separated names in ``listed``, or ``default`` if ``option`` was not given."""
    if listed is None:
        return list(default)
    names = [name.strip() for name in listed.split(",")]
    if not all(names):
        raise UserError(f"{option} {listed!r} has an empty name; list names as a,b,c")
    return names


_SIZES = ("dp", "pp", "cp", "tp", "ep", "virtual_pp", "schedule")
_SPELLED = {"virtual_pp": "--virtual-pp", "weights": "--sharding"}
_SETTING = re.compile(rf"(?<![\w/.-])(?:parallel\.)?({'|'.join((*_SIZES, 'weights'))})\b(?![/.-]\w)(?: =)?")


@contextmanager
def settings_as_options() -> Iterator[None]:
    """Messages of ``UserError`` then name the sizes of a layout by their options."""
    try:
        yield
    except UserError as error:
        text = str(error).removeprefix("parallel: ")
        raise UserError(_SETTING.sub(lambda found: _SPELLED.get(found[1], f"--{found[1]}"), text)) from None


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """A job to simulate. Sizes that are not given are searched for."""

    model: Model = DEFAULT_MODEL
    hardware: Hardware = "h100"
    profile: Profile = None
    length_column: LengthColumn = None
    context_window: Annotated[
        int | None, number_of_tokens("Longest document, such as 128K; default: 4K to 128K, covering 95% of tokens.")
    ] = None
    gpus: Annotated[int | None, number("GPUs; default: the product of the sizes, or 64.")] = None
    batch_tokens: BatchTokens = None
    dp: Annotated[int | None, number("Data-parallel size; default: searched for.")] = None
    pp: Annotated[int | None, number("Pipeline-parallel size; default: searched for.")] = None
    cp: Annotated[int | None, number("Context-parallel size; default: searched for.")] = None
    tp: Annotated[int | None, number("Tensor-parallel size; default: searched for.")] = None
    ep: Annotated[
        int | None, number("GPUs that share the experts of a block; default: searched for; 1 if all others are given.")
    ] = None
    virtual_pp: Annotated[
        int | None, number("Model chunks per pipeline rank; default: searched for; 1 if dp, pp, cp and tp are given.")
    ] = None
    schedule: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"Pipeline schedule: {' or '.join(SCHEDULES)}.")
    ] = None
    recompute: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Activation checkpointing: none, keep_attention or full; default: searched for."
        ),
    ] = None
    sharding: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Weights of your job without a pipeline: kept (a sharded optimizer alone, FSDP2 without resharding) "
            "or gathered again for each pass (FSDP2's default); default: searched for.",
        ),
    ] = None
    micro_batch_tokens: Annotated[
        int | None,
        number_of_tokens("Tokens of your micro-batches, in whole windows; default: one, or the fastest for experts."),
    ] = None
    steps: Steps = None

    def space(self, context: typer.Context, source: str | None, lengths: "NDArray[np.int64]") -> "SearchSpace":
        """The job on documents of ``lengths``, with its assumptions.

        See ``search_space`` for ``source``. Raises ``UserError`` for a layout that cannot run, and for an option that a
        measured profile replaces.
        """
        from wlb.simulate.space import PINNED, search_space
        from wlb.workload.base import Checkpointing
        from wlb.workload.profile import read_profile

        sizes: dict[str, Any] = {name: size for name in _SIZES if (size := getattr(self, name)) is not None}
        stated: dict[str, object] = {"model": self.model, "hardware": self.hardware}
        measured = None
        if self.profile is not None:
            refuse_unused(context, {"model"}, "has no effect with --profile, which says it")
            measured = read_profile(self.profile)
            if sizes.setdefault("tp", measured.tp) != measured.tp:
                raise UserError(f"--tp {self.tp}: the profile has tp = {measured.tp}; leave --tp out, or measure again")
            del stated["model"]
        pinned = self.gpus is None and sizes.keys() >= PINNED
        if self.sharding is not None:
            sizes["weights"] = check_known("--sharding", self.sharding, ("kept", "gathered"))
        if (checkpointing := cast(Checkpointing | None, self.recompute)) is not None:
            check_known("--recompute", checkpointing, get_args(Checkpointing))
        self._check_sizes(sizes, measured)
        gpus = together = math.prod(sizes.get(name, 1) for name in PINNED)
        if not pinned:
            stated["gpus"] = gpus = self.gpus or together * max(1, DEFAULT_GPUS // together)
        return search_space(
            self.model,
            gpus,
            self.context_window,
            lengths,
            hardware=self.hardware,
            batch_tokens=self.batch_tokens,
            fixed=sizes,
            checkpointing=checkpointing,
            micro_batch_tokens=self.micro_batch_tokens,
            profile=measured,
            source=source,
            assumed=[f"--{name} {value}" for name, value in stated.items() if not was_given(context, name)],
        )

    @settings_as_options()
    def _check_sizes(self, sizes: dict[str, Any], measured: "WorkloadProfile | None") -> None:
        """Raise ``UserError`` for an impossible layout."""
        from wlb.job.config import ParallelConfig
        from wlb.schedules.layout import split_layers
        from wlb.sharding import check_group_size
        from wlb.simulate.space import PINNED
        from wlb.workload import make_workload, model_shape

        pp, ep = 1 if sizes.get("weights") == "gathered" else 4, sizes.get("ep", 1)
        free = {} if sizes.keys() >= PINNED else {"ep": 1}  # which dp makes it possible
        layout = ParallelConfig.of({"pp": pp} | sizes | free, "parallel").layout
        check_group_size(layout.cp)
        shape = measured.model if measured else model_shape(self.model)
        if "pp" in sizes:
            split_layers(shape, layout)
        # Checks that they divide heads and experts.
        replace(make_workload(shape, tp=layout.tp, profile=measured), ep=ep)


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """How to find documents in text files."""

    text_field: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Field or column to read; default: text, or messages with --chat."),
    ] = None
    documents: Annotated[
        Literal["files", "lines"] | None,
        typer.Option(metavar="files|lines", help="Whether a text file is one document, or each of its lines."),
    ] = None
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Read conversations (messages with roles); only what the assistant says becomes labels."
        ),
    ] = False

    def corpus(self, sources: list[Path]) -> "FileCorpus":
        from wlb.documents.prepare.sources import FileCorpus

        field = self.text_field or ("messages" if self.chat else "text")
        return FileCorpus(sources, field, chat=self.chat, documents=self.documents)
