#!/usr/bin/env bash
# A job on two machines: run this on both, at about the same time, with the same arguments.
#
#     examples/torchrun_two_nodes.sh HEAD:PORT PROCESSES CONFIG [--set section.key=value]...
#
# HEAD is the name of either machine, PORT free there, PROCESSES those of one machine (parallel.* must multiply to
# twice as many). To rehearse on one machine, run it in two terminals with HEAD = localhost.
#
# Ranks that are killed are started again up to three times, from the newest checkpoint. For that the machines must meet
# again (the rendezvous backend c10d) and get a new store: the one that torchrun shares with the ranks by default keeps
# the addresses of killed ranks, and after a restart two machines may each use a store of their own.
set -euo pipefail
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

endpoint=$1 processes=$2 config=$3
shift 3
address=()
if [[ $endpoint == localhost:* ]]; then
    address=(--local-addr=localhost)
fi

exec "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes=2 --nproc-per-node="$processes" --max-restarts=3 \
    --rdzv-backend=c10d --rdzv-endpoint="$endpoint" --rdzv-id="$(basename "$config" .toml)" \
    "${address[@]}" -m wlb.training "$config" "$@"
