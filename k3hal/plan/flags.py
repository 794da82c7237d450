"""Command-line flags from several layers: the last one wins, at its own place, and what it overrode is kept.

Spellings are unified first: `--f=v` is `--f v`, `--max_model_len` is `--max-model-len`, `-tp` is
`--tensor-parallel-size`, and `--no-x` speaks of the same thing as `--x`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from k3hal.errors import UsageError

ALIASES = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpl": "--data-parallel-size-local",
    "-dpr": "--data-parallel-start-rank",
    "-dpa": "--data-parallel-address",
    "-dpp": "--data-parallel-rpc-port",
    "-dph": "--data-parallel-hybrid-lb",
    "-dcp": "--decode-context-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-n": "--nnodes",
    "-r": "--node-rank",
    "-q": "--quantization",
}
MANY = ("served-model-name", "lora-modules", "middleware", "api-key", "cudagraph-capture-sizes")
"""Keys of vLLM's flags that take several values."""

_NUMBER = re.compile(r"-\d+(\.\d+)?$")


@dataclass(frozen=True, slots=True)
class Layer:
    """Tokens that one source adds, `name` being what plans call it."""

    name: str
    args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Setting:
    """One flag of one layer; `value` None for a switch, `written` as it stood there, `rest` further values."""

    key: str
    flag: str
    value: str | None
    layer: str
    written: str
    rest: tuple[str, ...] = ()

    def tokens(self) -> list[str]:
        """As command-line tokens; a value that looks like a flag stays attached to its own."""
        if self.value is None:
            return [self.flag]
        if self.value.startswith("-"):
            return [f"{self.flag}={self.value}"]
        return [self.flag, self.value, *self.rest]

    @property
    def shown(self) -> str | None:
        """Every value, as one text."""
        return self.value if self.value is None else " ".join((self.value, *self.rest))


@dataclass(frozen=True, slots=True)
class Decision:
    """What stands of a flag, and the settings it overrode, oldest first."""

    chosen: Setting
    overrode: tuple[Setting, ...]

    def unified(self) -> tuple[Setting, ...]:
        """The overridden settings that are spelt differently: to a command line they would be other flags."""
        now = _spelling(self.chosen)
        return tuple(old for old in self.overrode if _spelling(old) != now)


def settle(layers: Iterable[Layer]) -> list[Decision]:
    """The flags that stand, in the order of their last occurrence. Raises `UsageError` for a token that is no flag."""
    history: dict[str, list[Setting]] = {}
    for layer in layers:
        for setting in settings(layer):
            history.setdefault(setting.key, [])
            history[setting.key] = [*history.pop(setting.key), setting]
    return [Decision(found[-1], tuple(found[:-1])) for found in history.values()]


def settings(layer: Layer) -> list[Setting]:
    """A layer's tokens in pairs: a flag takes the next token unless that one is a flag itself."""
    out, tokens = [], list(layer.args)
    while tokens:
        token = tokens.pop(0)
        if not token.startswith("-") or _NUMBER.match(token):
            hint = 'write --set "--flag value"' if layer.name == "--set" else "a flag begins with a dash"
            raise UsageError(f"{layer.name}: {token!r} is no flag", hint=hint)
        name, equals, value = token.partition("=")
        if not equals and tokens and (not tokens[0].startswith("-") or _NUMBER.match(tokens[0])):
            setting = _setting(name, tokens.pop(0), layer.name, name)
            while setting.key in MANY and tokens and not tokens[0].startswith("-"):
                setting = replace(setting, rest=(*setting.rest, tokens.pop(0)))
            out.append(setting)
        else:
            out.append(_setting(name, value if equals else None, layer.name, f"{name}=" if equals else name))
    return out


def argv_of(decisions: Sequence[Decision]) -> list[str]:
    return [token for decision in decisions for token in decision.chosen.tokens()]


def _setting(name: str, value: str | None, layer: str, written: str) -> Setting:
    flag = ALIASES.get(name, name).replace("_", "-")
    key = flag.lstrip("-").removeprefix("no-")
    return Setting(key, flag, value, layer, written)


def _spelling(setting: Setting) -> str:
    return setting.written
