"""Wheels: with the demo model and the .proto files in `baton/shipped`, and with the native kernels by `make wheel`,
which sets BATON_WHEEL_FOR to an architecture. Without it the wheel is for any machine, and each compiles its kernels at
its first start."""

import importlib.util
import os
import re
import shutil
import tempfile
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

MACHINE = os.environ.get("BATON_WHEEL_FOR")
# Of libstdc++'s versions, the glibc that systems with it have at least (as PEP 600's policies say): 3.4.29 comes with
# 2.34.
GLIBC_OF = {19: 17, 24: 28, 28: 31, 29: 34, 30: 35}
ROOT = Path(__file__).parent
NATIVE = ROOT / "baton" / "engine" / "native"
SHIPPED = (
    "demo/LICENSE-PSF.txt",
    "demo/target",
    "demo/draft",
    "demo/mixture",
    "demo/adapter",
    "protos",
)  # what `baton up` and clients need of a checkout


def load(name: str):
    """Load a module of the native folder by itself: importing the package would import torch."""
    spec = importlib.util.spec_from_file_location(name, NATIVE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildWithData(build_py):
    """Add what is shipped, and one library for each tier of the architecture."""

    def run(self):
        super().run()
        if self.editable_mode:
            return  # a checkout has it
        for name in SHIPPED:
            source, to = ROOT / name, Path(self.build_lib) / "baton" / "shipped" / Path(name).name
            to.parent.mkdir(exist_ok=True)
            shutil.copytree(source, to, dirs_exist_ok=True) if source.is_dir() else shutil.copy(source, to)
        if MACHINE is not None:
            self._add_kernels()

    def _add_kernels(self):
        compiler, tiers = load("compiler"), load("tier").tiers_for(MACHINE)
        if not tiers:
            raise SystemExit(f"BATON_WHEEL_FOR={MACHINE}: there are no kernels for it")
        if (found := compiler.find()) is None:
            raise SystemExit("no C++ compiler (CXX, else g++) on this machine")
        to = Path(self.build_lib) / "baton" / "engine" / "native" / "libraries"
        shutil.rmtree(to, ignore_errors=True)  # what is left of a build for another architecture
        to.mkdir(parents=True)
        for tier in tiers:
            with tempfile.TemporaryDirectory() as folder:
                library = compiler.compiled(found, tier.flags, Path(folder))
                (to / f"{tier.name}.so").write_bytes(library.read_bytes())


class WheelForMachine(bdist_wheel):
    """Named after the architecture and the oldest systems that have what the libraries call."""

    def get_tag(self):
        if MACHINE is None:
            return super().get_tag()
        text = b"".join(path.read_bytes() for path in Path(self.bdist_dir).rglob("native/libraries/*.so"))
        glibc = max(int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", text))
        libstdcxx = max((int(minor) for minor in re.findall(rb"GLIBCXX_3\.4\.(\d+)", text)), default=0)
        oldest = next(minor for version, minor in GLIBC_OF.items() if version >= libstdcxx)
        return "py3", "none", f"manylinux_2_{max(17, glibc, oldest)}_{MACHINE}"


class Binary(Distribution):
    """A distribution for one architecture if libraries are in it."""

    def has_ext_modules(self):
        return MACHINE is not None


setup(distclass=Binary, cmdclass={"build_py": BuildWithData, "bdist_wheel": WheelForMachine})
