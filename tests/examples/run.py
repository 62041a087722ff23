"""One rank of a small run of an example: prints which tokens all ranks trained, and how often, as JSON."""

import json
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from transformers import LlamaForCausalLM

from studies.benchmarks.recorder import Recorder, numbered, recording

EXAMPLES = Path(__file__).parents[2] / "examples"


def main() -> None:
    sys.path.insert(0, str(EXAMPLES))
    import stand_ins

    stand_ins.WINDOW, stand_ins.DOCUMENTS = 512, 32
    example = runpy.run_path(str(EXAMPLES / f"{sys.argv[1]}.py"), run_name="example")
    dist.init_process_group("gloo")
    with recording(LlamaForCausalLM, per_step=None if sys.argv[1] == "own_lists" else 2) as recorder:
        example["train"]()
    once = every_token_once(recorder, stand_ins.documents())
    if dist.get_rank() == 0:
        print(json.dumps({"steps": len(recorder.steps), "every_token_once": once}))
    # The process ends here: torch's DDP keeps gloo's threads past destroy_process_group, and an interpreter that ends
    # while they run aborts now and then (one in fifty on a busy machine, torch 2.13).
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def every_token_once(recorder: Recorder, documents: Sequence[dict[str, Any]]) -> bool:
    """Whether the processes together have trained every token of ``documents`` once; a collective call."""
    trained: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(trained, recorder.tokens.tolist())
    given = [numbered(ids, np.arange(len(ids))) for ids in (np.array(each["input_ids"]) for each in documents)]
    # No document has a zero: it pads the rows of a rank without tokens.
    numbers = np.concatenate([np.array(numbers) for numbers in trained])
    return np.array_equal(np.sort(numbers[numbers >= 2**32]), np.sort(np.concatenate(given)))


if __name__ == "__main__":
    main()
