"""The schemas of torch_npu's operators, one a line, read from its wheel on a machine without CANN.

    python ci/npu_schemas.py PYTHON FOLDER > schemas.txt

PYTHON is that of a virtual environment of its own that has torch, torch_npu, numpy and pyyaml: beside torch_npu, which
torch loads by itself, nothing else works. FOLDER receives stub libraries, each symbol of which returns 0: enough to
import torch_npu, which finds no device then. Needs `gcc`, `nm` and `readelf`. `k3hal conform contracts --refresh` reads
the file.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_PRINT = """
import torch, torch_npu
version = torch_npu.__version__
print(f"# torch_npu {version}")
for schema in sorted(map(str, torch._C._jit_get_all_schemas())):
    if schema.startswith("npu::"):
        print(schema)
"""
_ENVIRONMENT = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 4
    python, folder = Path(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    libraries = _libraries(python)
    for name in _missing(libraries):
        _stub(folder / name, _undefined(libraries))
    environment = {**os.environ, **_ENVIRONMENT, "LD_LIBRARY_PATH": str(folder)}
    done = subprocess.run([python, "-c", _PRINT], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"torch_npu cannot be imported:\n{done.stderr}", file=sys.stderr)
        return 3
    print(done.stdout, end="")
    return 0


def _libraries(python: Path) -> list[Path]:
    """torch_npu's own libraries but for the one of ATB, which is loaded on demand."""
    where = "import sysconfig; print(sysconfig.get_paths()['platlib'])"
    site = Path(subprocess.run([python, "-c", where], capture_output=True, text=True, check=True).stdout.strip())
    found = [*site.glob("torch_npu/lib/*.so"), *site.glob("torch_npu/_C*.so")]
    return [path for path in found if "atb" not in path.name]


def _missing(libraries: list[Path]) -> set[str]:
    """Libraries that are needed and CANN's."""
    needed = set()
    for path in libraries:
        for line in _output("readelf", "-d", str(path)).splitlines():
            if "(NEEDED)" in line:
                needed.add(line.partition("[")[2].rstrip("]"))
    return {name for name in needed if name.startswith(("libhccl", "libascendcl", "libacl", "libge_", "libgraph"))}


def _undefined(libraries: list[Path]) -> set[str]:
    """Symbols that neither these libraries have, nor those of torch, the system or Python: CANN's."""
    wanted = {name for path in libraries for name in _symbols(path, "--undefined-only")}
    defined = {name for path in (*libraries, *_beside(libraries)) for name in _symbols(path, "--defined-only")}
    return {name for name in wanted - defined if not name.startswith(("Py", "_Py", "__"))}


def _beside(libraries: list[Path]) -> set[Path]:
    """torch's libraries, and the system's that any of them needs."""
    package = next(path for path in libraries if path.name.startswith("libtorch_npu")).parents[1]
    found = set((package.parent / "torch" / "lib").glob("*.so*"))
    for path in libraries:
        lines = (line.partition("=>")[2].split() for line in _output("ldd", str(path)).splitlines())
        found |= {Path(line[0]) for line in lines if line and line[0].startswith("/")}
    return found


def _symbols(path: Path, which: str) -> list[str]:
    lines = (line.split() for line in _output("nm", "-D", which, str(path)).splitlines())
    return [line[-1].partition("@")[0] for line in lines if line]


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _stub(path: Path, symbols: set[str]) -> None:
    """A library in which every symbol is a function that returns 0."""
    lines = [".text", "zero: xor %eax, %eax", "ret"]
    for name in sorted(symbols):
        lines += [f".globl {name}", f".type {name}, @function", f".set {name}, zero"]
    command = ["gcc", "-shared", "-x", "assembler", "-nostdlib", f"-Wl,-soname,{path.name}", "-o", str(path), "-"]
    subprocess.run(command, input="\n".join(lines) + "\n", text=True, check=True)


if __name__ == "__main__":
    sys.exit(main())
