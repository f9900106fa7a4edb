#!/usr/bin/env python3
"""Loss and gradients of TRL's DPO and SFT trainers for the model of tests/reference/qwen2, stored
in tests/reference/trl.safetensors, which tests/app/test_trl.py compares Ballast with.

    python3 -m venv /tmp/trl && /tmp/trl/bin/pip install trl==1.16.0 torch==2.15.0 \\
            transformers==5.23.0
    /tmp/trl/bin/python tests/reference/make_trl.py [FILE]

TRL's own trainers and collators make the batches and compute; every forward pass is in fp32 on the
host.  The policy of DPO is the stored model, its reference the same model with all projections
multiplied by SHRINK.  In FILE, all fp32 (ids and masks too):
    METHOD.input_ids, METHOD.completion_mask    [sequences, tokens], right-padded; of DPO first all
                                                chosen answers, then all rejected ones
    METHOD.lengths                              [sequences] without padding
    METHOD.loss, METHOD.gradient.NAME
    dpo.reference                               [sequences] log probabilities of the reference
    dpo.rewards                                 chosen, rejected, margin, accuracy
"""
import json
import os
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
MODEL = os.path.join(HERE, "qwen2")
FILE = os.path.join(HERE, "trl.safetensors")
BETA, SHRINK, PAIRS, SEED = 0.3, 0.97, 6, 20261123


def shrunk(name, values):
    """The reference's values of a parameter, in the arithmetic of their own precision."""
    return values * values.dtype.type(SHRINK) if name.endswith("proj.weight") else values


def pairs(rng, vocabulary):
    draw = lambda low, high: rng.integers(2, vocabulary, rng.integers(low, high)).tolist()
    return [
        {"prompt_ids": draw(2, 20), "chosen_ids": draw(1, 26), "rejected_ids": draw(1, 26)}
        for _ in range(PAIRS)
    ]


def tokenizer(vocabulary):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocabulary)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")


def text(ids):
    return " ".join(f"w{i}" for i in ids)


def arguments(folder):
    return dict(
        output_dir=folder,
        per_device_train_batch_size=2 * PAIRS,
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        report_to=[],
        max_length=None,
    )


def batch_of(trainer):
    """The one batch of the trainer's data, in the order of the data."""
    rows = [trainer.train_dataset[i] for i in range(len(trainer.train_dataset))]
    return trainer.data_collator(rows)


def measured(trainer, batch, method):
    """Loss and gradients of a batch by the trainer's own compute_loss."""
    trainer.model.train()
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, dict(batch))
    loss.backward()
    found = {f"{method}.loss": loss.detach().reshape(1)}
    for name, parameter in trainer.model.named_parameters():
        if parameter.grad is not None:
            found[f"{method}.gradient.{name}"] = parameter.grad
    return found


def sequences(batch, mask, method):
    return {
        f"{method}.input_ids": batch["input_ids"],
        f"{method}.completion_mask": mask,
        f"{method}.lengths": batch["attention_mask"].sum(-1),
    }


def dpo(folder, rows, load, words):
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    reference = load()
    with __import__("torch").no_grad():
        for name, parameter in reference.named_parameters():
            parameter.copy_(parameter.new_tensor(shrunk(name, parameter.numpy())))
    data = [
        {
            "prompt": text(r["prompt_ids"]) + " ",
            "chosen": text(r["chosen_ids"]),
            "rejected": text(r["rejected_ids"]),
        }
        for r in rows
    ]
    trainer = DPOTrainer(
        model=load(),
        ref_model=reference,
        args=DPOConfig(**arguments(folder), beta=BETA),
        train_dataset=Dataset.from_list(data),
        processing_class=words,
    )
    batch = batch_of(trainer)
    found = sequences(batch, batch["completion_mask"], "dpo")
    logps = trainer.compute_ref_log_probs(trainer.ref_model, dict(batch))
    found["dpo.reference"] = __import__("torch").cat(list(logps)[:2])
    found.update(measured(trainer, batch, "dpo"))
    figures = trainer._metrics["train"]
    names = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
    found["dpo.rewards"] = __import__("torch").tensor([figures[name][-1] for name in names])
    return found


def sft(folder, rows, load, words):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    data = [
        {"prompt": text(r["prompt_ids"]) + " ", "completion": text(r["chosen_ids"])} for r in rows
    ]
    trainer = SFTTrainer(
        model=load(),
        args=SFTConfig(**arguments(folder), completion_only_loss=True),
        train_dataset=Dataset.from_list(data),
        processing_class=words,
    )
    batch = batch_of(trainer)
    found = sequences(batch, (batch["labels"] != -100).long(), "sft")
    found.update(measured(trainer, batch, "sft"))
    return found


def make(file):
    """Writes `file`; returns the versions that made it."""
    import datasets
    import numpy
    import torch
    import transformers
    import trl
    from safetensors.torch import save_file

    torch.manual_seed(0)
    torch.set_num_threads(1)
    load = lambda: transformers.AutoModelForCausalLM.from_pretrained(
        MODEL, dtype=torch.float32, attn_implementation="eager"
    )
    vocabulary = json.load(open(os.path.join(MODEL, "config.json")))["vocab_size"]
    rows, words = pairs(numpy.random.default_rng(SEED), vocabulary), tokenizer(vocabulary)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for method in (dpo, sft):
            found.update(method(folder, rows, load, words))
    versions = {m.__name__: m.__version__ for m in (trl, torch, transformers, datasets)}
    save_file(
        {name: value.detach().float().contiguous().clone() for name, value in found.items()},
        file,
        metadata={"made_by": json.dumps(versions)},
    )
    return versions


if __name__ == "__main__":
    print(make(sys.argv[1] if len(sys.argv) > 1 else FILE))
