"""Compiles the optional kernels of jllama/kernels; everything else about the package is in pyproject.toml."""

import hashlib
import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = Path("jllama/kernels")
# Each source has the flags of its instruction set, and no other: the common ones run on any processor.
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
COMMON: dict[str, list[str]] = {"handlers.cc": [], "schedule.cc": [], "cpu.cc": [], "generic.cc": []}
X86 = {
    "avx2.cc": AVX2,
    "avx_vnni.cc": [*AVX2, "-mavxvnni"],
    "avx512.cc": AVX512,
    "avx512_vnni.cc": [*AVX512, "-mavx512vnni"],
    "avx512_bf16.cc": [*AVX512, "-mavx512bf16"],
}
ARM = {"neon.cc": [], "neon_dotprod.cc": ["-march=armv8.2-a+dotprod"]}
MACHINES = {"x86_64": X86, "AMD64": X86, "aarch64": ARM, "arm64": ARM}
SOURCES = COMMON | MACHINES.get(platform.machine(), {})


def source() -> str:
    """Hash the sources as `_source` of the package does."""
    files = sorted([*FOLDER.glob("*.cc"), *FOLDER.glob("*.h")])
    return hashlib.sha256(b"".join(file.name.encode() + b"\0" + file.read_bytes() for file in files)).hexdigest()


class Build(build_ext):
    """Gives each source flags of its own."""

    def build_extensions(self) -> None:
        """Compile the extensions."""
        plain = self.compiler._compile

        def compile_one(obj, src, ext, cc_args, extra_postargs, pp_opts):  # type: ignore[no-untyped-def]
            plain(obj, src, ext, cc_args, [*extra_postargs, *SOURCES[Path(src).name]], pp_opts)

        self.compiler._compile = compile_one
        super().build_extensions()


kernels = Extension(
    "jllama.kernels._native",
    [str(FOLDER / name) for name in SOURCES],
    depends=[str(file) for file in FOLDER.rglob("*.h")],
    include_dirs=[str(FOLDER)],
    define_macros=[("JLLAMA_SOURCE", f'"{source()}"')],
    # The sums must not depend on which products and sums a compiler joins.
    extra_compile_args=[
        "-std=c++17",
        "-O3",
        "-g0",
        "-ffp-contract=off",
        "-Wno-uninitialized",
        "-Wno-maybe-uninitialized",
        "-isystem",
        str(FOLDER / "third_party"),
    ],
    optional=True,  # without a compiler the package works, more slowly
)
# Windows' compilers have other vectors and other flags.
setup(ext_modules=[kernels] if platform.system() in ("Linux", "Darwin") else [], cmdclass={"build_ext": Build})
