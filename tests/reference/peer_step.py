"""Training step of the same shapes in Hugging Face Transformers, the peer of `ballast bench step`:
bf16, SDPA attention, fused AdamW, one GPU.

    python3 tests/reference/peer_step.py qwen2.5-0.5b 8192 [full] [compile] [lora=RANK,DROPOUT]
            `full`: gradient checkpointing of every layer; `compile`: torch.compile of every layer;
            `lora`: adapters of PEFT beside all seven projections, in bf16, all else frozen
"""
import sys
import time

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

SHAPES = {
    "qwen2.5-0.5b": dict(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "qwen2.5-3b": dict(
        hidden_size=2048,
        intermediate_size=11008,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "qwen3-4b": dict(
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    ),
}


def with_adapters(model, rank, dropout):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=int(rank),
        lora_alpha=2 * int(rank),
        lora_dropout=float(dropout),
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def main():
    name, tokens, choices = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    lora = [c.split("=")[1] for c in choices if c.startswith("lora=")]
    qwen3 = name.startswith("qwen3")
    config = (Qwen3Config if qwen3 else Qwen2Config)(
        vocab_size=151936,
        max_position_embeddings=max(32768, tokens),
        rope_theta=1e6,
        **SHAPES[name],
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    model = (Qwen3ForCausalLM if qwen3 else Qwen2ForCausalLM)(config).to(
        device="cuda", dtype=torch.bfloat16
    )
    if "full" in choices:
        model.gradient_checkpointing_enable()
    layers = model.model.layers
    if lora:
        model = with_adapters(model, *lora[0].split(","))
    if "compile" in choices:
        for layer in layers:
            layer.compile()
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    ids = torch.randint(0, 151936, (1, tokens), device="cuda")
    times = []
    for i in range(8):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        if i >= 3:
            times.append(time.perf_counter() - begin)
    median = sorted(times)[len(times) // 2]
    print(
        (
            f"transformers {name} {tokens} tokens{''.join(f' {c}' for c in choices)}:"
            f" {median:.4f} s, {tokens / median:.0f} tokens/s, peak"
            f" {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
        ),
        flush=True,
    )


main()
