"""DPO and SFT beside TRL's trainers on the same batches: loss within 1e-5, gradients within 1e-4
(relative, fp32). Against stored results, and live where BALLAST_TRL_PYTHON names a Python that has
the packages (tests/reference/make_trl.py says which)."""
import json
import os
import subprocess
import sys
import unittest

import h5py
import numpy as np

from runs import RunCase
from test_huggingface import numbers, tensors

REFERENCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "reference")
sys.path.insert(0, REFERENCE)
import make_trl  # noqa: E402

DECK = """[run]
steps = {steps}
[mesh]
dp = {dp}
cp_inner = {cp}
[model]
weights = "{weights}"
[data]
source = "hdf5"
path = "{data}"
[batching]
micro_batch_tokens = 128
global_samples = 6
[optimizer]
learning_rate = 0.0
weight_decay = 0.0
[checkpoint]
every_steps = 1
"""
DPO = f"""[loss]
kind = "dpo"
[dpo]
beta = {make_trl.BETA}
reference = "{{reference}}"
"""


class Trl(RunCase):
    def setUp(self):
        super().setUp()
        files = [os.path.join(REFERENCE, "trl.safetensors")]
        if os.environ.get("BALLAST_TRL_PYTHON"):
            files.append(self.out("live.safetensors"))
            subprocess.run(
                [os.environ["BALLAST_TRL_PYTHON"], make_trl.__file__, files[-1]], check=True
            )
        self.results = [tensors(file) for file in files]
        self.policy = os.path.join(REFERENCE, "qwen2")

    def token_file(self, results, method):
        """The trainer's batch; of DPO each chosen answer is followed by its rejected one."""
        ids = numbers(results[f"{method}.input_ids"]).astype("<i4")
        shape = results[f"{method}.input_ids"][1]
        ids, mask = (
            ids.reshape(shape),
            numbers(results[f"{method}.completion_mask"]).astype("u1").reshape(shape),
        )
        lengths = numbers(results[f"{method}.lengths"]).astype(int)
        order = range(len(lengths))
        if method == "dpo":
            half = len(lengths) // 2
            order = [row for pair in range(half) for row in (pair, half + pair)]
        path = self.out(method + ".h5")
        with h5py.File(path, "w") as file:
            file["tokens"] = np.concatenate([ids[i, : lengths[i]] for i in order])
            file["loss_mask"] = np.concatenate([mask[i, : lengths[i]] for i in order])
            file["offsets"] = np.cumsum([0] + [lengths[i] for i in order]).astype("<i8")
            if method == "dpo":
                file.attrs["pairs"] = np.int64(1)
        return path

    def shrunk_model(self):
        """A folder with the reference's weights."""
        folder = self.out("reference")
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(self.policy, "config.json")) as file:
            config = file.read()
        with open(os.path.join(folder, "config.json"), "w") as file:
            file.write(config)
        with open(os.path.join(self.policy, "model.safetensors"), "rb") as file:
            raw = bytearray(file.read())
        size = int.from_bytes(raw[:8], "little")
        for name, tensor in json.loads(raw[8 : 8 + size]).items():
            if name == "__metadata__":
                continue
            self.assertEqual(tensor["dtype"], "F32")
            begin, end = (8 + size + at for at in tensor["data_offsets"])
            values = np.frombuffer(bytes(raw[begin:end]), "<f4")
            raw[begin:end] = make_trl.shrunk(name, values).astype("<f4").tobytes()
        with open(os.path.join(folder, "model.safetensors"), "wb") as file:
            file.write(raw)
        return folder

    def compare(self, results, method, run, step, gradients):
        loss = float(self.losses(run)[step])
        expected = float(numbers(results[f"{method}.loss"])[0])
        self.assertLess(abs(loss - expected), 1e-5 * expected, f"{method}: {loss}, TRL {expected}")
        found = tensors(gradients)
        of_trl = {k for k in results if k.startswith(f"{method}.gradient.")}
        self.assertEqual({f"{method}.gradient.{name}" for name in found}, of_trl)
        for name, tensor in found.items():
            theirs = numbers(results[f"{method}.gradient.{name}"])
            error = np.linalg.norm(numbers(tensor) - theirs)
            self.assertLess(error, 1e-4 * np.linalg.norm(theirs), f"{method} {name}")

    def test_supervised_fine_tuning(self):
        for number, results in enumerate(self.results):
            data = self.token_file(results, "sft")
            for ranks, dp, cp in ((1, 1, 1), (4, 2, 2)):
                run = self.out(f"sft-{number}-{ranks}")
                deck = self.deck(
                    "sft.toml", DECK, steps=1, dp=dp, cp=cp, weights=self.policy, data=data
                )
                gradients = run + ".safetensors"
                self.run_ballast(ranks, "train", deck, "-d", run, "run.dump_gradients=" + gradients)
                self.compare(results, "sft", run, 1, gradients)

    def test_direct_preference_optimization(self):
        """A run that begins with the reference's weights goes on from a checkpoint with the
        policy's."""
        base = self.shrunk_model()
        for number, results in enumerate(self.results):
            data = self.token_file(results, "dpo")
            reference = self.out(f"reference-{number}.h5")
            values = {"data": data, "reference": reference, "dp": 1, "cp": 1}
            text = DECK + DPO
            deck = self.deck("dpo.toml", text, steps=1, weights=base, **values)
            self.run_ballast(1, "reference", deck)
            with h5py.File(reference) as file:
                stored = np.concatenate([file["chosen"][:], file["rejected"][:]])
            theirs = numbers(results["dpo.reference"])
            np.testing.assert_allclose(stored, theirs, rtol=1e-5)
            start = self.out(f"policy-{number}")
            plain = {**values, "data": self.token_file(results, "sft")}
            deck = self.deck("policy.toml", DECK, steps=1, weights=self.policy, **plain)
            self.run_ballast(1, "train", deck, "-d", start)
            checkpoint = os.path.join(start, "checkpoints", "step_00000001.h5")
            for ranks, dp, cp in ((1, 1, 1), (4, 2, 2)):
                run = self.out(f"dpo-{number}-{ranks}")
                values.update(dp=dp, cp=cp)
                deck = self.deck("dpo.toml", text, steps=2, weights=base, **values)
                gradients = run + ".safetensors"
                self.run_ballast(
                    ranks, "train", deck, "-d", run, "-r", checkpoint, "--force-model",
                    "run.dump_gradients=" + gradients,
                )  # fmt: skip
                self.compare(results, "dpo", run, 2, gradients)
                self.rewards(results, run)

    def rewards(self, results, run):
        (row,) = [row for row in self.steps(run) if "loss" in row]
        names = ("rewards_chosen", "rewards_rejected", "rewards_margin", "rewards_accuracy")
        for name, theirs in zip(names, numbers(results["dpo.rewards"])):
            self.assertAlmostEqual(float(row[name]), float(theirs), delta=2e-5, msg=name)


if __name__ == "__main__":
    unittest.main()
