"""Hugging Face folders through the whole program: fine-tuning from one on any mesh, gradients
beside Transformers', export, what is refused."""
import json
import os
import shutil
import struct
import subprocess
import unittest

import h5py
import numpy

from runs import BALLAST, RunCase

REFERENCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "reference")

FINETUNE = """[run]
steps = {steps}
[mesh]
dp = {dp}
cp_inner = {cp_inner}
[model]
weights = "{weights}"
[data]
source = "hdf5"
path = "{data}"
[batching]
micro_batch_tokens = 128
global_samples = 3
[optimizer]
learning_rate = {rate}
"""


def tensors(folder_or_file):
    """name -> (dtype, shape, bytes) of a safetensors file or of all files in a folder."""
    files = (
        [folder_or_file]
        if os.path.isfile(folder_or_file)
        else [
            os.path.join(folder_or_file, f)
            for f in sorted(os.listdir(folder_or_file))
            if f.startswith("model") and f.endswith(".safetensors")
        ]
    )
    found = {}
    for path in files:
        with open(path, "rb") as f:
            raw = f.read()
        size = struct.unpack("<Q", raw[:8])[0]
        for name, t in json.loads(raw[8 : 8 + size]).items():
            if name != "__metadata__":
                begin, end = t["data_offsets"]
                found[name] = (t["dtype"], t["shape"], raw[8 + size + begin : 8 + size + end])
    return found


def numbers(tensor):
    return numpy.frombuffer(tensor[2], "<f4").astype("f8")


class FromHuggingFace(RunCase):
    def setUp(self):
        super().setUp()
        self.reference = {
            name: tensors(os.path.join(REFERENCE, name, "reference.safetensors"))
            for name in ("qwen2", "qwen2_yarn", "llama3", "qwen3", "mistral")
        }

    def token_file(self, name):
        samples = [numbers(self.reference[name][f"tokens.{s}"]).astype("i4") for s in range(3)]
        path = self.out(name + ".h5")
        with h5py.File(path, "w") as f:
            f["tokens"] = numpy.concatenate(samples)
            f["offsets"] = numpy.cumsum([0] + [len(s) for s in samples]).astype("i8")
        return path

    def finetune(self, name, weights=None, **values):
        settings = {
            "steps": 1,
            "dp": 1,
            "cp_inner": 1,
            "weights": weights or os.path.join(REFERENCE, name),
            "data": self.token_file(name),
            "rate": 0.0,
        }
        settings.update(values)
        return self.deck(name + ".toml", FINETUNE, **settings)

    def copy_of(self, name):
        folder = self.out("copy-" + name)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(os.path.join(REFERENCE, name), folder)
        return folder

    def test_gradients_are_those_of_transformers_on_every_mesh(self):
        cases = [
            ("qwen2", 1, 1, 1, 1),
            ("qwen2", 4, 2, 2, 2),
            ("qwen2_yarn", 4, 1, 4, 0),
            ("llama3", 4, 4, 1, 1),
            ("qwen3", 1, 1, 1, 0),
            ("qwen3", 4, 2, 2, 2),
            ("mistral", 2, 1, 2, 1),
        ]
        for name, ranks, dp, cp, zero in cases:
            file, run = self.out(f"g-{name}-{ranks}.safetensors"), self.out(f"run-{name}-{ranks}")
            self.run_ballast(
                ranks,
                "train",
                self.finetune(name, dp=dp, cp_inner=cp),
                "-d",
                run,
                f"optimizer.zero={zero}",
                "run.dump_gradients=" + file,
            )
            found, reference = tensors(file), self.reference[name]
            self.assertAlmostEqual(
                float(self.losses(run)[1]), float(numbers(reference["loss"])[0]), delta=2e-6
            )
            self.assertEqual(
                {"gradient." + k for k in found},
                {k for k in reference if k.startswith("gradient.")},
            )
            for k, t in found.items():
                expected = numbers(reference["gradient." + k])
                self.assertEqual(t[:2], reference["gradient." + k][:2])
                error = numpy.linalg.norm(numbers(t) - expected) / numpy.linalg.norm(expected)
                self.assertLess(error, 1e-5, f"{name}, {k}, {ranks} ranks, ZeRO {zero}")
        # The dump in fp64 does not depend on the mesh beyond its rounding to fp32.
        dumps = []
        for ranks, dp, cp in ((1, 1, 1), (4, 2, 2)):
            file = self.out(f"wide-{ranks}.safetensors")
            self.run_ballast(
                ranks,
                "train",
                self.finetune("qwen2", dp=dp, cp_inner=cp),
                "-d",
                self.out(f"wide-{ranks}"),
                "run.precision=fp64",
                "run.dump_gradients=" + file,
            )
            dumps.append(tensors(file))
        for k in dumps[0]:
            a, b = numbers(dumps[0][k]), numbers(dumps[1][k])
            self.assertLessEqual(numpy.abs(a - b).max(), 2e-7 * numpy.abs(a).max(), k)

    def test_export_of_unchanged_weights_is_exact(self):
        for name, ranks, dp, steps, zero, precision in (
            ("llama3", 1, 1, 0, 0, "fp32"),
            ("qwen2", 4, 4, 0, 1, "fp64"),
            ("qwen2_yarn", 2, 2, 1, 2, "fp32"),
            ("qwen3", 2, 2, 1, 2, "fp32"),
            ("mistral", 1, 1, 0, 0, "fp32"),
        ):
            original = tensors(os.path.join(REFERENCE, name))
            run, wide, narrow = (
                self.out("run-" + name),
                self.out("f32-" + name),
                self.out("bf16-" + name),
            )
            self.run_ballast(
                ranks,
                "train",
                self.finetune(name, dp=dp, steps=steps),
                "-d",
                run,
                f"optimizer.zero={zero}",
                "run.precision=" + precision,
            )
            checkpoint = os.path.join(run, "checkpoints", f"step_{steps:08}.h5")
            self.run_ballast(1, "export", checkpoint, wide, "--dtype", "f32")
            self.assertEqual(tensors(wide), original)
            twin = self.out("twin.json")
            self.run_ballast(2, "export", checkpoint, narrow, "--json", twin)
            with open(twin) as f:
                self.assertEqual(json.load(f)["dtype"], "bf16")
            # From the bf16 folder and back.
            again, back = self.out("again-" + name), self.out("back-" + name)
            self.run_ballast(
                2, "train", self.finetune(name, narrow, cp_inner=2, steps=1), "-d", again
            )
            self.run_ballast(
                1, "export", os.path.join(again, "checkpoints", "step_00000001.h5"), back
            )
            self.assertEqual(tensors(back), tensors(narrow))
            for k, (dtype, shape, data) in tensors(narrow).items():
                self.assertEqual((dtype, shape), ("BF16", original[k][1]))
                widened = (numpy.frombuffer(data, "<u2").astype("u4") << 16).astype("<u4").tobytes()
                self.assertEqual(
                    widened, original[k][2], k
                )  # the references' values are bf16 values
            with open(os.path.join(back, "config.json")) as a, open(
                os.path.join(narrow, "config.json")
            ) as b, open(os.path.join(REFERENCE, name, "config.json")) as c:
                config, stated = json.load(a), json.load(c)
                self.assertEqual(config, json.load(b))
            self.assertEqual(config["architectures"], stated["architectures"])
            self.assertEqual(config["model_type"], stated["model_type"])

    def test_export_keeps_context_length_and_templates(self):
        """The length of llama3 rope does not follow from factor and original length."""
        folder, run, out = self.copy_of("llama3"), self.out("run"), self.out("out")
        path = os.path.join(folder, "config.json")
        with open(path) as file:
            config = json.load(file)
        config["max_position_embeddings"] = 1000
        with open(path, "w") as file:
            json.dump(config, file)
        template = os.path.join("additional_chat_templates", "tool_use.jinja")
        os.mkdir(os.path.join(folder, "additional_chat_templates"))
        with open(os.path.join(folder, template), "w") as file:
            file.write("{{ tools }}")
        self.run_ballast(1, "train", self.finetune("llama3", folder), "-d", run)
        checkpoint = os.path.join(run, "checkpoints", "step_00000001.h5")
        self.run_ballast(1, "export", checkpoint, out)
        with open(os.path.join(out, "config.json")) as file:
            self.assertEqual(json.load(file)["max_position_embeddings"], 1000)
        with open(os.path.join(out, template)) as file:
            self.assertEqual(file.read(), "{{ tools }}")

    def test_restart_and_export_do_without_the_folder(self):
        folder, run = self.copy_of("llama3"), self.out("run")
        self.run_ballast(
            2, "train", self.finetune("llama3", folder, dp=2, rate=0.01, steps=2), "-d", run
        )
        shutil.rmtree(folder)
        effective = os.path.join(run, "deck.toml")
        self.run_ballast(
            4, "train", effective, "mesh.cp_inner=2", "run.steps=3", "-d", run, "-r", "latest"
        )
        self.assertEqual(sorted(self.losses(run)), [1, 2, 3])
        done = self.run_ballast(
            1, "export", os.path.join(run, "checkpoints", "step_00000003.h5"), self.out("out")
        )
        self.assertRegex(
            done.stdout, "copy-llama3 is not here: .*set bos_token_id and eos_token_id"
        )
        with open(os.path.join(self.out("out"), "config.json")) as f:
            self.assertEqual(json.load(f)["rope_scaling"]["factor"], 4.0)
        done = self.run_ballast(
            1, "train", effective, "mesh.dp=1", "mesh.cp_inner=1", "-d", self.out("fresh"), status=1
        )
        self.assertIn("no such folder", done.stderr)

    def test_tokens_of_a_folder_that_holds_another_model_by_now_are_left_out(self):
        folder, run = self.copy_of("llama3"), self.out("run")
        path, tokenizer = (os.path.join(folder, n) for n in ("config.json", "tokenizer.json"))

        def state(**values):
            with open(path) as file:
                config = {**json.load(file), **values}
            with open(path, "w") as file:
                json.dump(config, file)
            return config["vocab_size"]

        def write_tokenizer(text):
            with open(tokenizer, "w") as file:
                file.write(text)

        exports = iter(range(9))

        def export():
            out = self.out(f"out{next(exports)}")
            done = self.run_ballast(1, "export", checkpoint, out)
            with open(os.path.join(out, "config.json")) as file:
                config = json.load(file)
            ids = [config[k] for k in ("bos_token_id", "eos_token_id")]
            return done.stdout, ids, os.path.exists(os.path.join(out, "tokenizer.json"))

        vocabulary = state(bos_token_id=5, eos_token_id=6)
        write_tokenizer('{"model": {"vocab": {"a": 0}}}')
        deck = self.finetune("llama3", folder)
        self.run_ballast(1, "train", deck, "-d", run)
        checkpoint = os.path.join(run, "checkpoints", "step_00000001.h5")
        printed, ids, copied = export()
        self.assertEqual((ids, copied), ([5, 6], True))
        self.assertIn("with the tokenizer of " + folder, printed)
        state(model_type="gemma")  # names the same tokens; what else it is no export reads
        self.assertEqual(export()[1:], ([5, 6], True))
        state(model_type="llama", eos_token_id=7)
        printed, ids, copied = export()
        self.assertEqual((ids, copied), ([None, None], False))
        self.assertIn("another tokenizer or special tokens than when training began", printed)
        # A run that goes on keeps what it began with.
        self.run_ballast(1, "train", deck, "-d", run, "-r", "latest", "run.steps=2")
        checkpoint = os.path.join(run, "checkpoints", "step_00000002.h5")
        self.assertEqual(export()[1:], ([None, None], False))
        state(eos_token_id=6)
        self.assertEqual(export()[1:], ([5, 6], True))
        write_tokenizer('{"model": {"vocab": {"b": 0}}}')
        self.assertEqual(export()[1:], ([None, None], False))
        state(vocab_size=vocabulary + 1)
        self.assertEqual(export()[1:], ([None, None], False))

    def test_a_checkpoint_goes_before_the_folder(self):
        run = self.out("run")
        deck = self.finetune("qwen2", rate=0.05, steps=3)
        self.run_ballast(1, "train", deck, "-d", run)
        self.run_ballast(1, "train", deck, "-d", run, "-r", "latest", "run.steps=4")
        losses = {k: float(v) for k, v in self.losses(run).items()}
        self.assertLess(losses[4], losses[1] - 0.05)  # not again the loss of the folder's weights

    def test_held_out_loss_of_a_folder(self):
        twin = self.out("twin.json")
        self.run_ballast(
            2,
            "eval",
            self.finetune("qwen2", cp_inner=2),
            "data.validation_share=0.4",
            "--json",
            twin,
        )
        with open(twin) as f:
            self.assertGreater(json.load(f)["validation_loss"], 3)

    def check(self, *arguments):
        return subprocess.run(
            [BALLAST, "check", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )

    def test_check_shows_the_shape_and_names_contradictions(self):
        deck = self.finetune("llama3")
        done = self.check(deck, "mesh.dp=8")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("4 query and 2 key/value heads of 16, vocabulary 96", done.stdout)
        self.assertEqual(
            self.check(deck, "model.yarn_factor=2", "model.llama3_factor=1").returncode, 0
        )  # a stretched context is no contradiction
        self.assertEqual(self.check(deck, "model.hidden=32").returncode, 0)
        for override in (
            "model.hidden=64",
            "model.layers=1",
            "model.qkv_bias=true",
            "model.qk_norm=true",
            "model.tied_embedding=true",
            "model.rms_eps=1e-5",
            "model.vocabulary=97",
        ):
            done = self.check(deck, override)
            self.assertNotEqual(done.returncode, 0, override)
            self.assertIn(override.split("=")[0] + " = ", done.stderr)
            self.assertIn("contradicts", done.stderr)
        done = self.check(deck, "model.preset=qwen2.5-0.5b")
        self.assertIn("1 problem", done.stderr)
        self.assertRegex(
            done.stderr,
            (
                r'model.preset = "qwen2.5-0.5b" is another shape than .*config.json .*: layers 24'
                r' against 2, .*set model.preset = "custom"'
            ),
        )
        self.assertEqual(self.check(deck, "model.preset=custom").returncode, 0)
        done = self.check(self.finetune("llama3", self.out("nowhere")))
        self.assertIn("nowhere/config.json", done.stderr)
        self.assertIn("1 problem", done.stderr)

    def test_dropout_that_training_goes_without_is_told(self):
        folder = self.copy_of("qwen2")
        file = os.path.join(folder, "config.json")
        for rate in (0.0, 0.25):
            with open(file) as f:
                config = json.load(f)
            with open(file, "w") as f:
                json.dump({**config, "attention_dropout": rate}, f)
            deck = self.finetune("qwen2", folder)
            note = f"note: {file}: attention_dropout = {rate}: training goes without dropout"
            run = self.out(f"rate-{rate}")
            for text in (
                self.check(deck).stdout,
                self.run_ballast(1, "train", deck, "-d", run).stdout,
            ):
                self.assertEqual(text.count("attention_dropout"), 1 if rate else 0)
                self.assertEqual(text.count(note), 1 if rate else 0)

    def test_initial_weights_that_the_folder_replaces_are_told(self):
        deck = self.finetune("qwen2")
        note = "note: model.initial_std = 0.5 has no effect with model.weights"
        done = self.run_ballast(1, "train", deck, "-d", self.out("run"), "model.initial_std=0.5")
        self.assertEqual(done.stdout.count(note), 1)
        self.assertIn(note, self.check(deck, "model.initial_std=0.5").stdout)
        self.assertNotIn("initial_std", self.check(deck).stdout)

    def test_folders_that_do_not_fit_are_refused_by_name(self):
        def refused(name, change, *texts, ranks=2):
            folder = self.copy_of(name)
            change(folder)
            done = self.run_ballast(
                ranks,
                "train",
                self.finetune(name, folder, dp=ranks),
                "-d",
                self.out(f"refused-{abs(hash(texts))}"),
                status=1,
            )
            for text in texts:
                self.assertIn(text, done.stderr)

        def config(**values):
            def change(folder):
                path = os.path.join(folder, "config.json")
                with open(path) as f:
                    known = json.load(f)
                known.update(values)
                with open(path, "w") as f:
                    json.dump(known, f)

            return change

        def cut(folder):
            path = os.path.join(folder, "model.safetensors")
            os.truncate(path, os.path.getsize(path) - 5)

        refused("qwen2", config(num_hidden_layers=1), "model.layers.1.", "does not have")
        refused("qwen2", config(num_hidden_layers=3), "model.layers.2.")
        refused("qwen2", config(intermediate_size=64), "mlp", "[48, 32]", "[64, 32]")
        refused("qwen2", config(model_type="mixtral"), "mixtral")
        refused("qwen2", config(partial_rotary_factor=0.5), "partial rotary")

        def both(folder):
            shutil.copy(os.path.join(folder, "model.safetensors"), os.path.join(folder, "a.st"))
            index = {"weight_map": {name: "a.st" for name in tensors(folder)}}
            with open(os.path.join(folder, "model.safetensors.index.json"), "w") as f:
                json.dump(index, f)

        refused("qwen2", both, "has both model.safetensors and", "which names other files")
        window = "sliding-window attention is not supported"
        refused("mistral", config(sliding_window=64), window)
        layers = ["full_attention", "sliding_attention"]
        refused("qwen3", config(layer_types=layers), window, "config.json")
        refused("qwen3", config(attention_bias=True), "attention_bias of qwen3")
        refused(
            "qwen2_yarn",
            config(
                rope_parameters={
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "rope_theta": 1e4,
                    "attention_factor": 1.0,
                    "original_max_position_embeddings": 64,
                }
            ),
            "attention_factor",
        )
        refused("qwen2", cut, "model.safetensors")
        refused(
            "llama3",
            lambda folder: os.remove(os.path.join(folder, "model-00002-of-00002.safetensors")),
            "model-00002-of-00002.safetensors",
        )
        refused(
            "qwen2",
            lambda folder: open(os.path.join(folder, "config.json"), "w").close(),
            "config.json",
            "not valid JSON",
        )

    def test_export_refuses_what_it_cannot_write_soundly(self):
        run = self.out("run")
        self.run_ballast(1, "train", self.finetune("qwen2"), "-d", run)
        checkpoint = os.path.join(run, "checkpoints", "step_00000001.h5")
        self.run_ballast(1, "export", checkpoint, self.out("out"))
        self.assertIn(
            "holds a model already",
            self.run_ballast(1, "export", checkpoint, self.out("out"), status=1).stderr,
        )
        self.run_ballast(1, "export", checkpoint, self.out("other"), "--dtype", "f16", status=2)
        os.remove(self.out("out/config.json"))  # as an export leaves it that did not end
        left = self.run_ballast(1, "export", checkpoint, self.out("out"), status=1).stderr
        self.assertIn("of an export that did not end", left)
        with open(checkpoint, "r+b") as f:
            f.seek(os.path.getsize(checkpoint) // 2)
            byte = f.read(1)
            f.seek(-1, os.SEEK_CUR)
            f.write(bytes([byte[0] ^ 1]))
        done = self.run_ballast(1, "export", checkpoint, self.out("damaged"), status=1)
        self.assertIn("step_00000001.h5", done.stderr)
        self.assertFalse(os.path.exists(self.out("damaged")))
        self.assertIn(
            "nowhere.h5",
            self.run_ballast(
                1, "export", self.out("nowhere.h5"), self.out("none"), status=1
            ).stderr,
        )

    def test_gradients_that_cannot_be_written_end_the_run(self):
        done = self.run_ballast(
            2,
            "train",
            self.finetune("qwen2", dp=2),
            "-d",
            self.out("run"),
            "run.dump_gradients=" + self.out("no/such/folder.safetensors"),
            status=1,
        )
        self.assertIn("no/such/folder.safetensors", done.stderr)
        # Before the first step is computed.
        self.assertIn("run.dump_gradients = ", done.stderr)

    def test_gradients_replace_nothing_but_gradients(self):
        deck, notes, file = self.finetune("qwen2", dp=2), self.out("notes"), self.out("gradients")
        with open(notes, "w") as f:
            f.write("what somebody wrote by hand\n")
        pipe = self.out("pipe")
        os.mkfifo(pipe)
        for target in (notes, self.folder, pipe):
            done = self.run_ballast(
                2, "train", deck, "-d", self.out("run"), "run.dump_gradients=" + target, status=1
            )
            self.assertIn(f'run.dump_gradients = "{target}"', done.stderr)
            self.assertIn("would be replaced", done.stderr)
            checked = self.check(deck, "run.dump_gradients=" + target)
            self.assertEqual(checked.returncode, 1, checked.stdout)
            self.assertIn(f'run.dump_gradients = "{target}"', checked.stderr)
        inside = os.path.join(REFERENCE, "qwen2", "gradients.safetensors")
        checked = self.check(deck, "run.dump_gradients=" + inside)
        self.assertIn("lies in the folder of model.weights", checked.stderr)
        absent = self.check(deck, "run.dump_gradients=" + self.out("later/gradients"))
        self.assertEqual(absent.returncode, 0, absent.stderr)
        self.assertIn("there is no folder " + self.out("later"), absent.stdout)
        self.assertEqual(self.check(deck, "run.dump_gradients=" + file).returncode, 0)
        self.assertFalse(os.path.exists(file))
        with open(notes) as f:
            self.assertEqual(f.read(), "what somebody wrote by hand\n")
        # A run that was refused does not block its folder, and an earlier dump is replaced.
        for run in ("run", "again"):
            self.run_ballast(2, "train", deck, "-d", self.out(run), "run.dump_gradients=" + file)
            self.assertTrue(tensors(file))


if __name__ == "__main__":
    unittest.main()
