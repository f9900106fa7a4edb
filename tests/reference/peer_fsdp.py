"""Training step of Llama-3.1-8B's shape under PyTorch's FSDP2, the peer of `bench step` over
data-parallel ranks: fp32 parameters and moments in shards, bf16 computation, fp32 reduction, fused
AdamW, every layer through torch.compile, attention by cuDNN, the loss in chunks that hold no whole
logits.  Liger's kernels are used for the loss where they are installed.

    torchrun --nproc-per-node 4 tests/reference/peer_fsdp.py [llama3.1-8b|tiny] [TOKENS] [HOW...]

HOW, several in turn: zero2 (parameters stay gathered from forward to backward), zero3 (gathered
anew), zero3-recompute (activations of every layer computed again); with -bf16 behind it each
reduces gradients in bf16."""
import gc
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaModel, LlamaRotaryEmbedding

try:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
except ImportError:
    LigerFusedLinearCrossEntropyLoss = None

SHAPES = {
    "llama3.1-8b": dict(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
    ),
    "tiny": dict(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
    ),
}
CHUNKS, WARMUP, STEPS = 8, 4, 9
ATTENTION = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


class Head(torch.nn.Module):
    """Head and mean loss of next tokens, by chunks of tokens."""

    def __init__(self, config):
        super().__init__()
        self.lm = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.chunk = torch.compile(self.chunk_loss)
        self.fused = LigerFusedLinearCrossEntropyLoss and LigerFusedLinearCrossEntropyLoss()

    def chunk_loss(self, hidden, labels):
        return F.cross_entropy(self.lm(hidden).float(), labels, reduction="sum")

    def forward(self, hidden, labels):
        if self.fused:
            return self.fused(self.lm.weight, hidden, labels)
        total = 0
        for h, l in zip(hidden.chunk(CHUNKS), labels.chunk(CHUNKS)):
            total = total + checkpoint(self.chunk, h, l, use_reentrant=False)
        return total / labels.numel()


class Model(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.body, self.head = LlamaModel(config), Head(config)

    def forward(self, ids):
        hidden = self.body(input_ids=ids, use_cache=False).last_hidden_state
        return self.head(hidden[0, :-1], ids[0, 1:])


def sharded(config, how, device):
    with torch.device("meta"):
        model = Model(config)
    if "recompute" in how:
        model.body.gradient_checkpointing_enable()
    model.train()
    kwargs = dict(
        mp_policy=MixedPrecisionPolicy(
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.bfloat16 if how.endswith("-bf16") else torch.float32,
        ),
        reshard_after_forward=not how.startswith("zero2"),
    )
    for layer in model.body.layers:
        layer.compile()
        fully_shard(layer, **kwargs)
    fully_shard(model.head, **kwargs)
    fully_shard(model, **kwargs)
    model.to_empty(device=device)
    for name, p in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.ones_(p)
        else:
            torch.nn.init.normal_(p, std=0.02)
    model.body.rotary_emb = LlamaRotaryEmbedding(config).to(device)
    return model


def measure(config, tokens, how, device):
    model = sharded(config, how, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    cuda = device.type == "cuda"
    times = []
    for step in range(WARMUP + STEPS):
        ids = torch.randint(0, config.vocab_size, (1, tokens), device=device)
        if cuda:
            torch.cuda.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        with sdpa_kernel(ATTENTION, set_priority=True):
            loss = model(ids)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if cuda:
            torch.cuda.synchronize()
        dist.barrier()
        if step >= WARMUP:
            times.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    used = torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0] if cuda else 0
    median = sorted(times)[len(times) // 2]
    if dist.get_rank() == 0:
        liger = "Liger's loss" if model.head.fused else "no Liger"
        print(
            (
                f"fsdp2 {how} {tokens} tokens a GPU, {liger}: {median:.4f} s,"
                f" {tokens / median:.0f} tokens/s/GPU, loss {loss.item():.3f}, tensors"
                f" {peak / 2**30:.1f} GiB, card {used / 2**30:.1f} GiB"
            ),
            flush=True,
        )


def main():
    name = sys.argv[1] if len(sys.argv) > 1 else "llama3.1-8b"
    tokens = int(sys.argv[2]) if len(sys.argv) > 2 else 8192
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(dist.get_rank())
    config = LlamaConfig(max_position_embeddings=131072, rope_theta=5e5, **SHAPES[name])
    config._attn_implementation = "sdpa"
    for how in sys.argv[3:] or ["zero2", "zero3", "zero3-recompute"]:
        try:
            measure(config, tokens, how, device)
        except torch.OutOfMemoryError:
            print(f"fsdp2 {how} {tokens} tokens a GPU: out of memory", flush=True)
        gc.collect()
        torch._dynamo.reset()
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    dist.destroy_process_group()


main()
