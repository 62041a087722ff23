"""The environment of a rank: its device and process group, and the model and hardware that the job names."""

import ctypes
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.attention import current_flash_attention_impl

from wlb.documents.store.reader import TokenStore
from wlb.errors import UserError
from wlb.job.config import JobConfig, ModelConfig, TrainingConfig
from wlb.models.configured_model import configured_model
from wlb.models.transformer import TransformerConfig, check_built
from wlb.os_limits import usable_cores
from wlb.runtime.environment import prefers_fa3, set_up_gpu
from wlb.token_count import parse_count
from wlb.training.stalls import record_flight
from wlb.workload.hardware import HARDWARE

_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}

# Matrix products that oneDNN keeps compiled in half precision on CPU, one for each length of a micro-batch. By default
# it keeps 1,024, and PyTorch's layer above it as many: a GiB (docs/simulation.md).
_COMPILED_PRODUCTS = "64"

# Settings without effect on a dense model; the last one acts on sigmoid routers only.
_OF_ROUTERS = "model.router", "training.balance_loss", "training.router_z_loss", "training.router_bias_rate"

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h


@contextmanager
def joined_job(config: JobConfig) -> Iterator[torch.device]:
    """Join the process group in ``torchrun``'s environment, or run as one process; yields this rank's device.

    Raises ``UserError`` if the number of processes is not the product of ``parallel.*``.
    """
    world_size, asked = int(os.environ.get("WORLD_SIZE", "1")), config.parallel.layout
    if world_size != asked.world_size:
        raise UserError(
            f"{world_size} processes were started, but parallel.* asks for {asked.world_size} (dp {asked.dp} x pp "
            f"{asked.pp} x cp {asked.cp} x tp {asked.tp}); start as many, or start them with wlb train"
        )
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device(device_type(config.training, local_processes), int(os.environ.get("LOCAL_RANK", "0")))
    torch.set_num_threads(threads_per_process(config.training, local_processes))
    bound_compiled_products()
    if config.training.deterministic:
        compute_deterministically()
    if device.type == "cuda":
        record_flight(config.metrics.dir)
        set_up_gpu(device)
    else:
        keep_freed_memory()
    timeout = timedelta(seconds=config.training.timeout_seconds)
    store, rank = _meeting_place(timeout)
    # Without device_id, because with it messages between two ranks would wait for each other (pytorch#154132).
    dist.init_process_group(_BACKENDS[device.type], timeout=timeout, store=store, rank=rank, world_size=world_size)
    yield device
    dist.destroy_process_group()  # not after an error: peers may be gone, and the process ends anyway


def bound_compiled_products() -> None:
    """Keep fewer compiled matrix products, unless the environment says how many. Call it before the first product."""
    for variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(variable, _COMPILED_PRODUCTS)


def keep_freed_memory() -> None:
    """Keep freed tensors of over 32 MiB, which glibc would return to the system, unless the environment forbids it."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has it
    if mallopt and not any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)  # unsigned, so never


def compute_deterministically() -> None:
    """Make every kernel of this process give the same bits each time, or raise. Call it before CUDA starts."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Nothing here reads memory that it has not written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def attention_note(dtype: torch.dtype, device: torch.device) -> str | None:
    """A note for the user if a faster attention kernel exists for this GPU than the one that runs, or None."""
    if device.type == "cuda" and dtype != torch.bfloat16:
        return (
            f"wlb: warning: training.dtype = '{str(dtype).removeprefix('torch.')}' on CUDA runs attention on the dense "
            "reference back end, whose memory grows with the square of a document's tokens; set it to 'bfloat16'"
        )
    if not prefers_fa3(device) or current_flash_attention_impl() is not None:
        return None
    return (
        "wlb: note: attention runs FlashAttention-2, at about 0.6 of FlashAttention-3's speed on this GPU; "
        "flash_attn_interface is not installed or could not be activated"
    )


def _meeting_place(timeout: timedelta) -> tuple[dist.Store, int]:
    """The store through which the ranks find each other, and this process's rank.

    On one machine every attempt has its own keys, because torchrun's store keeps the addresses of killed ranks.
    """
    if "RANK" not in os.environ:
        return dist.HashStore(), 0
    store, rank, _ = next(iter(dist.rendezvous("env://", timeout=timeout)))
    store.set_timeout(timeout)
    several = os.environ.get("GROUP_WORLD_SIZE", "1") != "1"
    attempt = "" if several else f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return dist.PrefixStore(attempt, store), rank


def device_type(config: TrainingConfig, local_processes: int) -> str:
    """``"cuda"`` or ``"cpu"``, as ``training.device`` asks; CUDA needs one GPU per process."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return "cpu"
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus < local_processes:
        raise UserError(
            f"{local_processes} processes need a GPU each, but this machine has {gpus}; reduce parallel.* or set "
            "training.device = 'cpu'"
        )
    return "cuda"


def trained_model(config: JobConfig, store: TokenStore) -> TransformerConfig:
    """The model that ``config`` trains on ``store``.

    Raises ``UserError`` for an unknown vocabulary, a model that can only be priced, and as ``configured_model`` does.
    """
    model = config.model
    if model.pretrained is None and model.vocab_size is None and store.vocab_size is None:
        raise UserError(f"token store {store.prefix} does not give the size of its vocabulary; set model.vocab_size")
    configured = configured_model(model, store.vocab_size)
    check_built(configured.shape)
    _check_experts(config, configured)
    return configured


def _check_experts(config: JobConfig, model: TransformerConfig) -> None:
    """Raise ``UserError`` for settings of experts that the trainer cannot run, or that have no effect."""
    tp, ep, is_mixture = config.parallel.tp, config.parallel.ep, model.shape.experts is not None
    unused = () if is_mixture and model.router == "sigmoid" else _OF_ROUTERS[-1:] if is_mixture else _OF_ROUTERS
    for name in unused:
        section, _, key = name.partition(".")
        if key in getattr(config, section).model_fields_set:
            lacking = "sigmoid routers" if is_mixture else "experts"
            raise UserError(f"{name} has no effect, because the model has no {lacking}; leave it out")
    if is_mixture and tp > 1 and ep == 1:
        raise UserError(
            f"tp = {tp} cannot split experts, which the trainer holds whole; set parallel.ep to {tp} or more"
        )


def threads_per_process(config: TrainingConfig, local_processes: int) -> int:
    """CPU threads of each process: ``training.threads``, else ``OMP_NUM_THREADS``, else its share of the usable cores;
    never more than the machine has."""
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # further numbers are for nested parallelism
    wanted = config.threads or parse_count(given) or usable_cores() // local_processes
    return min(max(1, wanted), os.cpu_count() or 1)


def tokenizer_warning(model: ModelConfig, store: TokenStore) -> str | None:
    """A warning if ``store`` was not prepared with the tokenizer of the pretrained model, or None."""
    file = model.pretrained / "tokenizer.json" if model.pretrained is not None else None
    if store.tokenizer is None or file is None or not file.is_file():
        return None
    if store.tokenizer.get("sha256") == hashlib.sha256(file.read_text(encoding="utf-8").encode()).hexdigest():
        return None
    return (
        f"wlb: warning: {store.prefix} was prepared with the tokenizer {store.tokenizer.get('name')}, not with {file}; "
        "unless both give the same tokens, the pretrained weights are useless"
    )


def hardware_name(device: torch.device) -> str:
    """The hardware preset in this GPU's name, such as "NVIDIA H200", or else "h100"; for a CPU, "cpu"."""
    if device.type == "cpu":
        return "cpu"
    words = re.findall(r"[a-z0-9]+", torch.cuda.get_device_name(device).lower())
    return next((name for name in HARDWARE if name in words), "h100")
