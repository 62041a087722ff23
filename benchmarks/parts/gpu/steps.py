"""Whole steps on real ranks: their speed, their memory and whether they repeat; and what ranks do with each other.

``step`` trains on one device and compares the allocator's peak with the prediction of ``wlb.job.memory``, and the bits
of two runs. ``exchange`` is attention of one long and some short documents over all devices, beside what its messages
take alone. ``levels`` trains the same documents in level steps and in lock step, by ``wlb train``.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.parts.gpu.setting import Result, Row, Setting, Workloads
from benchmarks.parts.ranks import on_ranks
from wlb.attention import context_parallel_attention
from wlb.attention.exchange import PlanRanks, send_keys
from wlb.attention.shard_layout import shard_layout
from wlb.documents.store.reader import TokenStoreWriter
from wlb.documents.synthetic import sample_lengths
from wlb.job.config import TrainingConfig
from wlb.job.memory.walk import predict_memory
from wlb.models.transformer import TransformerConfig
from wlb.runtime.batch import Batch, RankSlice
from wlb.runtime.environment import activate_fast_attention
from wlb.schedules.layout import Layout
from wlb.sharding import ShardPlan, make_shard_plan
from wlb.simulate import simulated_job
from wlb.training.environment import compute_deterministically, hardware_name
from wlb.training.optimizer import build_optimizer
from wlb.training.parallel.mesh import build_mesh
from wlb.training.parallel.parallelize import Execution, build_stage_modules
from wlb.training.parallel.pipeline import PipelineRunner
from wlb.workload import hardware_preset
from wlb.workload.flops import attention_flops, linear_flops

STEPS = 4
MICRO_BATCHES = 2
SHARES = (0.5, 0.3, 0.15, 0.05)  # of a micro-batch's tokens: its documents
LEVELS = {"level steps": "level", "lock step": "even"}


def step(setting: Setting, workloads: Workloads) -> Result:
    rows = []
    for deterministic in (False, True):
        one, other = on_ranks(1, _two_runs, setting, deterministic, device=setting.device)[0]
        same = one.pop("bits") == other.pop("bits")
        rows.append({"deterministic": deterministic, "same bits twice": same} | one)
    problem = None if rows[1]["same bits twice"] else "deterministic kernels gave other bits in a second run"
    return Result(rows, problem=problem)


def _two_runs(setting: Setting, deterministic: bool) -> list[Row]:
    if deterministic:
        compute_deterministically()
    device = torch.device(setting.device)
    if device.type == "cuda":
        activate_fast_attention(device)
    return [_steps(setting, device) for _ in range(2)]


def _steps(setting: Setting, device: torch.device) -> Row:
    shape = setting.trained
    layout, execution = Layout(), Execution(device, setting.dtype)
    mesh = build_mesh(layout, device.type)
    (stage,) = build_stage_modules(TransformerConfig(shape), layout, mesh, execution, seed=setting.seed)
    optimizer, runner = build_optimizer(stage, TrainingConfig()), PipelineRunner([stage], layout, mesh, 2, execution)
    lengths = tuple(int(setting.trained_tokens * share) for share in SHARES)
    ids = torch.arange(sum(lengths)) * 7919 % shape.vocab_size
    batch = Batch(ids, ids.roll(-1), torch.cat([torch.arange(length) for length in lengths]), lengths)
    batches = [RankSlice(layout=layout).of(batch)] * MICRO_BATCHES
    losses, seconds = [], []
    for _ in range(STEPS):
        began = now(device)
        optimizer.zero_grad()
        losses.append(float(runner.run_step(batches, MICRO_BATCHES * len(ids))))
        optimizer.step()
        seconds.append(now(device) - began)
    preset = hardware_preset(hardware_name(device))
    flops = 3.0 * (attention_flops(shape, lengths, "forward").sum() + linear_flops(shape, len(ids), "forward"))
    hardware = preset.computing_in(str(setting.dtype).removeprefix("torch."))
    job = simulated_job(shape, len(ids), "plain-4d", hardware=hardware, micro_batches=MICRO_BATCHES)
    return {
        "step_seconds": median(seconds[1:]),
        "mfu": float(MICRO_BATCHES * flops / median(seconds[1:]) / preset.peak_flops),
        "predicted_bytes": predict_memory(job, [len(ids)] * MICRO_BATCHES).total,
        "allocated_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        "reserved_bytes": torch.cuda.max_memory_reserved() if device.type == "cuda" else None,
        "bits": [loss.hex() for loss in losses],
    }


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def exchange(setting: Setting, workloads: Workloads) -> Result:
    ranks = _devices(setting)
    return _needs_two() if ranks < 2 else Result(on_ranks(ranks, _exchange, setting, device=setting.device)[0])


def _exchange(setting: Setting) -> list[Row]:
    rank, ranks, device = dist.get_rank(), dist.get_world_size(), torch.device(setting.device)
    shape, group = setting.shape, PlanRanks(None)
    dist.all_reduce(torch.zeros(1, device=device))
    rows = []
    for strategy in ("per_sequence", "per_document"):
        plan = make_shard_plan([int(setting.trained_tokens * share) for share in SHARES], ranks, strategy)
        tokens, parts = int(plan.tokens_per_rank[rank]), shard_layout(plan, rank, device).parts
        query = torch.randn(tokens, shape.heads, shape.head_dim, device=device, dtype=setting.dtype, requires_grad=True)
        key, value = (torch.randn_like(query[:, : shape.kv_heads]).requires_grad_() for _ in range(2))

        def attend(q: Tensor = query, k: Tensor = key, v: Tensor = value, plan: ShardPlan = plan) -> None:
            context_parallel_attention(q, k, v, plan, None).sum().backward()

        def send(k: Tensor = key.detach(), v: Tensor = value.detach(), parts: Any = parts) -> None:
            for arrival in [send_keys(k, v, part, group) for part in parts]:
                arrival.wait()

        received = int(plan.kv_traffic.sum(axis=1).max()) * 2 * shape.kv_heads * shape.head_dim * key.element_size()
        took = {"attention_seconds": _median(attend, device), "exchange_seconds": _median(send, device)}
        rows.append({"ranks": ranks, "strategy": strategy, "most_received_bytes": received} | took)
    return rows


def _median(call: Callable[[], None], device: torch.device) -> float:
    """Seconds of a layer on this rank, with its waiting for others."""
    seconds = []
    for _ in range(5):
        dist.barrier()
        began = now(device)
        call()
        seconds.append(now(device) - began)
    return median(seconds)


def levels(setting: Setting, workloads: Workloads) -> Result:
    ranks = _devices(setting)
    if ranks < 2:
        return _needs_two()
    shape, window = setting.trained, setting.trained_tokens
    with tempfile.TemporaryDirectory() as folder:
        with TokenStoreWriter(Path(folder) / "store", vocab_size=shape.vocab_size) as writer:
            for length in sample_lengths(40 * ranks, window, setting.seed).tolist():
                writer.add((torch.arange(length) * 7919 % shape.vocab_size).numpy())
        rows = [_trained(Path(folder), name, ranks, setting) for name in LEVELS]
    return Result(rows)


def _trained(folder: Path, name: str, ranks: int, setting: Setting) -> Row:
    shape, out = setting.trained, folder / LEVELS[name]
    fields = ("hidden", "layers", "heads", "kv_heads", "ffn_hidden", "vocab_size")
    settings = [f"model.{field}={getattr(shape, field)}" for field in fields]
    settings += [
        f"data.store={folder / 'store'}",
        f"data.context_window={setting.trained_tokens}",
        f"metrics.dir={out}",
    ]
    settings += [f"parallel.dp={ranks}", f"packing.grouping={LEVELS[name]}", f"packing.global_batch={4 * ranks}"]
    settings += [f"training.steps={STEPS}", f"training.device={setting.device}"]
    config = folder / "job.toml"
    config.write_text("", encoding="utf-8")
    words = [sys.executable, "-m", "wlb", "train", str(config), *(f"--set={one}" for one in settings)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    steps = [json.loads(line) for line in (out / "steps.jsonl").read_text(encoding="utf-8").splitlines()][1:]
    tokens, seconds = (sum(row[column] for row in steps) for column in ("tokens", "step_seconds"))
    return {"steps": name, "tokens_per_second": tokens / seconds, "mfu": median(row["mfu"] for row in steps)}


def _devices(setting: Setting) -> int:
    return torch.cuda.device_count() if setting.device == "cuda" else 2


def _needs_two() -> Result:
    return Result([{"left out": "needs two GPUs"}])
