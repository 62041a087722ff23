"""What the machine-readable outputs hold: an output may get further keys, but loses none of these.

Written as the output is, with types in place of values: ``str``, ``int``, ``float`` (which may be a whole number),
``bool``, ``list`` and ``dict`` of anything. ``[x]`` is a list of ``x`` with at least one element, ``{"*": x}`` an
object with any keys. Where a key ends in "?" the value may be null or an empty list.
"""

from __future__ import annotations

from typing import Any

_WORKLOAD = {"model": str, "hardware": str, "tp": int, "cp": int}

_METHOD = {
    "method": str,
    "imbalance_degree": float,
    "mean_token_delay": float,
    "longest_delay": int,
    "tokens_per_step_cv": float,
    "planning_ms_per_step": float,
    "pipeline_cost": float,
    "pipeline_cost_arranged": float,
    "tokens_per_second": float,
    "tokens_per_second_arranged": float,
    "work_rate": float,
    "work_rate_arranged": float,
    "busy_share": float,
    "busy_share_arranged": float,
    "attention_kept": float,
    "steps": int,
    "drained_steps": int,
    "documents_in": int,
    "documents_out": int,
    "tokens_in": int,
    "tokens_out": int,
    "optimality_gap?": float,
    "speed_at_equal_work": float,
    "speed_at_equal_work_as_packed": float,
}

_TRIAL = {
    "outlier_thresholds?": [int],
    "max_length_factor": float,
    "imbalance_degree": float,
    "mean_token_delay": float,
    "longest_delay": int,
    "tokens_per_step_cv": float,
}

_VERDICT = {
    "verdict": str,
    "base": str,
    "lost": {"*": float},
    "winner": str,
    "speed_at_equal_work": float,
    "spread": [float],
    "factors": {"balance": float, "recomputation": float, "layout": float},
    "draws": int,
    "systems": [
        {
            "system": str,
            "layout": {"tp": int, "cp": int, "pp": int, "dp": int},
            "steps": int,
            "tokens": int,
            "tokens_per_second": float,
            "mean_step_seconds": float,
            "where": {"*": float},
            "token_delay": float,
            "tokens_cv": float,
            "activation_checkpointing": str,
            "speed_at_equal_work": float,
            "spread": [float],
            "parts": {"*": float},
            "fits": bool,
        }
    ],
}

_ESTIMATE: Any = {"config": str, "gpu_hours_a_day": float, "assumed?": [str], "left_out": dict} | _VERDICT

_BY_DIMENSION = {name: {"predicted?": float, "measured?": float} for name in ("tp", "cp", "pp", "dp", "micro_batches")}

_ACCURACY = [{"shapes": str, "count": int, "median": float, "worst": float}]

_GAIN = {"factor": float, "low": float, "high": float, "steps": int}


_PREFILL: Any = {
    "methods": [
        {
            "method": str,
            "p50_seconds": float,
            "p95_seconds": float,
            "p99_seconds": float,
            "mean_seconds": float,
            "longest_seconds": float,
            "tokens_per_second": float,
            "passes": int,
            "longest_pass_seconds": float,
            "busy": float,
            "gpu_seconds": float,
            "energy_joules?": float,
            "groups": [
                {
                    "prompts": str,
                    "tp": int,
                    "cp": int,
                    "clock": float,
                    "count": int,
                    "passes": int,
                    "tokens": int,
                }
            ],
        }
    ],
    "prompts": int,
    "tokens": int,
    "token_budget": int,
    "prompts_per_batch": int,
    "chunked": bool,
    "load": float,
    "arrivals_per_second?": float,
    "lock_step": bool,
    "gpus": int,
    "dp": int,
    "pp": int,
    "seed": int,
    "workload": _WORKLOAD,
}

OUTPUTS: dict[str, Any] = {
    "prepare": {
        "documents_in": int,
        "documents_out": int,
        "rejects": {"bad_json": int},
        "skipped_files": int,
        "tokens": int,
        "text_bytes": int,
        "vocab_size": int,
        "end_token": int,
        "files": [str],
    },
    "prepare --check": {"store": str, "documents": int, "tokens": int},
    "compare": {
        "methods": [_METHOD],
        "workload": {"model": str, "hardware": str},
        "context_window": int,
        "micro_batches": int,
        "dp": int,
        "pp": int,
        "overlong": {"policy": str, "documents": int, "pieces": int, "tokens_dropped": int},
    },
    "prefill": _PREFILL,
    "tune": {
        "best": _TRIAL,
        "trade_off": [_TRIAL],
        "trials": int,
        "methods": [_METHOD],
        "recommended": {"method": str, "max_length_factor": float},
        "max_token_delay": float,
        "workload": {"model": str, "hardware": str},
    },
    "shard": {
        "strategies": [
            {
                "strategy": str,
                "attention_imbalance": float,
                "latency_imbalance": float,
                "token_imbalance": float,
                "kv_gather_fraction": float,
                "slowest_seconds": float,
                "planning_ms": float,
                "micro_batches": int,
                "chosen?": {"per_document": float, "per_sequence": float},
            }
        ],
        "workload": {"model": str, "hardware": str, "tp": int},
        "context_window": int,
        "cp": int,
        "samples": int,
        "seed": int,
    },
    "profile": {
        "profile": str,
        "machine": str,
        "clock": str,
        "dtype": str,
        "accuracy": {"profile": _ACCURACY, "cpu preset": _ACCURACY},
        "crossover_tokens": {"profile?": int, "cpu preset?": int},
    },
    "simulate": {
        "job": str,
        "lengths": str,
        "hardware": str,
        "profile?": str,
    }
    | _VERDICT,
    "check": _ESTIMATE,
    "simulate --search": {
        "layouts": {
            "*": [
                {
                    "parallel": dict,
                    "activation_checkpointing": str,
                    "packing": dict,
                    "sharding": {"strategy": str},
                    "work_rate": float,
                }
            ]
        }
    }
    | _ESTIMATE,
    "rivals": {
        "gpus": int,
        "model": str,
        "hardware": str,
        "context_window": int,
        "batch_tokens": int,
        "lengths": str,
        "policies": [
            {
                "policy": str,
                "layout": str,
                "steps": int,
                "work_rates": [float],
                "tokens": int,
                "seconds": float,
                "token_delay": float,
                "tokens_cv": float,
                "exchanged_bytes": float,
                "memory_bytes": float,
                "planning_seconds": float,
                "tried": int,
                "tokens_per_second": float,
                "speed_at_equal_work": float,
                "spread": [float],
            }
        ],
        "draws": int,
        "epochs": int,
        "without_layout": dict,
    },
    "reproduce": {
        "experiments": [
            {
                "experiment": str,
                "title": str,
                "documents": str,
                "tables": [{"title": str, "columns": [{"name": str, "kind?": str}], "rows": [list]}],
                "findings": [{"statement": str, "holds?": bool, "evidence": str}],
                "notes": [str],
                "run_seconds": float,
            }
        ]
    },
    "report LENGTHS": {"out": str, "kind": str} | _ESTIMATE,
    "report RUN_DIR": {
        "out": str,
        "kind": str,
        "steps": int,
        "tokens_per_second": float,
        "gain": float,
        "speed_at_equal_work": _GAIN,
    },
    "train": {
        "steps": int,
        "last_step?": int,
        "tokens": int,
        "documents": int,
        "median_step_seconds?": float,
        "tokens_per_second?": float,
        "mean_imbalance_degree?": float,
        "last_loss?": float,
        "evaluation_loss?": float,
        "overlong": {"documents": int, "pieces": int, "tokens_dropped": int},
        "pending_documents": int,
    },
    "train --dry-run": {
        "gpus": int,
        "layout": {"*": int},
        "hardware": str,
        "data": str,
        "problems?": [str],
        "step": int,
        "step_tokens": int,
        "imbalance": {"micro_batches": float, "gpus": float},
        "speed_at_equal_work?": float,
        "memory_limit_bytes": int,
        "worst_step_bytes": int,
        "ranks": [
            {
                "rank": int,
                "role": str,
                "place": {"pp": int, "dp": int, "cp": int, "tp": int},
                "seconds": float,
                "operators": int,
                "memory_bytes": {"run": int, "predicted": int},
                "memory": {
                    kind: {"run": int, "predicted": int}
                    for kind in ("parameters", "gradients", "optimizer", "activations", "exchange")
                },
                "traffic": {"*": {"group": str, "ranks": int, "calls": int, "run": int, "predicted?": int}},
            }
        ],
    },
    "steps.jsonl": {
        "step": int,
        "loss?": float,
        "grad_norm?": float,
        "learning_rate": float,
        "tokens": int,
        "documents": int,
        "step_seconds": float,
        "tokens_per_second": float,
        "imbalance_degree": float,
        "token_delay": float,
        "data_wait_seconds": float,
        "planning_seconds": float,
        "pending_documents": int,
        "mfu": float,
        "imbalance": _BY_DIMENSION,
        "slow_ranks?": [int],
        "document_ids": [int],
    },
    "evaluation.jsonl": {
        "step": int,
        "loss?": float,
        "tokens": int,
        "documents": int,
        "buckets": [{"from": int, "to?": int, "documents": int, "tokens": int, "loss?": float}],
        "seconds": float,
    },
    "diagnose": {
        "last_step": int,
        "steps": int,
        "step_seconds": float,
        "mean_compute_seconds": float,
        "slowest_over_mean": float,
        "pool?": int,
        "imbalance": _BY_DIMENSION,
        "causes?": [{"what": str, "cost": float, "text": str}],
        "ranks": [
            {
                "rank": int,
                "host": str,
                "process": int,
                "device": str,
                "pp": int,
                "dp": int,
                "cp": int,
                "tp": int,
                "compute_seconds": float,
                "normalised": float,
                "predicted_normalised": float,
                "over_expected": float,
                "core_wait_seconds": float,
                "data_wait_seconds": float,
            }
        ],
    },
    "export": {
        "out": str,
        "checkpoint": str,
        "step": int,
        "parameters": int,
        "dtype": str,
        "tokenizer_files?": [str],
    },
}
