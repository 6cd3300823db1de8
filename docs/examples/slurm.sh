#!/bin/bash
# A training run on several machines under Slurm: measure, solve and train in one job.
#
#   sbatch docs/examples/slurm.sh config.yaml
#
# Slurm starts one torchrun a machine, and torchrun one rank a GPU. Ranks are numbered machine by machine, so neighbours
# in the pipeline sit on one machine, and with train.replicas or train.shards whole pipelines do where they fit.
#
#SBATCH --job-name=optpipe
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
set -euo pipefail

config=${1:?a config file is needed: sbatch $0 config.yaml}
gpus=${SLURM_GPUS_ON_NODE:-8}
read -r head < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

# One rendezvous a call: a port of this job, and the name of what runs.
on_all_ranks() {
    srun --kill-on-bad-exit=1 torchrun \
        --nnodes "$SLURM_NNODES" --nproc-per-node "$gpus" \
        --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID-$1" --rdzv-endpoint "$head:$((20000 + SLURM_JOB_ID % 10000))" \
        --no-python optpipe "$@"
}

# Checkpoints, the profile and the plan lie on a file system that all machines share.
if [ ! -e profile.json ]; then
    on_all_ranks profile "$config" -o profile.json
fi
if [ ! -e plan.json ]; then
    optpipe solve "$config" --profile profile.json -o plan.json
fi
# A job that Slurm starts again goes on from its last checkpoint.
resume=()
if compgen -G "checkpoints/step-*" > /dev/null; then
    resume=(--resume checkpoints)
fi
on_all_ranks train --schedule plan.json --config "$config" "${resume[@]}"
