"""Ring attention of PyTorch's context_parallel, the peer of `bench ring`: causal
scaled-dot-product attention, forward and backward, over all ranks of the launch, beside the whole
on each of them.  Heads are not shared, head dim 128, bf16; a round lasts until the slowest rank is
done.

    torchrun --nproc-per-node 4 tests/reference/peer_ring.py [TOKENS [HEADS [cudnn|flash]]]
"""
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
HEAD_DIM, WARMUP, ROUNDS = 128, 2, 7


def median_ms(work):
    """Of rounds that begin together and end with the last rank."""
    times = []
    for i in range(WARMUP + ROUNDS):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        seconds = torch.tensor([time.perf_counter() - begin], device="cuda")
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        if i >= WARMUP:
            times.append(1e3 * seconds.item())
    return sorted(times)[ROUNDS // 2]


def both_passes(q, k, v, d_out):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))

    def work():
        # By the module's name, in whose place context_parallel puts its own.
        F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(d_out)
        q.grad = k.grad = v.grad = None

    return median_ms(work)


def main():
    given = sys.argv[1:] + ["131072", "16", "cudnn"][len(sys.argv) - 1 :]
    tokens, heads, backend = int(given[0]), int(given[1]), BACKENDS[given[2]]
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    ranks = dist.get_world_size()
    torch.manual_seed(0)  # buffers are whole, and alike on every rank, until they are sharded
    buffers = [
        torch.randn(1, heads, tokens, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        for _ in range(4)
    ]
    with sdpa_kernel(backend):
        whole = both_passes(*buffers)
        mesh = init_device_mesh("cuda", (ranks,))
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * len(buffers)):
            ring = both_passes(*buffers)
    if dist.get_rank() == 0:
        print(
            (
                f"context_parallel {given[2]} {tokens} tokens {heads} heads {ranks} ranks: ring"
                f" {ring:.2f} ms, whole {whole:.2f} ms, efficiency {whole / ranks / ring:.3f}"
            ),
            flush=True,
        )
    dist.destroy_process_group()


main()
