"""Build ``libnvidia-ml.so.1`` and ``libcuda.so.1`` that serve one fake fleet.

    python tests/support/fleet_library.py 8xh100 OUTPUT_FOLDER

Then ``LD_LIBRARY_PATH=OUTPUT_FOLDER`` makes any monitor see the fleet. Needs ``cc``.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpuprobe.testing.fleet import NVML_ERRORS, Fleet, NvmlFailure, described, load_fleet

HERE = Path(__file__).parent
NO_VALUE = -(1 << 62)

TEXTS = ("name", "uuid", "pci", "serial", "vbios")
FACTS: dict[str, tuple[str, ...]] = {
    name: (name,)
    for name in [
        "architecture",
        "brand",
        "ci",
        "gi",
        "compute_mode",
        "throttle",
        "display",
        "minor",
        "numa",
        "pstate",
        "persistence",
        "retired_pending",
        "energy",
        "compute_capability",
        "decoder",
        "encoder",
        "ecc_mode",
        "utilisation",
        "clocks",
        "max_clocks",
        "fans",
        "pcie_throughput",
        "temperature_thresholds",
        "bar1",
        "temperature",
        "ecc_volatile",
        "ecc_aggregate",
        "remapped_rows",
        "retired_pages",
        "sm_count",
        "cpus",
        "memory_temperature",
        "pcie_group",
        "p2p",
    ]
}
FACTS.update(
    {
        "mig_mode": ("mig", "mode"),
        "mig_max": ("mig", "max"),
        "pcie_generation": ("pcie", "generation"),
        "pcie_width": ("pcie", "width"),
        "pcie_max_generation": ("pcie", "max_generation"),
        "pcie_max_width": ("pcie", "max_width"),
        "pcie_replays": ("pcie", "replays"),
        "power_draw": ("power", "draw"),
        "power_limit": ("power", "limit"),
        "power_default": ("power", "default"),
        "power_constraints": ("power", "constraints"),
        "memory": ("memory",),
    }
)
LINK_ENDS = {"gpu": 0, "switch": 2}
KINDS = {"compute": 1, "graphics": 2, "mps": 4}


def compiler() -> str | None:
    """The C compiler, or None if there is none."""
    return shutil.which("cc") or shutil.which("gcc")


def build(name: str, folder: Path) -> Path:
    """Build both libraries into ``folder``; returns the folder. Raises CalledProcessError."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "fleet.h").write_text(header(load_fleet(name)), "utf-8")
    for source, library in (("fake_nvml.c", "libnvidia-ml.so.1"), ("fake_cuda.c", "libcuda.so.1")):
        command = [str(compiler()), "-O1", "-shared", "-fPIC", "-w", f"-I{folder}"]
        command += [f"-Wl,-soname,{library}", str(HERE / source), "-o", str(folder / library)]
        subprocess.run(command, check=True, capture_output=True)
    return folder


def header(fleet: Fleet) -> str:
    """The fleet as C data."""
    lines = [
        "#pragma once",
        "#include <stdint.h>",
        f"#define NO_VALUE (-(INT64_C(1) << 62))\n#define FLEET_COUNT {len(fleet.devices)}",
        f"#define FLEET_INIT {NVML_ERRORS[fleet.init] if fleet.init else 0}",
        f"#define FLEET_DRIVER {quoted(fleet.driver['version'])}",
        f"#define FLEET_NVML {quoted(fleet.driver['nvml'])}",
        f"#define FLEET_CUDA {fleet.driver['cuda']}",
        "enum { " + ", ".join(f"F_{name}" for name in FACTS) + ", FACT_COUNT };",
        "enum { " + ", ".join(f"T_{name}" for name in TEXTS) + ", TEXT_COUNT };",
        "typedef struct { int code, count; int64_t v[4]; } Num;",
        "typedef struct { int code; const char *s; } Text;",
        "typedef struct { unsigned pid; unsigned long long memory; unsigned gi, ci; "
        "int kinds, sm; } Proc;",
        "typedef struct { const char *remote; int active, kind, version; int64_t tx, rx; } Link;",
        "typedef struct { int slot; Text texts[TEXT_COUNT]; Num facts[FACT_COUNT]; } Mig;",
        "typedef struct { int lost, handle_code, process_code, work_code, link_code;"
        " Text texts[TEXT_COUNT]; Num facts[FACT_COUNT]; int process_count; Proc processes[64];"
        " int link_count; Link links[18]; int mig_count; Mig migs[8]; } Dev;",
        "typedef struct { const char *name, *bus; unsigned char uuid[16]; unsigned long total;"
        " int sm_count, major, minor; } Cuda;",
        "static const Dev FLEET[] = {",
        *(device(fleet, index) for index in range(len(fleet.devices))),
        "{0}};",
    ]
    visible = [
        fleet.devices[i]
        for i in fleet.cuda_order
        if "handle" not in fleet.devices[i] and not partitioned(fleet.devices[i])
    ]
    lines += [f"#define CUDA_COUNT {len(visible)}", "static const Cuda CUDA[] = {"]
    for d in visible:
        raw = ", ".join(str(b) for b in bytes.fromhex(d["uuid"][4:].replace("-", "")))
        major, minor = d["compute_capability"]
        lines.append(
            f"{{{quoted(d['name'])}, {quoted(d['pci'][4:].upper())}, {{{raw}}}, "
            f"{d['cuda_total']}ul, {d['sm_count']}, {major}, {minor}}},"
        )
    return "\n".join([*lines, "{0}};", ""])


def device(fleet: Fleet, index: int) -> str:
    d = fleet.devices[index]
    try:
        work, work_code = dict(fleet.work(index)), 0
    except NvmlFailure as failure:
        work, work_code = {}, failure.code
    processes, process_code = listed(d, "processes")
    links, link_code = listed(d, "nvlinks")
    migs = d.get("mig", {}).get("instances", [])
    rows = [
        f"{p['pid']}, {p.get('memory') if p.get('memory') is not None else '~0ull'}, "
        f"{p.get('gi', 0xFFFFFFFF)}u, {p.get('ci', 0xFFFFFFFF)}u, "
        f"{sum(KINDS[k] for k in p.get('kinds', ['compute']))}, {work.get(p['pid'], 0)}"
        for p in processes
    ]
    ends = [
        f"{quoted(x['remote'])}, {int(x.get('active', True))}, "
        f"{LINK_ENDS[x['kind']]}, {x['version']}, {x['kib'][0]}, {x['kib'][1]}"
        for x in links
    ]
    parts = [f"{m.get('slot', i)}, {{{texts(m)}}}, {{{facts(m)}}}" for i, m in enumerate(migs)]
    handle = NVML_ERRORS[d["handle"]["error"]] if "handle" in d else 0
    return (
        f"{{{int(bool(d.get('lost')))}, {handle}, {process_code}, {work_code}, {link_code}, "
        f"{{{texts(d)}}}, {{{facts(d)}}}, {len(rows)}, {{{braced(rows)}}}, "
        f"{len(ends)}, {{{braced(ends)}}}, {len(parts)}, {{{braced(parts)}}}}},"
    )


def partitioned(d: dict[str, Any]) -> bool:
    mode = d.get("mig", {}).get("mode")
    return isinstance(mode, list) and bool(mode[0])


def listed(d: dict[str, Any], name: str) -> tuple[list[dict[str, Any]], int]:
    try:
        return described(d, name), 0
    except NvmlFailure as failure:
        return [], failure.code


def braced(rows: list[str]) -> str:
    return ", ".join(f"{{{row}}}" for row in rows) or "{0}"


def texts(d: dict[str, Any]) -> str:
    cells = []
    for name in TEXTS:
        try:
            cells.append(f"{{0, {quoted(described(d, name))}}}")
        except NvmlFailure as failure:
            cells.append(f"{{{failure.code}, 0}}")
    return ", ".join(cells)


def facts(d: dict[str, Any]) -> str:
    cells = []
    for path in FACTS.values():
        try:
            value = described(d, *path)
        except NvmlFailure as failure:
            cells.append(f"{{{failure.code}, 0, {{0}}}}")
            continue
        if path == ("memory",):
            value = [value["total"], value["reserved"], value["free"]]
        values = value if isinstance(value, list) else [value]
        numbers = ", ".join(str(NO_VALUE if v is None else v) for v in values) or "0"
        cells.append(f"{{0, {len(values)}, {{{numbers}}}}}")
    return ", ".join(cells)


def quoted(text: str) -> str:
    """A C string: every byte that is not plain in octal, which ends after three digits."""
    raw = text.encode("utf-8", "surrogateescape")
    plain = [f"\\{b:03o}" if b < 32 or b > 126 or b in b'"\\' else chr(b) for b in raw]
    return '"' + "".join(plain) + '"'


if __name__ == "__main__":
    sys.stdout.write(f"{build(sys.argv[1], Path(sys.argv[2]))}\n")
