"""Pages tell the truth: commands name programs, options, decks and keys that exist, links lead
somewhere, the page of results is what its figures make, and the site builds."""
import glob
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

from commands import BALLAST, ROOT, commands, plans_of_page, wrong, wrong_in_page

RESULTS = os.path.join(ROOT, "tests", "results")
sys.path.insert(0, RESULTS)


def pages():
    found = glob.glob(os.path.join(ROOT, "*.md"))
    for folder in ("docs", "inputs", "jobs"):
        found += glob.glob(os.path.join(ROOT, folder, "**", "*.md"), recursive=True)
    return sorted(os.path.relpath(page, ROOT) for page in found)


class Commands(unittest.TestCase):
    def test_commands_of_all_pages(self):
        complaints = [text for page in pages() for text in wrong_in_page(page)]
        self.assertEqual(complaints, [])

    def test_what_is_wrong_is_seen(self):
        for line in (
            "ballast trian inputs/quickstart.toml",
            "ballast train inputs/quickstart.toml --cases x",
            "build/bin/ballast train inputs/quickstart.toml mesh.dpp=2",
            "mpiexec -n 4 ballast plan inputs/hbp/table99.toml",
            "ballast train inputs/mtraining/needle.toml --case dens",
            "ballast-report --perfeto FILE",
            "jobs/setup.sh --pakages",
            "jobs/no_such_script.sh",
            "frobnicate x",
        ):
            found = [text for words in commands(line) for text in wrong(words)]
            self.assertEqual(len(found), 1, line)

    def test_plans_that_pages_show_have_something_to_plan(self):
        """Of one step: that all figures of the page of results come out is a test of its own."""
        shown = [(page, words) for page in pages() for words in plans_of_page(page)]
        self.assertIn("docs/tune.md", [page for page, _ in shown])
        for words in {tuple(words) for page, words in shown if page != "docs/results.md"}:
            done = subprocess.run(
                [BALLAST, "plan", *words, "run.steps=1"],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            self.assertEqual(done.returncode, 0, f"{words}: {done.stderr}")

    def test_decks_of_the_examples_for_slurm_pass_check(self):
        """Commands in comments of scripts: what a submission trains is sound."""
        for path in ("jobs/train.sbatch", "jobs/profiles/example.sh"):
            with open(os.path.join(ROOT, path)) as file:
                text = re.sub(r"^#", "", file.read(), flags=re.M)
            (example,) = re.findall(r"^ *sbatch (?:.*\\\n)+.*$", text, re.M)
            (words,) = commands(example)
            self.assertIn("run.backend=cuda", words)
            deck = next(i for i, word in enumerate(words) if word.startswith("inputs/"))
            done = subprocess.run(
                [BALLAST, "check", *words[deck:], "--elsewhere"],
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=False,
            )
            self.assertEqual(done.returncode, 0, path + done.stderr)
            ranks = {w.split("=")[0]: int(w.split("=")[1]) for w in words if w.startswith("--n")}
            started = ranks["--nodes"] * ranks["--ntasks-per-node"]
            self.assertRegex(done.stdout, rf"(?m)^mesh: .* = {started}$")

    def test_presets_of_the_contributors_page_configure_build_and_test(self):
        with open(os.path.join(ROOT, "CONTRIBUTING.md")) as file:
            (line,) = re.findall(r"^Sanitizers .*$", file.read(), re.M)
        named = set(re.findall(r"--preset (\w+)|`(\w+)`", line))
        named = {name for either in named for name in either if name}
        self.assertIn("tsan", named)
        with open(os.path.join(ROOT, "CMakePresets.json")) as file:
            presets = json.load(file)
        for kind in ("configurePresets", "buildPresets", "testPresets"):
            self.assertLessEqual(named, {preset["name"] for preset in presets[kind]}, kind)

    def test_readme_is_short(self):
        with open(os.path.join(ROOT, "README.md")) as file:
            text = file.read()
        # Half of what it had before it was written anew.
        self.assertLessEqual(len(text.split()), 868)
        self.assertLessEqual(len(text.encode()), 5796)
        self.assertLessEqual(text.count("\n"), 70)

    def test_readme_names_the_targets_that_are_installed(self):
        with open(os.path.join(ROOT, "README.md")) as file:
            named = set(re.findall(r"ballast::(\w+)", file.read()))
        with open(os.path.join(ROOT, "tests", "jobs", "package_test.sh")) as file:
            linked = set(re.findall(r"ballast::(\w+)", file.read().split("<<'FILE'")[1]))
        self.assertEqual(named, linked)


class Links(unittest.TestCase):
    def test_links_lead_somewhere(self):
        for page in pages():
            with open(os.path.join(ROOT, page)) as file:
                text = re.sub(r"^```.*?^```", "", file.read(), flags=re.M | re.S)
            for target in re.findall(r"\]\(([^)\s]+)\)", text):
                if "://" in target:
                    continue
                path, _, anchor = target.partition("#")
                other = (
                    os.path.normpath(os.path.join(os.path.dirname(page), path)) if path else page
                )
                with self.subTest(page=page, link=target):
                    self.assertTrue(os.path.exists(os.path.join(ROOT, other)))
                    if anchor and other.endswith(".md"):
                        self.assertIn(anchor, anchors(other))


def anchors(page):
    """Anchors of a page's headings, as hosting sites make them."""
    with open(os.path.join(ROOT, page)) as file:
        text = re.sub(r"^```.*?^```", "", file.read(), flags=re.M | re.S)
    for heading in re.findall(r"^#+ (.*)$", text, re.M):
        plain = re.sub(r"[^\w\- ]", "", heading.lower())
        yield plain.replace(" ", "-")


class Results(unittest.TestCase):
    def results(self, *arguments):
        return subprocess.run(
            [sys.executable, RESULTS, "--ballast", BALLAST, *arguments],
            capture_output=True,
            text=True,
            check=False,
        )

    def test_page_is_what_the_figures_make(self):
        done = self.results("--check")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_planned_figures_are_what_the_program_gives(self):
        done = self.results("--run")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)


class Site(unittest.TestCase):
    @unittest.skipUnless(shutil.which("mkdocs"), "mkdocs is not installed")
    def test_site_builds_without_a_warning(self):
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                ["mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=False,
            )
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            with open(os.path.join(folder, "search", "search_index.json")) as file:
                self.assertIn("imbalance", file.read())
            # The site loads nothing from elsewhere.
            for page in glob.glob(os.path.join(folder, "*.html")):
                with open(page) as file:
                    self.assertEqual(
                        re.findall(r"""(?:src=|<link [^>]*href=)["']https?:""", file.read()), []
                    )

    def test_every_page_is_in_the_menu_and_the_list(self):
        with open(os.path.join(ROOT, "mkdocs.yml")) as file:
            menu = re.findall(r": (\S+\.md)$", file.read(), re.M)
        names = sorted(os.path.basename(p) for p in glob.glob(os.path.join(ROOT, "docs", "*.md")))
        self.assertEqual(sorted(menu), names)
        with open(os.path.join(ROOT, "docs", "README.md")) as file:
            listed = re.findall(r"\]\((\w+\.md)\)", file.read())
        self.assertEqual(sorted([*listed, "README.md"]), names)

    def test_one_version(self):
        versions = {}
        for path, pattern in (
            ("CITATION.cff", r"^version: (\S+)"),
            ("docs/CHANGELOG.md", r"^## (\d\S+?),? "),
            ("cmake/BallastVersionNumber.cmake", r"^set\(BALLAST_VERSION (\S+)\)"),
        ):
            with open(os.path.join(ROOT, path)) as file:
                versions[path] = re.search(pattern, file.read(), re.M).group(1)
        self.assertEqual(len(set(versions.values())), 1, versions)


if __name__ == "__main__":
    unittest.main()
