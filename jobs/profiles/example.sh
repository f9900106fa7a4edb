# shellcheck shell=bash
# Machine profile: an example cluster with 8 H200 GPUs a node.  Copy it, change the names, and use
# it twice: source it before sbatch, so that SBATCH_* sets the options, and name it in
# BALLAST_PROFILE, so that the job loads the same modules.
#
#   . jobs/profiles/example.sh
#   sbatch --nodes=2 --ntasks-per-node=8 --cpus-per-task=12 jobs/train.sbatch \
#     inputs/quickstart.toml run.backend=cuda model.head_dim=64 mesh.dp=8 \
#     batching.global_tokens=32768
export SBATCH_PARTITION=gpu
export SBATCH_GPUS_PER_NODE=8
export BALLAST_PROFILE=example
export BALLAST_MPI_TYPE=pmi2
# One rank a GPU, chosen by local rank, so each rank must see all GPUs of its node.
export BALLAST_SRUN_FLAGS="--gpu-bind=none"
# NCCL between nodes; NVLink multicast is left off.
export NCCL_NVLS_ENABLE=0
if command -v module >/dev/null; then
  module load gcc/12 mpich/4.1 hdf5-mpich/1.14 cuda/13.0 nccl/2.28
fi
