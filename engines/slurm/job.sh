#!/bin/sh
# distlab under Slurm: one rank per task; if a node or a rank dies, the job continues from its last checkpoint.
#
#   sbatch engines/slurm/job.sh
#   RUN_MODE=fsdp LAB_CHECKPOINT_EVERY=100 sbatch --nodes=2 --ntasks-per-node=4 engines/slurm/job.sh
#
# The lab's folder, with its .venv (./install) and runs/, must be visible on all nodes. Settings come from the shell's variables,
# the rank numbers from Slurm. Slurm itself requeues a job whose node has failed. It does not if only a rank was lost (srun ends
# with 3) or killed (137): then this script requeues the job, at most RESTARTS times.
#SBATCH --job-name=distlab
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=distlab-%j.log
set -eu
cd "${SLURM_SUBMIT_DIR:?start it by sbatch}"
export LAB_RUN_ID="${LAB_RUN_ID:-slurm-$SLURM_JOB_ID}" LAB_RESUME="${LAB_RESUME:-auto}"
PATH="$PWD/.venv/bin:$PATH"

code=0
srun --label python -m workers || code=$?
case $code in
3 | 137)
    if [ "${SLURM_RESTART_COUNT:-0}" -lt "${RESTARTS:-3}" ]; then
        echo "distlab: exit code $code, so the job goes back into the queue (${SLURM_RESTART_COUNT:-0} of ${RESTARTS:-3} restarts were used)"
        scontrol requeue "$SLURM_JOB_ID"
    fi
    ;;
esac
exit "$code"
