#!/usr/bin/env bash
# A job that goes on with fewer machines when one is lost, and with more when it returns: run this on every machine, with
# the same arguments, and again on one that comes back.
#
#     examples/torchrun_elastic.sh HEAD:PORT MIN:MAX PROCESSES CONFIG [--set section.key=value]...
#
# HEAD is a machine that stays, PORT free there; MIN to MAX machines run PROCESSES each. CONFIG has parallel.dp = "auto",
# a checkpoint.dir that all machines share, and packing.global_batch that every number of machines divides.
#
# RDZV_CONF may shorten how long a lost machine is waited for and how long others may join, in seconds.
set -euo pipefail
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # as in torchrun_two_nodes.sh

endpoint=$1 machines=$2 processes=$3 config=$4
shift 4
address=()
if [[ $endpoint == localhost:* ]]; then
    address=(--local-addr=localhost)
fi

exec "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes="$machines" --nproc-per-node="$processes" --max-restarts=20 \
    --rdzv-backend=c10d --rdzv-endpoint="$endpoint" --rdzv-id="$(basename "$config" .toml)" \
    --rdzv-conf="${RDZV_CONF:-last_call_timeout=30}" \
    "${address[@]}" -m wlb.training "$config" "$@"
