"""Attention kernels of PyTorch on one GPU, the peers of `attention_bench time`: scaled-dot-product
attention over cuDNN (dense causal) and FlexAttention
(5 % of 128K tokens in blocks of 128: random ones and the diagonal; then with the first block in
every list, a column that all queries share). 16 query and 2 key/value heads of 128 unless the name
says otherwise, bf16, medians of device events.

    python3 tests/reference/peer_attention.py [dense]
"""
import random
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

BLOCK = 128


def median_ms(work, repeats=7):
    for _ in range(2):
        work()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[repeats // 2]


def time_forward_and_backward(name, tokens, pairs, attention, q_heads=16, kv_heads=2, dim=128):
    q, k, v = (
        torch.randn(1, heads, tokens, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (q_heads, kv_heads, kv_heads)
    )
    d_out = torch.randn_like(q)
    forward = median_ms(lambda: attention(q, k, v))
    out = attention(q, k, v)

    def backward():
        q.grad = k.grad = v.grad = None
        out.backward(d_out, retain_graph=True)

    back = median_ms(backward)
    flops = 4 * dim * q_heads * pairs
    print(
        (
            f"{name:22} fwd {forward:9.3f} ms {flops / forward / 1e9:7.1f} TF/s | bwd"
            f" {back:9.3f} ms {2.5 * flops / back / 1e9:7.1f} TF/s"
        ),
        flush=True,
    )


def causal(batch, head, query, key):
    return query >= key


def sparse_blocks(tokens, kept, first):
    """Random whole blocks of keys for every block of queries, and the diagonal under the causal
    mask: `kept` of the visible pairs; with `first`, block 0 for all."""
    blocks, rng = tokens // BLOCK, random.Random(1)
    counts, lists = torch.zeros(1, 1, blocks, dtype=torch.int32), torch.zeros(
        1, 1, blocks, blocks, dtype=torch.int32
    )
    for row in range(blocks):
        chosen = (
            sorted({*([0] if first else []), *rng.sample(range(row), int(kept * row))})
            if row
            else []
        )
        counts[0, 0, row] = len(chosen)
        lists[0, 0, row, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    ones, diagonal = torch.ones(1, 1, blocks, dtype=torch.int32), torch.zeros(
        1, 1, blocks, blocks, dtype=torch.int32
    )
    diagonal[0, 0, :, 0] = torch.arange(blocks)
    mask = BlockMask.from_kv_blocks(
        ones.cuda(), diagonal.cuda(), counts.cuda(), lists.cuda(), BLOCK_SIZE=BLOCK, mask_mod=causal
    )
    return mask, int(counts.sum()) * BLOCK * BLOCK + blocks * BLOCK * (BLOCK + 1) // 2


def main():
    torch.manual_seed(0)
    shapes = [(tokens, 16, 2, 128) for tokens in (8192, 32768, 131072)] + [(32768, 14, 2, 64)]
    shapes += [(tokens, 16, 2, dim) for dim in (96, 256) for tokens in (8192, 32768)]
    for tokens, q_heads, kv_heads, dim in shapes:
        name = f"cudnn {tokens // 1024}K {q_heads}/{kv_heads} D{dim}"
        try:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                time_forward_and_backward(
                    name,
                    tokens,
                    tokens * (tokens + 1) / 2,
                    lambda q, k, v: scaled_dot_product_attention(
                        q, k, v, is_causal=True, enable_gqa=True
                    ),
                    q_heads,
                    kv_heads,
                    dim,
                )
        except RuntimeError as error:
            print(f"{name}: {str(error).splitlines()[0]}", flush=True)
    if sys.argv[1:] == ["dense"]:
        return
    flex = torch.compile(flex_attention, dynamic=False)
    for name, first in (("flex 5%", False), ("flex 5%, sink", True)):
        mask, pairs = sparse_blocks(131072, 0.05, first)
        time_forward_and_backward(
            name,
            131072,
            pairs,
            lambda q, k, v, mask=mask: flex(q, k, v, block_mask=mask, enable_gqa=True),
        )


main()
