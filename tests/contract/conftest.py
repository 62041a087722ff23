"""One thread in the test process: models this small lose far more to thread switches than threads win."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
