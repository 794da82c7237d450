"""The one override grammar: `GLOB=NAME[:TACTIC][,GLOB=NAME...]`, for `--ops` and `K3HAL_OPS`."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from k3hal.dispatch.errors import UsageError
from k3hal.dispatch.provider import RESERVED, Provider
from k3hal.dispatch.registry import Registry, operator_names
from k3hal.dispatch.words import nearest

_WILD = frozenset("*?[")


@dataclass(frozen=True, slots=True)
class Override:
    """One entry. `name` matches a provider's id, then its name, then its backend; `source` is shown in traces.

    `tactic` is the one to take, empty for whichever selection would.
    """

    pattern: str
    name: str
    source: str
    tactic: str = ""

    def __str__(self) -> str:
        return f"{self.source}: {self.pattern}={self.name}" + (f":{self.tactic}" if self.tactic else "")

    @property
    def exact(self) -> bool:
        """Whether the pattern names one operator, so that a missing provider is an error rather than no match."""
        return not _WILD & set(self.pattern)

    def covers(self, op: str) -> bool:
        return fnmatchcase(op, self.pattern)

    def pick(self, providers: list[Provider]) -> list[Provider]:
        """The providers the name means, by the first of id, name and backend that matches any."""
        for key in (lambda p: p.id, lambda p: p.name, lambda p: p.backend):
            if found := [p for p in providers if key(p) == self.name]:
                return found
        return []


def parse_overrides(text: str, source: str, registry: Registry) -> tuple[Override, ...]:
    """Parse a comma-separated list; later entries win over earlier ones.

    Raises `UsageError` for a malformed entry, a pattern that matches no operator or a name nothing carries, naming
    the nearest valid word.
    """
    out = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        pattern, sep, name = (piece.strip() for piece in entry.partition("="))
        if not sep or not pattern or not name:
            raise UsageError(f"{source}: {entry!r} is not GLOB=NAME", hint='like "kda_decode=reference,mla_*=cpu"')
        if not any(fnmatchcase(op, pattern) for op in operator_names()):
            raise UsageError(f"{source}: no operator matches {pattern!r}", hint=nearest(pattern, operator_names()))
        name, colon, tactic = name.partition(":")
        if name not in registry.provider_words():
            raise UsageError(f"{source}: no provider is called {name!r}", hint=_providers(pattern, name, registry))
        if colon and (not tactic or name in RESERVED):
            raise UsageError(f"{source}: {entry!r} names no tactic of a provider", hint='like "kda_chunk=cpu:chunk32"')
        out.append(Override(pattern, name, source, tactic))
    return tuple(out)


def _providers(pattern: str, name: str, registry: Registry) -> str:
    """The nearest word, and for one operator all that it has; words of other operators would lead nowhere."""
    if _WILD & set(pattern):
        return nearest(name, registry.provider_words())
    own = registry.of(pattern)
    close = nearest(name, {"reference", "composed", *(word for p in own for word in (p.id, p.name, p.backend))})
    listed = f"{pattern} has {', '.join(p.id for p in own) or 'none but reference'}"
    return f"{close} {listed}" if close.startswith("did you mean") else listed
