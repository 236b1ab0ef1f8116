#!/bin/sh
# A model that is too large for dp, which the kernel kills, but that fsdp trains within the same memory.
#
#   make fit                                 about two minutes; WORLD_SIZE, LAB_WIDTH, LAB_DEPTH, LAB_STEPS are free
#
# distlab/cli/fit.py computes the limit by formula from the needs of both. In dp one small container is enough to end the run, so
# only worker1 has the limit, and the others survive to report it. In fsdp all containers have it.
set -eu
cd "$(dirname "$0")/.."

if ! docker info >/dev/null 2>&1; then
    echo "refused    make fit needs a Docker engine: only containers have a memory limit" >&2
    exit 2
fi

name=fit-$(date +%Y%m%d-%H%M%S)
export COMPOSE_FILE=docker-compose.yaml:compose/fit.yaml
export WORLD_SIZE="${WORLD_SIZE:-4}" LAB_WIDTH="${LAB_WIDTH:-512}" LAB_DEPTH="${LAB_DEPTH:-12}" LAB_STEPS="${LAB_STEPS:-5}"
export LAB_SEQ="${LAB_SEQ:-16}" LAB_BATCH="${LAB_BATCH:-4}" LAB_OPTIMIZER=adamw LAB_PROOF=0
# A container at its limit first drops code pages that all containers map, and reading them again takes time: such a silence is no
# loss. A kill is reported immediately, whatever this value is.
export LAB_LOST_AFTER_S="${LAB_LOST_AFTER_S:-10}"

# train MODE VARIANT RUN: one run, with its exit code in $code.
train() {
    code=0
    RUN_MODE=$1 LAB_VARIANT=$2 LAB_RUN_ID=$name-$3 ./run || code=$?
}

echo "--- memory that both need"
limit=$(RUN_MODE=fsdp ./run fit limit)

echo "--- dp without a limit"
train dp bucketed free
[ "$code" = 0 ] || exit "$code"

echo "--- dp with one container of $limit"
LAB_MEMORY=$limit train dp bucketed dp
[ "$code" = 3 ] || { echo "dp should break within $limit (exit code 3), but returned $code" >&2; exit 1; }

echo "--- fsdp with $limit for each container"
LAB_MEMORY=$limit OTHERS_MEMORY=$limit train fsdp zero3 fsdp
[ "$code" = 0 ] || { echo "fsdp should fit into $limit (exit code 0), but returned $code" >&2; exit 1; }

./run fit judge "runs/$name-free" "runs/$name-dp" "runs/$name-fsdp"
