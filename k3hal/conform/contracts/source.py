"""The files of a library, wherever it lies: a folder, a wheel or source archive, or an installed package."""

from __future__ import annotations

import re
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from k3hal.errors import InputError, UsageError

TEXTS = (".py", ".pyi", ".txt", ".cpp", ".cc", ".cu", ".h", ".hpp", ".yaml", ".yml")
_METADATA = re.compile(r"(?:^|/)[^/]+\.dist-info/METADATA$|^[^/]+/PKG-INFO$")
_LARGEST = 16 << 20
"""Bytes; what is larger is no source."""


@dataclass(frozen=True, slots=True)
class Source:
    """Text files by path, and the version that the library says it has; empty where it says none.

    `package` is the installed distribution's name, empty for a source that is not installed.
    """

    where: str
    version: str
    paths: tuple[str, ...]
    text: Callable[[str], str]
    package: str = ""

    def module(self, name: str) -> str | None:
        """The path of a module's file; None without one. Of several the one nearest to the top."""
        stem = name.replace(".", "/")
        ends = (f"{stem}.py", f"{stem}/__init__.py")
        found = [path for path in self.paths if any(path == end or path.endswith(f"/{end}") for end in ends)]
        return min(found, key=lambda path: (path.count("/"), path), default=None)


@contextmanager
def opened(where: str) -> Iterator[Source]:
    """A source by path, else by the name of an installed package.

    Raises `InputError` for a file that is no archive or text, `UsageError` for what is neither a path nor installed.
    """
    path = Path(where)
    if path.is_dir():
        yield _folder(path)
    elif path.is_file():
        with _file(path) as source:
            yield source
    else:
        yield _installed(where)


def _folder(root: Path, version: str = "") -> Source:
    paths = tuple(p.relative_to(root).as_posix() for p in sorted(root.rglob("*")) if _is_text(p) and p.is_file())
    return Source(str(root), version, paths, lambda path: _decoded((root / path).read_bytes(), path))


def _is_text(path: Path) -> bool:
    return path.suffix in TEXTS


@contextmanager
def _file(path: Path) -> Iterator[Source]:
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                sizes = {info.filename: info.file_size for info in archive.infolist()}
                yield _archive(path, sizes, archive.read)
        elif tarfile.is_tarfile(path):
            with tarfile.open(path) as archive:
                members = {m.name.removeprefix("./"): m for m in archive.getmembers() if m.isfile()}

                def read(name: str) -> bytes:
                    file = archive.extractfile(members[name])
                    assert file is not None, "only regular files are listed"
                    return file.read()

                yield _archive(path, {name: m.size for name, m in members.items()}, read)
        elif _is_text(path):
            yield Source(str(path), "", (path.name,), lambda _: _decoded(path.read_bytes(), str(path)))
        else:
            raise InputError(f"{path} is no archive and no text", hint="a wheel, a .tar.gz, or torch schemas as .txt")
    except (OSError, zipfile.BadZipFile, tarfile.TarError, EOFError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error


def _archive(path: Path, sizes: dict[str, int], read: Callable[[str], bytes]) -> Source:
    version = ""
    for name in sorted(sizes):
        if _METADATA.search(name) and sizes[name] <= _LARGEST:
            lines = _decoded(read(name), name).split("\n\n", 1)[0].splitlines()
            version = next((line.partition(":")[2].strip() for line in lines if line.startswith("Version:")), version)
    texts = tuple(name for name in sorted(sizes) if _is_text(Path(name)) and sizes[name] <= _LARGEST)
    return Source(str(path), version, texts, lambda name: _decoded(read(name), f"{path}: {name}"))


def _installed(name: str) -> Source:
    try:
        found: Distribution = distribution(name)
    except (PackageNotFoundError, ValueError) as error:
        hint = "a folder, a wheel, a source archive, a text of torch schemas, or a package that is installed"
        raise UsageError(f"--from: {name!r} is no path and no installed package", hint=hint) from error
    files = {str(file): Path(str(file.locate())) for file in found.files or () if _is_text(Path(str(file)))}
    paths = tuple(sorted(path for path, at in files.items() if at.is_file()))
    return Source(
        f"{name} {found.version}",
        found.version,
        paths,
        lambda path: _decoded(files[path].read_bytes(), path),
        name,
    )


def _decoded(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{where} is not UTF-8: {error.reason} at byte {error.start}") from error
