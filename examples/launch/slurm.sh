#!/bin/bash
# Slurm: four hosts of eight GPUs, one task per GPU. When a node fails or the job's time ends, the job returns to the
# queue, and the run continues from the newest checkpoint.
#
#   sbatch slurm.sh
#
# Change: hosts and GPUs, the environment, the folder, the model and the data. The folder has to be on a file system
# that all nodes share.
#SBATCH --job-name=tune
#SBATCH --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=12
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# Two minutes before the time ends, Slurm sends SIGTERM to all tasks. They save and end at the same step.
#SBATCH --signal=TERM@120

source /shared/venv/bin/activate
out=/shared/runs/mine
resume="--model /shared/model --data /shared/text --batch-size 32"
[ -f "$out/config.toml" ] && resume=--resume

# JAX reads the addresses from Slurm. If a task dies, srun ends the others, which cannot continue without it.
srun --kill-on-bad-exit=1 lowtide finetune --out "$out" $resume --distributed fsdp=8,data=-1
status=$?

# Slurm itself requeues the job when a node fails. This script requeues it each time its time ends, after other failures
# up to ten times in total, and never after a mistake in the command (status 2). SIGTERM (status 143) may arrive up to a
# minute early. Tasks that are ended because another task died have this status, too, and count as failures.
failures="$out.failures.$SLURM_JOB_ID" # next to the folder: one line per failure
if [ "$status" -eq 143 ] && [ "$(date +%s)" -ge $((${SLURM_JOB_END_TIME:-0} - 180)) ]; then
    scontrol requeue "$SLURM_JOB_ID"
elif [ "$status" -eq 2 ]; then
    echo "not put into the queue again: status 2, a mistake in the command" >&2
elif [ "$status" -ne 0 ]; then
    mkdir -p "${out%/*}"
    echo "$(date) status $status" >>"$failures"
    if [ "$(wc -l <"$failures")" -le 10 ]; then
        scontrol requeue "$SLURM_JOB_ID"
    else
        echo "not put into the queue again: more than ten failures, see $failures" >&2
    fi
fi
exit "$status"
