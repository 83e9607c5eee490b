#!/bin/bash -l
#SBATCH --job-name=muster-llama-20260822-101500-1a2b
#SBATCH --comment='muster run llama-20260822-101500-1a2b'
#SBATCH --chdir=/home/me/.muster/runs/llama-20260822-101500-1a2b
#SBATCH --output=logs/slurm-%j.log
#SBATCH --open-mode=append
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --gres=gpu:8
#SBATCH --time=2-00:00:00
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --signal=B:USR1@180
#SBATCH --constraint='a3mega&ib4'
#SBATCH --exclude='node[3,7]'
#SBATCH --reservation=gpus-in-august

module load cuda/12.8
module load nccl/2.27
export MUSTER_RUN_ID=llama-20260822-101500-1a2b
export MUSTER_RUN_DIR=/home/me/.muster/runs/llama-20260822-101500-1a2b
export TMPDIR=/scratch
export MUSTER_MEMORY_DIR=/scratch
export MUSTER_TERM=ignored
export NCCL_DEBUG=WARN
exec /home/me/muster/.venv/bin/python -P -m muster.backends.slurm.batch --run-dir /home/me/.muster/runs/llama-20260822-101500-1a2b --run-id llama-20260822-101500-1a2b
