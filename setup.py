"""Builds the C kernels along with the package. What the package is: setup.cfg."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

KERNELS = Path("daso", "kernels")
SOURCES = Path(__file__).resolve().parent / KERNELS


class BuildWithKernels(build_py):
    """Compile the kernels too; without a compiler the package works, more slowly."""

    def run(self) -> None:
        """Build into the build folder, or, for an editable install, into the sources."""
        super().run()
        # By path: `import daso` needs torch, which an isolated build does not have.
        spec = spec_from_file_location("build_kernels", SOURCES / "build.py")
        builder = module_from_spec(spec)
        spec.loader.exec_module(builder)
        if self.editable_mode:
            builder.build(SOURCES, SOURCES)
            return
        folder = Path(self.build_lib, KERNELS)
        for library in folder.glob("*.so"):  # of an earlier build
            library.unlink()
        builder.build(SOURCES, folder)


class WheelWithKernels(bdist_wheel):
    """Name the platform of a wheel that has libraries. They are not tied to a Python's ABI."""

    def run(self) -> None:
        """Build, and then decide what the wheel is."""
        self.run_command("build")
        folder = Path(self.get_finalized_command("build_py").build_lib, KERNELS)
        if any(folder.glob("*.so")):
            self.root_is_pure = False
            self.distribution.has_ext_modules = lambda: True  # installed where libraries belong
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags of Python, ABI and platform."""
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if self.root_is_pure else ("py3", "none", platform)


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelWithKernels})
