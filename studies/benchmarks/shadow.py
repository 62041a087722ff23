"""Whether shadow mode tells the truth: the gain that it predicts, against the gain that is then measured.

    .venv/bin/python -m studies.benchmarks.shadow [--stacks NAME,..] [--turns N] [--documents N] [--out FILE]

Two processes of one thread each train documents in random micro-batches, as ``studies.benchmarks.adoption`` does, under
``wlb.shadow``, which predicts how fast balanced steps are. Then they train the same documents in balanced steps, in
lock step. Both take turns, after one to warm up. Seconds are CPU seconds of the critical path: with FSDP2 ranks wait
for each other in every micro-batch, otherwise at the end of a step; a micro-batch counts with the median over turns, of
two turns the smaller. Brackets hold every turn alone. Speeds are at equal work.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

import wlb
from benchmarks.parts.measurement import chosen, command, console, facts, make_parser, show, spread, write
from benchmarks.parts.ranks import on_ranks
from studies.benchmarks.adoption import (
    PROCESSES,
    add_turn,
    begun_together,
    example,
    rows_of,
    turn_seconds,
    unbalanced,
    ways_of,
)

STACKS = {"torch_loop": "DDP", "own_lists": "FSDP2", "hf_trainer": "Hugging Face Trainer"}  # by example
COLUMNS = {
    "stack": "{stack}",
    "predicted": "{predicted:.3f}x ({predicted_least:.2f} to {predicted_most:.2f})",
    "measured": "{speed:.3f}x ({least:.2f} to {most:.2f})",
    "one micro-batch differs": "{median_difference:.0%}, {worst_difference:.0%}",
    "predicted over measured": "{ratio:.3f}",
    "R2": "{r_squared:.3f}",
    "random, predicted over measured s": "{own:.3f}",
}


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Predict and measure the gain in every stack, print a table and write it as JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--stacks", default=",".join(STACKS), help="which examples")
    parser.add_argument("--turns", type=int, default=3, help="of each way, after one to warm up")
    parser.add_argument("--documents", type=int, default=256)
    parser.add_argument("--context-window", type=int, default=4096)
    options = parser.parse_args(arguments)
    rows = [
        predicted_row(name, on_ranks(PROCESSES, predict_and_measure, name, options))
        for name in chosen(options.stacks, [*STACKS], "stack")
    ]
    results = facts("torch", "transformers", "accelerate")
    console.print(results)
    show(f"{PROCESSES} processes of one thread, CPU seconds of the critical path", rows, COLUMNS)
    write(results | {"rows": rows}, options.out)


def predict_and_measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One rank of a stack: its micro-batches of every turn, random and balanced, and what shadow mode found in each."""
    train = example(name, options)
    random, *_ = ways = ways_of(name)
    balanced = "equal numbers" if "equal numbers" in ways else "balanced"
    found: dict[str, dict[str, Any]] = {way: {"turns": []} for way in (random, balanced)}
    gains = []
    for _ in range(options.turns + 1):
        shadows: list[Any] = []
        add_turn(found[random], name, train, ways[random] | shadowed(train, shadows))
        gains.append(shadows[0].close())
        add_turn(found[balanced], name, train, ways[balanced])
    for of_way in found.values():
        del of_way["turns"][0]
        if name == "own_lists":  # as in a loop that gathers weights in every micro-batch
            of_way["turns"] = [*map(begun_together, of_way["turns"])]
    return found | {"gains": gains[1:]}


def shadowed(train: Any, shadows: list[Any]) -> dict[str, Any]:
    """What is put in place of our names in an example, so that ``shadows`` get its shadow."""
    if "balanced" not in train.__globals__:
        llama = train.__globals__["llama"]

        def watched() -> Any:
            model = llama()
            shadows.append(wlb.shadow(model))
            return model

        return {"llama": watched}

    from wlb.integrations.shadow import ShadowCallback

    def with_callback(trainer_class: type[Any], **settings: Any) -> type[Any]:
        class Shadowed(unbalanced(trainer_class, **settings)):  # type: ignore[misc]
            def __init__(self, **more: Any) -> None:
                super().__init__(**more)
                callback = ShadowCallback()
                self.add_callback(callback)
                shadows.append(_Found(callback))

        return Shadowed

    return {"balanced": with_callback}


class _Found:
    """The shadow of a Trainer, which closes it."""

    def __init__(self, callback: Any) -> None:
        self._callback = callback

    def close(self) -> Any:
        return self._callback.shadow.gain


def predicted_row(name: str, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A row of the table."""
    ways = [{way: found for way, found in rank.items() if way != "gains"} for rank in ranks]
    gains = ranks[0]["gains"]
    _, *random = turn_seconds([rank["random"]["turns"] for rank in ranks])
    (_, balanced), predicted = rows_of(name, ways), [gain.speed for gain in gains]
    own = [gain.own * gain.steps / seconds for gain, seconds in zip(gains, random, strict=True)]
    return balanced | {
        "stack": STACKS[name],
        "predicted": float(np.median(predicted)),
        **{f"predicted_{name}": bound for name, bound in spread(predicted).items()},
        "ratio": float(np.median(predicted)) / balanced["speed"],
        "r_squared": float(np.median([gain.prices.r_squared for gain in gains])),
        "own": float(np.median(own)),
    }


if __name__ == "__main__":
    sys.exit(main())
