"""Runs of programs in Python, each in a process of its own that is forked from one which has
imported their libraries: reading them takes three quarters of a short run."""
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile

CONTEXT = multiprocessing.get_context("forkserver")
# Not pyarrow: where it is loaded, workers are started anew.
CONTEXT.set_forkserver_preload(["h5py", "numpy", "jinja2", "tokenizers", "concurrent.futures"])


def _begin(program, arguments, folder, environment, outputs):
    for number, name in outputs:
        file = os.open(name, os.O_WRONLY | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")


def run(program, arguments, timeout):
    """As subprocess.run([sys.executable, program, *arguments]) with its output as text."""
    with tempfile.TemporaryDirectory() as folder:
        names = [os.path.join(folder, name) for name in ("stdout", "stderr")]
        for name in names:
            with open(name, "w"):
                pass
        process = CONTEXT.Process(
            target=_begin,
            args=(program, arguments, os.getcwd(), dict(os.environ), list(enumerate(names, 1))),
        )
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired([program, *arguments], timeout)
        texts = []
        for name in names:
            with open(name, encoding="utf-8") as f:
                texts.append(f.read())
        return subprocess.CompletedProcess([program, *arguments], process.exitcode, *texts)
