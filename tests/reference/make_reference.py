#!/usr/bin/env python3
"""Makes the small reference models of tests/reference with Hugging Face Transformers: weights,
logits, loss and all gradients.

    python3 -m venv /tmp/reference && /tmp/reference/bin/pip install torch transformers
            safetensors numpy
    /tmp/reference/bin/python tests/reference/make_reference.py [NAME ...]

The tests read what it leaves and need neither torch nor transformers.  Each folder is a Hugging
Face model (fp32 weights whose values bf16 holds,
in one file or several) with reference.safetensors beside it, all fp32:
    tokens.S                token ids of sample S
    log_probabilities.S     [tokens, vocabulary] log softmax of the logits
    loss                    mean over all next-token targets of all samples
    gradient.NAME           d loss / d NAME
Everything is computed in fp32 with eager attention, each sample in a forward pass of its own.
"""
import argparse
import json
import os
import shutil

import torch
import transformers
from safetensors.torch import save_file

HERE = os.path.dirname(os.path.abspath(__file__))
LENGTHS = [61, 96, 17]
COMMON = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    rms_norm_eps=1e-6,
    attention_dropout=0.0,
    attn_implementation="eager",
)

MODELS = {
    # name: (configuration, largest file)
    "qwen2": (
        transformers.Qwen2Config(
            **COMMON,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        ),
        "1GB",
    ),
    "qwen2_yarn": (
        transformers.Qwen2Config(
            **COMMON,
            head_dim=16,
            tie_word_embeddings=False,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
        "1GB",
    ),
    # head_dim apart from hidden / heads, and several files
    "llama3": (
        transformers.LlamaConfig(
            **COMMON,
            head_dim=16,
            tie_word_embeddings=False,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        ),
        "60KB",
    ),
    # QK-norm, head_dim apart from hidden / heads
    "qwen3": (
        transformers.Qwen3Config(
            **COMMON,
            head_dim=16,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        ),
        "1GB",
    ),
    "mistral": (
        transformers.MistralConfig(
            **COMMON,
            sliding_window=None,
            tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        ),
        "1GB",
    ),
}


def make(out_folder, name, config, shard):
    folder = os.path.join(out_folder, name)
    shutil.rmtree(folder, ignore_errors=True)
    torch.manual_seed(len(name))
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter_name, p in model.named_parameters():
            # Attention far from uniform, norms and biases away from 1 and 0.
            p.copy_(
                torch.randn_like(p) * (0.15 if p.dim() > 1 else 0.1)
                + (1.0 if "norm" in parameter_name else 0.0)
            )
            p.copy_(p.bfloat16().float())
    model.save_pretrained(folder, max_shard_size=shard)
    for extra in ("generation_config.json",):
        if os.path.exists(os.path.join(folder, extra)):
            os.remove(os.path.join(folder, extra))
    out, losses, targets = {}, [], 0
    for s, length in enumerate(LENGTHS):
        tokens = torch.randint(0, config.vocab_size, (length,))
        log_probabilities = torch.log_softmax(model(tokens[None]).logits[0].float(), -1)
        losses.append(-log_probabilities[:-1].gather(1, tokens[1:, None]).sum())
        targets += length - 1
        out[f"tokens.{s}"] = tokens.float()
        out[f"log_probabilities.{s}"] = log_probabilities.detach()
    loss = sum(losses) / targets
    loss.backward()
    out["loss"] = loss.detach().reshape(1)
    for parameter_name, p in model.named_parameters():
        out["gradient." + parameter_name] = p.grad
    save_file(
        {k: v.contiguous() for k, v in out.items()}, os.path.join(folder, "reference.safetensors")
    )
    with open(os.path.join(folder, "made_by.json"), "w") as f:
        json.dump(
            {
                "script": "tests/reference/make_reference.py",
                "torch": torch.__version__.split("+")[0],
                "transformers": transformers.__version__,
            },
            f,
        )
        f.write("\n")
    print(name, "loss", loss.item(), "parameters", sum(p.numel() for p in model.parameters()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=list(MODELS), help="models; all without")
    parser.add_argument("--out", default=HERE, help="folder for them")
    arguments = parser.parse_args()
    for model_name in arguments.names:
        make(arguments.out, model_name, *MODELS[model_name])
