"""The schemas of torch_npu's operators, one a line, read from its wheel without importing it.

    pip download --no-deps torch-npu==2.14.0
    python ci/npu_schemas.py torch_npu-2.14.0-*.whl > schemas.txt

They stand as text in the wheel's libraries, which nothing but CANN can load. `k3hal conform contracts --refresh --from
schemas.txt` takes them from there.
"""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

_SCHEMA = re.compile(rb"(?<![\w.:])(npu_\w+(?:\.\w+)?\([^\x00-\x1f\x7f-\xff]*?\) -> [^\x00-\x1f\x7f-\xff]+)\x00")


def schemas(wheel: Path) -> list[str]:
    """Every `npu_name(...) -> ...` of a wheel's libraries, sorted. Raises `BadZipFile` for what is no wheel."""
    with zipfile.ZipFile(wheel) as archive:
        libraries = [archive.read(name) for name in archive.namelist() if name.endswith(".so")]
    return sorted({found.decode() for library in libraries for found in _SCHEMA.findall(library)})


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 4
    wheel = Path(sys.argv[1])
    if not wheel.is_file() or not zipfile.is_zipfile(wheel):
        print(f"{wheel} is not a wheel", file=sys.stderr)
        return 4
    found = schemas(wheel)
    if not found:
        print(f"{wheel.name} has no schema of an npu_ operator", file=sys.stderr)
        return 1
    print(f"# {wheel.name}", *found, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
