#!/usr/bin/env python3
"""Loss and all gradients of random Qwen2, Qwen3 and Llama models: Ballast beside Hugging Face
Transformers, on a GPU.

    python3 tests/reference/compare_gpu.py build/bin/ballast  one GPU
    python3 tests/reference/compare_gpu.py build/bin/ballast --launch "mpiexec -n 4" --set
            mesh.dp=2 mesh.cp_inner=2
    python3 tests/reference/compare_gpu.py build/bin/ballast --backend host --device cpu
            --shape tiny  without one

Needs torch, transformers, safetensors and numpy.  For each shape it saves a random model in bf16,
lets `ballast train` take one step over three packed
samples with run.dump_gradients, and computes the same loss, sample by sample, with Transformers in
fp32 (the reference) and in bf16 (the measure of what
bf16 costs).  A tensor passes when its relative L2 distance to the fp32 gradient is at most FACTOR
times that of Transformers' bf16 gradient, or FLOOR.
Prints one line a shape and the worst tensors; ends with status 1 when anything fails.
"""
import argparse
import json
import os
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile

import numpy
import torch
import transformers
from safetensors.torch import load_file

FACTOR, FLOOR = 1.5, 2e-3
COMMON = dict(attention_dropout=0.0, rms_norm_eps=1e-6, max_position_embeddings=32768)
PLAIN = {"rope_type": "default", "rope_theta": 1e6}
SHAPES = {
    # name: (configuration, sample lengths)
    "qwen2-d64": (
        transformers.Qwen2Config(
            **COMMON,
            vocab_size=16384,
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=4,
            num_attention_heads=14,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            rope_parameters=PLAIN,
        ),
        [4096, 1500, 777],
    ),
    "qwen2-d128": (
        transformers.Qwen2Config(
            **COMMON,
            vocab_size=16384,
            hidden_size=1024,
            intermediate_size=2816,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=2,
            tie_word_embeddings=False,
            rope_parameters=PLAIN,
        ),
        [4096, 1500, 777],
    ),
    "llama-d128": (
        transformers.LlamaConfig(
            **COMMON,
            vocab_size=16384,
            hidden_size=1024,
            intermediate_size=2816,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=128,
            tie_word_embeddings=False,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 1024,
            },
        ),
        [4096, 1500, 777],
    ),
    "qwen3-d128": (
        transformers.Qwen3Config(
            **COMMON,
            vocab_size=16384,
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=4,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            tie_word_embeddings=True,
            rope_parameters=PLAIN,
        ),
        [4096, 1500, 777],
    ),
    "tiny": (
        transformers.Qwen2Config(
            **COMMON,
            vocab_size=300,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            rope_parameters=PLAIN,
        ),
        [200, 90, 33],
    ),
}

DECK = """[run]
backend = "{backend}"
precision = "{precision}"
steps = 1
[model]
weights = "{weights}"
[data]
source = "megatron"
path = "{data}"
[batching]
micro_batch_tokens = {pack}
global_samples = {samples}
[optimizer]
learning_rate = 0.0
[trace]
enabled = false
"""


def random_model(config):
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            scale = (
                0.1
                if p.dim() == 1
                else (
                    1.5 / p.shape[1] ** 0.5
                    if "embed" not in name and "lm_head" not in name
                    else 0.05
                )
            )
            p.copy_(torch.randn_like(p) * scale + (1.0 if "norm" in name else 0.0))
    return model.bfloat16()


def write_megatron(path, samples):
    """A .bin/.idx pair of int32 tokens, one document a sample."""
    lengths = numpy.array([len(s) for s in samples], "<i4")
    with open(path + ".bin", "wb") as f:
        f.write(numpy.concatenate(samples).astype("<i4").tobytes())
    with open(path + ".idx", "wb") as f:
        f.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, len(samples), len(samples) + 1))
        f.write(
            lengths.tobytes()
            + (4 * numpy.concatenate([[0], numpy.cumsum(lengths)[:-1]])).astype("<i8").tobytes()
        )
        f.write(numpy.arange(len(samples) + 1, dtype="<i8").tobytes())


def transformers_step(folder, samples, dtype, device):
    """Mean next-token loss over all samples and its gradients, in fp32 on the host."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa"
    ).to(device)
    targets = sum(len(s) - 1 for s in samples)
    total = 0.0
    for s in samples:
        tokens = torch.tensor(s, device=device, dtype=torch.long)
        logits = model(tokens[None]).logits[0, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="sum") / targets
        loss.backward()
        total += loss.item()
    return total, {name: p.grad.float().cpu() for name, p in model.named_parameters()}


def ballast_step(arguments, folder, samples, work):
    write_megatron(os.path.join(work, "tokens"), samples)
    deck, gradients, run = (
        os.path.join(work, name) for name in ("deck.toml", "gradients.safetensors", "run")
    )
    with open(deck, "w") as f:
        f.write(
            DECK.format(
                backend=arguments.backend,
                precision="bf16" if arguments.backend == "cuda" else "fp32",
                weights=folder,
                data=os.path.join(work, "tokens"),
                pack=sum(map(len, samples)),
                samples=len(samples),
            )
        )
    shutil.rmtree(run, ignore_errors=True)
    twin = os.path.join(work, "run.json")
    command = shlex.split(arguments.launch) + [
        arguments.ballast,
        "train",
        deck,
        "-d",
        run,
        "run.dump_gradients=" + gradients,
        *arguments.set,
        "--json",
        twin,
    ]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        sys.exit(f"{shlex.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    with open(os.path.join(run, "log.txt")) as f:
        lines = f.read().splitlines()
    if arguments.backend == "cuda" and any("use the host backend" in line for line in lines):
        sys.exit("Ballast found no GPU:\n" + "\n".join(lines))
    loss = next(
        float(field[5:])
        for line in lines
        if line.startswith("step=1 ")
        for field in line.split()
        if field.startswith("loss=")
    )
    return loss, load_file(gradients)


def distance(found, reference):
    return ((found.double() - reference.double()).norm() / reference.double().norm()).item()


def compare(name, arguments, work):
    config, lengths = SHAPES[name]
    torch.manual_seed(arguments.seed)
    folder = os.path.join(work, name)
    random_model(config).save_pretrained(folder)
    rng = numpy.random.default_rng(arguments.seed)
    samples = [rng.integers(0, config.vocab_size, n) for n in lengths]
    loss, gradients = ballast_step(arguments, folder, samples, work)
    reference_loss, reference = transformers_step(folder, samples, torch.float32, arguments.device)
    bf16_loss, bf16 = transformers_step(folder, samples, torch.bfloat16, arguments.device)
    assert gradients.keys() == reference.keys(), sorted(gradients.keys() ^ reference.keys())
    rows = sorted(
        (
            (distance(gradients[k], reference[k]), distance(bf16[k], reference[k]), k)
            for k in reference
        ),
        key=lambda r: -r[0] / max(FACTOR * r[1], FLOOR),
    )
    bad = [r for r in rows if not r[0] <= max(FACTOR * r[1], FLOOR)]
    loss_limit = max(FACTOR * abs(bf16_loss - reference_loss), 1e-3 * reference_loss)
    loss_good = abs(loss - reference_loss) <= loss_limit
    print(
        f"{name}: loss {loss:.6f}, transformers fp32 {reference_loss:.6f}, bf16"
        f" {bf16_loss:.6f} ({'good' if loss_good else 'BAD'}); gradients off by at most"
        f" {max(r[0] for r in rows):.2e}, transformers bf16 by {max(r[1] for r in rows):.2e};"
        f" {len(rows) - len(bad)} of {len(rows)} tensors good"
    )
    for error, theirs, k in rows[: max(3, len(bad))]:
        print(f"    {k}: {error:.3e}, transformers bf16 {theirs:.3e}")
    return {
        "shape": name,
        "loss": loss,
        "reference_loss": reference_loss,
        "bf16_loss": bf16_loss,
        "worst_gradient": max(r[0] for r in rows),
        "worst_bf16_gradient": max(r[1] for r in rows),
        "tensors": len(rows),
        "bad_tensors": len(bad),
        "good": loss_good and not bad,
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ballast", help="the program")
    parser.add_argument("--backend", default="cuda", choices=["cuda", "host"])
    parser.add_argument("--device", default="cuda", help="where torch runs")
    parser.add_argument(
        "--shape",
        action="append",
        choices=list(SHAPES),
        help="one or several; default: all but tiny",
    )
    parser.add_argument(
        "--launch", default="", help='what goes before the program, such as "mpiexec -n 4"'
    )
    parser.add_argument(
        "--set", nargs="*", default=[], help="overrides of deck keys, such as mesh.cp_inner=4"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", help="file for the figures")
    arguments = parser.parse_args()
    arguments.ballast = os.path.abspath(arguments.ballast)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    with tempfile.TemporaryDirectory(prefix="ballast-compare-") as work:
        results = [
            compare(name, arguments, work)
            for name in arguments.shape or [n for n in SHAPES if n != "tiny"]
        ]
    if arguments.json:
        with open(arguments.json, "w") as f:
            json.dump(
                {
                    "torch": torch.__version__,
                    "transformers": transformers.__version__,
                    "factor": FACTOR,
                    "floor": FLOOR,
                    "results": results,
                },
                f,
                indent=2,
            )
    return 0 if all(r["good"] for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
