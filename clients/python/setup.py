"""The wheel of the client: of the package `baton` itself only what every part needs."""

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildClient(build_py):
    """Leave out the modules beside `baton/__init__.py`."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        modules = super().find_package_modules(package, package_dir)
        return [module for module in modules if package != "baton" or module[1] == "__init__"]


setup(cmdclass={"build_py": BuildClient})
