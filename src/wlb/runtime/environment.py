"""What training on GPUs needs from its surroundings, in any loop: the allocator, NCCL and attention.

docs/training.md has each setting with its reason. What the user has set stays. A process reads its settings once, so a
loop that calls us later is told what to export.
"""

import os
from contextlib import suppress

import torch
import torch.distributed as dist
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl

from wlb.terminal import tell

_ALLOCATOR, _OLD_ALLOCATOR, _SEGMENTS = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
_done = False


def set_up_gpu(device: torch.device | None = None, *, shares: bool = True) -> None:
    """Set what is unset and can still be set, and say so once, on rank 0; nothing without CUDA.

    It starts CUDA on ``device`` if given, and never otherwise. ``shares``: ranks share micro-batches, so they use
    several communicators at once, and it is said if NCCL has begun without its setting.
    """
    global _done
    if _done or not torch.cuda.is_available():
        return
    done, late = [], False
    set_in_program = getattr(torch._C, "_accelerator_getAllocatorSettings", str)()  # torch 2.11 does not tell
    if not {_ALLOCATOR, _OLD_ALLOCATOR} & os.environ.keys() and not set_in_program:
        os.environ[_ALLOCATOR] = _SEGMENTS  # for child processes; this one may have read it
        torch._C._accelerator_setAllocatorSettings(_SEGMENTS)
        done.append(f"{_ALLOCATOR}={_SEGMENTS}")
    if _ORDER not in os.environ and not (late := _nccl_has_begun()):
        os.environ[_ORDER] = "1"
        done.append(f"{_ORDER}=1")
    if device is not None:
        torch.cuda.set_device(device)
    _done = device is not None or torch.cuda.is_initialized()
    if _done and activate_fast_attention(torch.device("cuda")):
        done.append("FlashAttention 3")
    lines = [f"wlb: set {', '.join(done)}"] if done else []
    if late and shares:
        lines += [f"wlb: warning: NCCL has begun; export {_ORDER}=1 before the job starts, or ranks may deadlock"]
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    for line in lines if rank == 0 else ():
        tell(line)


def activate_fast_attention(device: torch.device) -> bool:
    """Use FlashAttention 3 on a Hopper GPU if it is installed and no other one is active; returns whether it began.

    Deterministic algorithms rule it out, because its backward ignores them.
    """
    if prefers_fa3(device) and current_flash_attention_impl() is None:
        with suppress(ImportError, RuntimeError, ValueError):
            activate_flash_attention_impl("FA3")
            return True
    return False


def prefers_fa3(device: torch.device) -> bool:
    """Whether ``device`` runs attention faster with FlashAttention 3, and may."""
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return hopper and not torch.are_deterministic_algorithms_enabled()


def _nccl_has_begun() -> bool:
    """Whether a process group of NCCL has a communicator."""
    groups = dist.distributed_c10d._world.pg_map if dist.is_initialized() else ()
    for group in groups:
        with suppress(RuntimeError):  # it has no back end for CUDA
            if getattr(group._get_backend(torch.device("cuda")), "_is_initialized", bool)():
                return True
    return False
