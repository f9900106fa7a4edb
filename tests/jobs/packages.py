"""The files under jobs/packages: what a parser can say of them without Docker, Apptainer or Spack.
Their packages are those of packages.txt, which set-up installs."""
import ast
import os
import re
import subprocess
import unittest

ROOT = os.environ["BALLAST_ROOT"]
PACKAGES = os.path.join(ROOT, "jobs", "packages")
INSTRUCTIONS = {"FROM", "WORKDIR", "COPY", "RUN", "ENV", "CMD"}
SECTIONS = {"files", "post", "environment", "runscript", "test"}


def read(*parts):
    with open(os.path.join(PACKAGES, *parts)) as file:
        return file.read()


def listed():
    """(Debian names, Spack name, group) of packages.txt."""
    rows = [line.split() for line in read("packages.txt").splitlines() if line[:1] not in ("", "#")]
    return [(row[0].split("|"), row[1], row[2]) for row in rows]


def dockerfile(text):
    """[(instruction, argument)], continuation lines joined."""
    text = re.sub(r"^#.*\n", "", text, flags=re.M).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]


def definition(text):
    """([header lines], {section: text}) of an Apptainer definition."""
    text = re.sub(r"^#.*\n", "", text, flags=re.M)
    header, *rest = re.split(r"^%", text, flags=re.M)
    sections = {}
    for part in rest:
        name, body = part.split("\n", 1)
        sections[name.strip()] = body
    return header.split("\n"), sections


def installs(text):
    """Packages that a script asks apt-get for by itself."""
    return re.findall(r"\bapt(?:-get)?\s+(?:-\S+\s+)*install\b", text)


class List(unittest.TestCase):
    def test_rows(self):
        rows = listed()
        self.assertGreater(len(rows), 20)
        names = [name for debian, _, _ in rows for name in debian]
        self.assertEqual(len(names), len(set(names)))
        self.assertEqual({group for _, _, group in rows}, {"build", "test", "full"})

    def test_set_up_installs_the_list_and_nothing_else(self):
        done = subprocess.run(
            [os.path.join(ROOT, "jobs", "setup.sh"), "--packages"],
            env={**os.environ, "BALLAST_SKIP_INSTALL": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        said = done.stderr.split("(Debian names): ")[1].split()
        build = ["|".join(debian) for debian, _, group in listed() if group == "build"]
        self.assertEqual(said, build)


class Containers(unittest.TestCase):
    STEPS = r"jobs/setup.sh --packages\b.*jobs/setup.sh --preset portable .*cmake --install"

    def test_dockerfiles(self):
        for name in ("Dockerfile", "Dockerfile.cuda"):
            with self.subTest(name):
                lines = dockerfile(read("docker", name))
                self.assertLessEqual({line[0] for line in lines}, INSTRUCTIONS)
                self.assertEqual(lines[0][0], "FROM")
                self.assertEqual([a for i, a in lines if i == "FROM"][-1], "debian:12")
                steps = " ".join(a for i, a in lines if i == "RUN")
                self.assertRegex(steps, self.STEPS)
                self.assertEqual(installs(steps), [])
                self.assertIn("BALLAST_CUDA=" + ("ON" if "cuda" in name else "OFF"), steps)
                for instruction, argument in lines:
                    if instruction == "RUN":
                        self.shell(argument)

    def test_definitions(self):
        for name in ("ballast.def", "ballast-cuda.def"):
            with self.subTest(name):
                header, sections = definition(read("apptainer", name))
                self.assertEqual(header[0], "Bootstrap: docker")
                self.assertIn("From: debian:12", header)
                self.assertLessEqual({part.split()[0] for part in sections}, SECTIONS)
                self.assertRegex(sections["post"].replace("\n", " "), self.STEPS)
                self.assertEqual(installs(sections["post"]), [])
                self.assertIn(
                    "BALLAST_CUDA=" + ("ON" if "cuda" in name else "OFF"), sections["post"]
                )
                for part, text in sections.items():
                    if not part.startswith("files"):
                        self.shell(text)

    def shell(self, text):
        done = subprocess.run(
            ["bash", "-n"], input=text, capture_output=True, text=True, check=False
        )
        self.assertEqual(done.returncode, 0, done.stderr)


class Spack(unittest.TestCase):
    FOLDER = ("spack", "spack_repo", "ballast")

    def calls(self, name):
        tree = ast.parse(read(*self.FOLDER, "packages", "ballast", "package.py"))
        return [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and name in (getattr(node.func, "id", ""), getattr(node.func, "attr", ""))
        ]

    def test_dependencies_are_those_of_the_list(self):
        specs = [call.args[0].value for call in self.calls("depends_on")]
        names = {re.match(r"[\w-]+", spec).group() for spec in specs}
        wanted = {spack for _, spack, _ in listed() if spack != "-"}
        # Backends, which set-up finds instead of installing, and the C compiler of HDF5.
        self.assertEqual(names, wanted | {"c", "cuda", "nccl"})

    def test_variants_and_versions(self):
        variants = [call.args[0].value for call in self.calls("variant")]
        self.assertEqual(sorted(variants), ["cuda", "native", "tests"])
        self.assertEqual([call.args[0].value for call in self.calls("version")], ["main"])
        # Definitions that the recipe passes are options of the build.
        with open(os.path.join(ROOT, "CMakeLists.txt")) as file:
            build = file.read()
        for call in self.calls("define") + self.calls("define_from_variant"):
            self.assertIn(call.args[0].value, build)

    def test_repository(self):
        self.assertIn("namespace: ballast", read(*self.FOLDER, "repo.yaml"))


if __name__ == "__main__":
    unittest.main()
