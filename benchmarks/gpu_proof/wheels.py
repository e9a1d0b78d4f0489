"""Gather the packages that a bare GPU machine lacks, as wheels to carry there.

    python benchmarks/gpu_proof/wheels.py gpu_wheels
    python3 -m pip install --no-index --no-deps --target SITE gpu_wheels/*.whl    # over there

The target is Python 3.12 on x86-64 Linux. The machine has torch, transformers, peft, triton and
pyarrow with what they need. Versions are those of pyproject.toml, else those installed here.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = (
    "annotated-types", "blake3", "duckdb", "hjson", "omegaconf", "pydantic", "pydantic-core",
    "rapidfuzz", "typing-extensions", "typing-inspection",
)  # fmt: skip
# Published as source only, without compiled parts: the wheel that is built fits any machine.
BUILT = ("deepspeed", "hjson")
PYTHON = "3.12"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64")
MIB = 2**20


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("give one folder to put the wheels into: wheels.py gpu_wheels")
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()  # two versions of one package cannot be installed together
    download([pinned(name) for name in PACKAGES if name not in BUILT], folder)
    for name in BUILT:
        build(pinned(name), folder)
    report(folder)


def pinned(name: str) -> str:
    """Return name==version: pyproject.toml's pin, else the version installed here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in project["dependencies"]:
        requirement = Requirement(text)
        pins = [pin.version for pin in requirement.specifier if pin.operator == "=="]
        if requirement.name == name and pins:
            return f"{name}=={pins[0]}"
    return f"{name}=={metadata.version(name)}"


def download(packages: list[str], folder: Path) -> None:
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    target = ["--python-version", PYTHON, "--implementation", "cp", *platforms]
    pip("download", "--no-deps", "--only-binary=:all:", *target, "-d", str(folder), *packages)


def build(package: str, folder: Path) -> None:
    pip("wheel", "--no-deps", "--no-binary", package.partition("=")[0], "-w", str(folder), package)
    name = package.replace("==", "-")
    built = sorted(folder.glob(f"{name}*.whl"))
    if not built or not built[-1].name.endswith("-none-any.whl"):
        sys.exit(f"{package} gave {[path.name for path in built]}, no wheel for any machine")


def pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *words, "--quiet"], check=True)


def report(folder: Path) -> None:
    sizes = {path.name: path.stat().st_size / MIB for path in sorted(folder.glob("*.whl"))}
    for name, mib in sizes.items():
        print(f"{mib:6.1f} MiB  {name}")
    print(f"{sum(sizes.values()):6.1f} MiB in {len(sizes)} wheels")


if __name__ == "__main__":
    main()
