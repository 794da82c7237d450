"""The files of a library, wherever it lies: a folder, a wheel or source archive, or an installed package."""

from __future__ import annotations

import lzma
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from io import BytesIO
from pathlib import Path
from tokenize import detect_encoding

from k3hal.errors import InputError, UsageError

TEXTS = (".py", ".pyi", ".txt", ".cpp", ".cc", ".cu", ".h", ".hpp", ".yaml", ".yml")
_METADATA = re.compile(r"(?:^|/)[^/]+\.dist-info/METADATA$|^[^/]+/PKG-INFO$")
_UNREADABLE = (OSError, EOFError, RuntimeError, zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError)
"""What archives' modules raise; RuntimeError is that of a zip file with a password, or a method that Python lacks."""
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
    return Source(str(root), version, paths, lambda path: _decoded((root / path).read_bytes, path))


def _is_text(path: Path) -> bool:
    return path.suffix in TEXTS


@contextmanager
def _file(path: Path) -> Iterator[Source]:
    with ExitStack() as kept:
        with _readable(str(path)):
            source = _file_source(path, kept)
        yield source


def _file_source(path: Path, kept: ExitStack) -> Source:
    """The source in a file, which stays open as long as `kept`."""
    if zipfile.is_zipfile(path):
        zipped = kept.enter_context(zipfile.ZipFile(path))
        return _archive(path, {info.filename: info.file_size for info in zipped.infolist()}, zipped.read)
    if tarfile.is_tarfile(path):
        archive = kept.enter_context(tarfile.open(path))  # noqa: SIM115 - that is its context
        members = {m.name.removeprefix("./"): m for m in archive.getmembers() if m.isfile()}

        def read(name: str) -> bytes:
            file = archive.extractfile(members[name])
            assert file is not None, "only regular files are listed"
            return file.read()

        return _archive(path, {name: m.size for name, m in members.items()}, read)
    if _is_text(path):
        return Source(str(path), "", (path.name,), lambda _: _decoded(path.read_bytes, str(path)))
    raise InputError(f"{path} is no archive and no text", hint="a wheel, a .tar.gz, or torch schemas as .txt")


@contextmanager
def _readable(where: str) -> Iterator[None]:
    """Raise `InputError` for a file that may not be read, or whose archive is damaged or locked."""
    try:
        yield
    except _UNREADABLE as error:
        raise InputError(f"{where} cannot be read: {error}") from error


def _archive(path: Path, sizes: dict[str, int], read: Callable[[str], bytes]) -> Source:
    version = ""
    for name in sorted(sizes):
        if _METADATA.search(name) and sizes[name] <= _LARGEST:
            lines = _decoded(partial(read, name), name).split("\n\n", 1)[0].splitlines()
            version = next((line.partition(":")[2].strip() for line in lines if line.startswith("Version:")), version)
    texts = tuple(name for name in sorted(sizes) if _is_text(Path(name)) and sizes[name] <= _LARGEST)
    return Source(str(path), version, texts, lambda name: _decoded(partial(read, name), f"{path}: {name}"))


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
        lambda path: _decoded(files[path].read_bytes, path),
        name,
    )


def _decoded(read: Callable[[], bytes], where: str) -> str:
    """Text in UTF-8, or in the encoding that a Python source names in its first lines."""
    with _readable(where):
        content = read()
    try:
        encoding, _ = detect_encoding(BytesIO(content).readline)
        return content.decode(encoding)
    except SyntaxError as error:  # of its first two lines, or of the encoding's name
        raise InputError(f"{where} is not UTF-8: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{where} is not UTF-8: {error.reason} at byte {error.start}") from error
