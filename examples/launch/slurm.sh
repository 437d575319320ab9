#!/bin/bash
# Slurm: four hosts of eight GPUs, a task a GPU. A node that fails, and the end of the job's time, put it into the queue
# again, where it goes on from the newest checkpoint.
#
#   sbatch slurm.sh
#
# Change: hosts and GPUs, the environment, folder, model and data. The folder is on a file system that all nodes see.
#SBATCH --job-name=tune
#SBATCH --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=12
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# Two minutes before the time is up SIGTERM goes to all tasks, which save, and end, after the same step.
#SBATCH --signal=TERM@120

source /shared/venv/bin/activate
out=/shared/runs/mine
resume="--model /shared/model --data /shared/text --batch-size 32"
[ -f "$out/config.toml" ] && resume=--resume

# JAX reads the addresses from Slurm. One task that dies ends the others, which could not go on without it.
srun --kill-on-bad-exit=1 lowtide finetune --out "$out" $resume --distributed fsdp=8,data=-1
status=$?

# Slurm itself puts the job back when a node fails. The end of its time does it any number of times, other failures ten
# times in all, a mistake in the command (2) never. SIGTERM (143) may come up to a minute early, and tasks that are ended
# because another one has died have that status, too: those count as failures.
failures="$out.failures.$SLURM_JOB_ID" # beside the folder: a line for each
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
