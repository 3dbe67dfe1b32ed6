"""Builds the host kernel: one shared library with a plain C ABI. Without a C++ compiler the package installs all the same and steps in torch."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "lightning_megatrain.optim._kernels",
            ["lightning_megatrain/optim/kernels.cpp"],
            # nothing may be contracted but what the source says: the bits must not depend on the vector width
            extra_compile_args=["-O3", "-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-pthread", "-g0"],
            extra_link_args=["-pthread"],
            optional=True,
        )
    ]
)
