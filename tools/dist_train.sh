#!/usr/bin/env bash
# Train on several GPUs of one machine, or with several processes on a CPU:
#   tools/dist_train.sh CONFIG PROCESSES [arguments of tools/train.py]
# Several machines: set NNODES, NODE_RANK, MASTER_ADDR and PORT on each.
set -euo pipefail
if [ "$#" -lt 2 ]; then
  sed -n '2,4p' "$0" | cut -c3- >&2
  exit 2
fi
config=$1
processes=$2
root=$(cd "$(dirname "$0")/.." && pwd)
exec "${PYTHON:-python}" -m torch.distributed.run \
  --nnodes="${NNODES:-1}" --node_rank="${NODE_RANK:-0}" \
  --master_addr="${MASTER_ADDR:-127.0.0.1}" --master_port="${PORT:-29500}" \
  --nproc_per_node="$processes" "$root/tools/train.py" "$config" --launcher pytorch "${@:3}"
