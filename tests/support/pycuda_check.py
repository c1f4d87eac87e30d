"""Run pycuda's real code against a fake driver. Slow, and optional: ``make test-pycuda``.

    python tests/support/pycuda_check.py FOLDER

Makes an environment in FOLDER, builds pycuda there from its source package against the CUDA
headers of NVIDIA's wheels and the ``libcuda`` of `fleet_library`, and checks that the pycuda
source joins its devices with NVML's. Needs a C and a C++ compiler and a package index; takes one
to two minutes the first time.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from fleet_library import build, compiler

ROOT = Path(__file__).resolve().parents[2]
FLEET = "reordered"
PACKAGES = (
    "numpy setuptools wheel pytools platformdirs mako nvidia-ml-py "
    "nvidia-cuda-runtime-cu12 nvidia-cuda-profiler-api-cu12"
)

CHECK = """
import json, sys
from gpuprobe.api.devices import inventory
from gpuprobe.reporters.json.info import document
json.dump(document(inventory(("nvml", "pycuda"), require=("pycuda",))), sys.stdout)
"""


def main(folder: Path) -> int:
    if compiler() is None or shutil.which("c++") is None:
        sys.stdout.write("skipped: no C++ compiler\n")
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    python = folder / "venv" / "bin" / "python"
    library = build(FLEET, folder / "lib")
    module = built(folder, python, library)
    complete(library, module)
    environ = {
        **os.environ,
        "LD_LIBRARY_PATH": str(library),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{module.parents[1]}",
    }
    environ.pop("CUDA_VISIBLE_DEVICES", None)
    # Warnings are errors: nothing that pycuda finds odd may go unseen.
    run = subprocess.run(
        [str(python), "-W", "error", "-c", CHECK],
        env=environ,
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = json.loads(run.stdout)
    ordinals = [device["identity"]["cuda_ordinal"] for device in found["devices"]]
    attributes = found["devices"][3]["attributes"]
    messages = [one["message"] for one in found["disagreements"]]
    assert ordinals == [3, 1, 2, 0], ordinals
    assert "cuda:0 is NVML 3, cuda:3 is NVML 0" in messages, messages
    assert attributes["multiprocessor_count"]["value"] == 132
    assert attributes["warp_size"] == {"value": 32, "source": "pycuda", "status": "ok"}
    refused = [name for name, value in attributes.items() if value["status"] == "unsupported"]
    assert refused, "the fake driver refuses most attributes"
    version = next(s["version"] for s in found["sources"] if s["name"] == "pycuda")
    sys.stdout.write(
        f"pycuda {version}: 4 devices joined by PCI address, {len(attributes)} attributes, "
        f"{len(refused)} of them refused and said so\n"
    )
    return 0


def built(folder: Path, python: Path, library: Path) -> Path:
    """pycuda's compiled module, built if it is not there yet."""
    modules = list(folder.glob("pycuda-*/pycuda/_driver.*.so"))
    if modules:
        return modules[0]
    # What an interrupted run left behind would be built upon.
    for old in folder.glob("pycuda-*"):
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", *PACKAGES.split()], check=True)
    download = [*pip, "download", "--no-binary", "pycuda", "--no-deps", "--no-build-isolation"]
    subprocess.run([*download, "pycuda"], check=True, cwd=folder)
    (archive,) = folder.glob("pycuda-*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    source = folder / archive.name.removesuffix(".tar.gz")
    headers = folder / "include"
    for name in ("cuda.h", "cudaProfiler.h"):
        where = next((folder / "venv").rglob(name)).parent
        shutil.copytree(where, headers, dirs_exist_ok=True)
    link = library / "libcuda.so"
    if not link.exists():
        link.symlink_to("libcuda.so.1")
    configure = [
        f"--cuda-root={folder}",
        f"--cuda-inc-dir={headers}",
        f"--cudadrv-lib-dir={library}",
    ]
    subprocess.run([str(python), "configure.py", *configure], cwd=source, check=True)
    # pycuda 2026.1 takes no option against cuRAND, whose headers are another 100 MB.
    settings = source / "siteconf.py"
    text = settings.read_text("utf-8").replace("ENABLE_CURAND = True", "ENABLE_CURAND = False")
    settings.write_text(text, "utf-8")
    with (folder / "build.log").open("w") as log:
        command = [str(python), "setup.py", "build_ext", "--inplace"]
        subprocess.run(command, cwd=source, check=True, stdout=log, stderr=log)
    return next(source.glob("pycuda/_driver.*.so"))


def complete(library: Path, module: Path) -> None:
    """Give libcuda every function that pycuda links to: what the fake does not know is refused
    with "not supported" (801), so that a context, say, cannot be made.
    """

    def symbols(path: Path, which: str) -> set[str]:
        listing = subprocess.run(
            ["nm", "-D", which, str(path)], check=True, capture_output=True, text=True
        )
        names = (line.split()[-1].partition("@")[0] for line in listing.stdout.splitlines())
        return {name for name in names if name.startswith("cu")}

    here = Path(__file__).parent
    target = library / "libcuda.so.1"
    missing = symbols(module, "--undefined-only") - symbols(target, "--defined-only")
    stubs = library / "stubs.c"
    stubs.write_text("".join(f"int {name}(void) {{ return 801; }}\n" for name in sorted(missing)))
    command = [str(compiler()), "-shared", "-fPIC", "-w", f"-I{library}"]
    command += ["-Wl,-soname,libcuda.so.1", str(here / "fake_cuda.c"), str(stubs)]
    subprocess.run([*command, "-o", str(target)], check=True)


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]).resolve()))
