"""What ranks run in tests of pretrained weights, without ``transformers``, whose import takes a process seconds."""

from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from wlb.models.huggingface.config_json import read_config
from wlb.models.huggingface.weights import PretrainedWeights
from wlb.schedules.layout import Layout
from wlb.training.parallel.mesh import build_mesh
from wlb.training.parallel.parallelize import Execution, build_stage_modules


def weights_in(directories: list[Path], layouts: list[Layout]) -> list[dict[str, Tensor]]:
    found, device = [], torch.device("cpu")
    for directory, parallel in zip(directories, layouts, strict=True):
        config, mesh = read_config(directory), build_mesh(parallel, "cpu")
        stages = build_stage_modules(config, parallel, mesh, Execution(device, torch.float32), seed=None)
        PretrainedWeights(directory).load(*stages)
        weights = {name: weight for stage in stages for name, weight in stage.named_parameters()}
        found.append({name: w.full_tensor().detach() for name, w in weights.items() if isinstance(w, DTensor)})
    return found
