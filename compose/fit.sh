#!/bin/sh
# It does not fit, and then it does: a model of which dp is killed by the kernel, and which fsdp trains in the same memory.
#
#   make fit                                 about two minutes; WORLD_SIZE, LAB_WIDTH, LAB_DEPTH, LAB_STEPS as you like
#
# The limit is not tried out: distlab/cli/fit.py computes it from what the formulas say that both need. In dp one small container is
# enough to end the run, so only worker1 has the limit and the others are left to say what became of it; in fsdp all have it.
set -eu
cd "$(dirname "$0")/.."

if ! docker info >/dev/null 2>&1; then
    echo "refused    make fit needs a Docker engine: a limit of memory is a container's" >&2
    exit 2
fi

name=fit-$(date +%Y%m%d-%H%M%S)
export COMPOSE_FILE=docker-compose.yaml:compose/fit.yaml
export WORLD_SIZE="${WORLD_SIZE:-4}" LAB_WIDTH="${LAB_WIDTH:-512}" LAB_DEPTH="${LAB_DEPTH:-12}" LAB_STEPS="${LAB_STEPS:-5}"
export LAB_SEQ="${LAB_SEQ:-16}" LAB_BATCH="${LAB_BATCH:-4}" LAB_OPTIMIZER=adamw LAB_PROOF=0
# A container at its limit first gives up code that all containers map, and whoever runs it waits for the disk: such a silence is
# no loss. A kill is told at once, whatever this is.
export LAB_LOST_AFTER_S="${LAB_LOST_AFTER_S:-10}"

# train MODE VARIANT RUN: one run, with its exit code in $code.
train() {
    code=0
    RUN_MODE=$1 LAB_VARIANT=$2 LAB_RUN_ID=$name-$3 ./run || code=$?
}

echo "--- what both need"
limit=$(RUN_MODE=fsdp ./run fit limit)

echo "--- dp without a limit"
train dp bucketed free
[ "$code" = 0 ] || exit "$code"

echo "--- dp with one container of $limit"
LAB_MEMORY=$limit train dp bucketed dp
[ "$code" = 3 ] || { echo "dp was to break within $limit (exit code 3), and returned $code" >&2; exit 1; }

echo "--- fsdp with $limit for each container"
LAB_MEMORY=$limit OTHERS_MEMORY=$limit train fsdp zero3 fsdp
[ "$code" = 0 ] || { echo "fsdp was to fit into $limit (exit code 0), and returned $code" >&2; exit 1; }

./run fit judge "runs/$name-free" "runs/$name-dp" "runs/$name-fsdp"
