"""Compiles the optional kernels of jllama/native.cc; everything else about the package is in pyproject.toml."""

import os
import platform

import jaxlib
from setuptools import Extension, setup

kernels = Extension(
    "jllama._native",
    ["jllama/native.cc"],
    include_dirs=[os.path.join(os.path.dirname(jaxlib.__file__), "include")],
    extra_compile_args=["-std=c++17", "-O3", "-g0", "-Wno-uninitialized", "-Wno-maybe-uninitialized"],
    optional=True,  # without a compiler the package works, more slowly
)
setup(ext_modules=[kernels] if (platform.system(), platform.machine()) == ("Linux", "x86_64") else [])
