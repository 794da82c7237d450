"""`k3hal conform contracts`: what is recorded of vendor libraries, against the libraries themselves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3hal.cli.common import Json
from k3hal.cli.output import print_json
from k3hal.errors import InputError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k3hal.dispatch.contracts import Library


def contracts(
    library: Annotated[
        str | None,
        typer.Option("--library", metavar="BACKEND/FILE", help="Only this contract file (nvidia/fla-core), or GLOB."),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="PATH|PACKAGE",
            help="A folder, wheel, source archive or text of torch schemas, or an installed package.  "
            "[default: what is installed]",
        ),
    ] = None,
    version: Annotated[
        str | None, typer.Option("--version", metavar="VERSION", help="The source's, where it does not say it itself.")
    ] = None,
    refresh: Annotated[bool, typer.Option("--refresh", help="Write what the source has into the file.")] = False,
    url: Annotated[
        str | None, typer.Option("--url", metavar="URL", help="Where the source is public; written with --refresh.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Compare the recorded contracts of vendor libraries with the libraries, and show what has drifted.

    Exits with 1 if something has, written back by `--refresh` or not; 2 if nothing could be compared.
    """
    from fnmatch import fnmatchcase

    if url is not None and not (refresh and url.startswith("https://")):
        raise UsageError(f"--url is {url!r}", hint="an https address, and with --refresh")
    files = _files()
    chosen = {name: file for name, file in files.items() if library is None or fnmatchcase(name, library)}
    if not chosen:
        from k3hal.dispatch.words import nearest

        raise UsageError(f"--library: there is no contract file {library!r}", hint=nearest(library or "", files))
    if (source or refresh) and len({_package(name, file) for name, file in chosen.items()}) > 1:
        raise UsageError("--from and --refresh are for one library", hint=f"--library, one of {', '.join(chosen)}")
    rows = [_compared(name, file, source, version, (url or "") if refresh else None) for name, file in chosen.items()]
    if as_json:
        print_json("k3hal.conform_contracts/1", {"libraries": rows})
    else:
        typer.echo("\n".join(line for row in rows for line in _lines(row)))
    functions = [one for row in rows for one in row["functions"]]
    if any(one["drifted"] for one in functions):
        return 1
    return 0 if any(one["status"] == "same" for one in functions) else 2


def _files() -> dict[str, Path]:
    """Contract files of every backend by `backend/file`."""
    from importlib import import_module

    from k3hal.dispatch.contracts import contract_files
    from k3hal.dispatch.registry import default_registry

    homes = {p.backend: p.fn.__module__ for p in default_registry().providers}
    out: dict[str, Path] = {}
    for backend, home in sorted(homes.items()):
        # A backend that is one module has no folder to keep them in.
        if package := import_module(home).__package__:
            out |= {f"{backend}/{name}": Path(str(file)) for name, file in contract_files(package).items()}
    return out


def _library(name: str, file: Path) -> Library:
    from k3hal.dispatch.contracts import parse_library

    return parse_library(file.read_text("utf-8"), f"{name} ({file})")


def _package(name: str, file: Path) -> str:
    return _library(name, file).package


def _compared(name: str, file: Path, source: str | None, version: str | None, url: str | None) -> dict[str, Any]:
    """One file against a source; written back, with the address `url` where it is not empty, unless `url` is None."""
    from k3hal.conform.contracts.drift import compare, refreshed
    from k3hal.conform.contracts.source import opened
    from k3hal.conform.contracts.write import library_text
    from k3hal.dispatch.packages import INSTALLED

    library = _library(name, file)
    row: dict[str, Any] = {"library": name, "package": library.package, "source": None, "version": version, "note": ""}
    where = source or (library.package if library.package in INSTALLED else None)
    if where is None:
        functions = dict.fromkeys(f"{record.module}:{record.name}" for record in library.records)
        note = f"{library.package} is not installed; recorded functions: {len(functions)}"
        return {**row, "note": note, "functions": []}
    with opened(where) as files:
        version = version or files.version
        found = list(compare(library, files, version))
        row |= {"source": files.where, "version": version or None}
    if url is not None:
        text = library_text(refreshed(library, found, version, url))
        try:
            file.write_text(text, "utf-8")
        except OSError as error:
            raise InputError(f"{file} cannot be written: {error.strerror}") from error
        row["note"] = f"{file} is written"
    return {**row, "functions": [{**one.to_json(), "drifted": one.drifted} for one in found]}


def _lines(row: dict[str, Any]) -> Iterator[str]:
    at = f" in {row['source']}" if row["source"] else ""
    yield f"{row['library']}{at}" + (f": {row['note']}" if row["note"] else "")
    for one in row["functions"]:
        yield f"    {one['status']:<14} {one['function']}  {one['versions']}".rstrip()
        yield from (f"        {change}" for change in one["changes"])
