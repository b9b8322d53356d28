#!/usr/bin/env bash
# One node of a run on several nodes: it trains, or serves the model if it is one of the last SERVERS nodes.
#
#   NODE_RANK=0 NODES="10.0.0.1 10.0.0.2" GPUS=8 bash scripts/run_node.sh rollout=colocated experiment=math_7b
#
# Arguments are settings of scripts/train.py, the same on every node. The launch files in configs/slurm,
# configs/kubernetes, configs/skypilot and configs/dstack set the variables (docs/launching.md):
#
#   NODE_RANK     0, 1, ...
#   NODES         addresses or host names of all nodes in the order of their ranks, separated by white space
#   GPUS          GPUs of each node
#   SERVERS       number of nodes that serve, the last ones; default 0: the trainer starts its own engines
#   GRACE_S       time between SIGTERM and SIGKILL, which the launcher of the ranks uses up [s]; default 30
#   PORT          port of the ranks' rendezvous; default 29500
#   VENV          environment of `make install`; default .venv. Without one, the programs that PATH names are used.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH=${VENV:-.venv}/bin:$PATH

for name in NODE_RANK NODES GPUS; do
    [[ -n ${!name:-} ]] || { echo "run_node.sh: $name is not set; the head of scripts/run_node.sh explains it" >&2; exit 2; }
done
read -r -d '' -a nodes <<<"$NODES" || true # status 1 at the end of the text
server_port=8000
trainers=$((${#nodes[@]} - ${SERVERS:-0}))
if ((trainers < 1 || NODE_RANK >= ${#nodes[@]})); then
    echo "run_node.sh: found ${#nodes[@]} nodes in NODES, NODE_RANK=$NODE_RANK and SERVERS=${SERVERS:-0}; at least one" \
        "node must train, and ranks count from 0" >&2
    exit 2
fi

# `exec`: signals reach the program itself, not a shell that would keep them.
if ((NODE_RANK >= trainers)); then
    exec python scripts/serve_engine.py "server.host=${nodes[NODE_RANK]}" "server.port=$server_port" \
        "server.vllm_args=[--tensor-parallel-size,$GPUS]" "$@"
fi
engines=()
if ((trainers < ${#nodes[@]})); then
    urls=("${nodes[@]:trainers}")
    urls=("${urls[@]/#/http://}")
    urls=("${urls[@]/%/:$server_port}")
    engines=(rollout=server "rollout.urls=[$(IFS=, && echo "${urls[*]}")]")
fi
# The launcher passes SIGTERM on to its ranks, and kills them after this time: a little before it is killed itself.
grace=${GRACE_S:-30}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=$((grace > 60 ? grace - 30 : grace))
exec accelerate launch --config_file configs/accelerate/multi_node.yaml \
    --main_process_ip "${nodes[0]}" --main_process_port "${PORT:-29500}" --machine_rank "$NODE_RANK" \
    --num_machines "$trainers" --num_processes "$((trainers * GPUS))" scripts/train.py "${engines[@]}" "$@"
