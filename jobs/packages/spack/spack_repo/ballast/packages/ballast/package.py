"""Spack recipe (Spack 1.0 and later) of the checkout that it lies in."""
import pathlib

from spack_repo.builtin.build_systems.cmake import CMakePackage

from spack.package import *

CHECKOUT = pathlib.Path(__file__).resolve().parents[7]


class Ballast(CMakePackage):
    """Load-balanced training of long-context language models over MPI, on CPUs and NVIDIA GPUs."""

    git = CHECKOUT.as_uri()
    license("Apache-2.0")

    version("main", branch="main")

    variant("cuda", default=False, description="CUDA backend, with NCCL between ranks")
    variant("native", default=True, description="Code for the processor that builds")
    variant("tests", default=False, description="Build the tests")

    depends_on("c", type="build")
    depends_on("cxx", type="build")
    depends_on("git", type="build")
    depends_on("cmake@3.22:", type="build")
    depends_on("ninja", type="build")
    depends_on("pkgconfig", type="build")
    depends_on("mpi")
    depends_on("hdf5@1.10: +mpi")
    depends_on("kokkos@3.7: +serial")
    depends_on("openblas threads=pthreads")
    depends_on("tomlplusplus")
    depends_on("cli11")
    depends_on("fmt")
    depends_on("spdlog")
    depends_on("nlohmann-json")
    depends_on("xxhash")
    depends_on("zlib-api")
    depends_on("googletest", when="+tests")
    depends_on("python@3.11:", type=("build", "run"))
    depends_on("py-h5py", type="run")
    depends_on("py-numpy", type="run")
    depends_on("py-plotly", type="run")
    depends_on("cuda@12.8:", when="+cuda")
    depends_on("nccl", when="+cuda")

    def cmake_args(self):
        return [
            self.define("BALLAST_CUDA", "ON" if "+cuda" in self.spec else "OFF"),
            self.define_from_variant("BALLAST_NATIVE", "native"),
            self.define_from_variant("BALLAST_TESTS", "tests"),
        ]
