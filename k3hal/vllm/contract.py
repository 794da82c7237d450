"""The plugin's side of vLLM's API against a recorded one: names what moved. `python -m k3hal.vllm.contract --help`."""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3hal.errors import InputError
from k3hal.vllm.compat import SUPPORTED, USES, Use, minor_of
from k3hal.vllm.signatures import SourceTree, Symbol, bind_problem, parameters_of

SCHEMA = "k3hal.vllm_contract/1"
PACKAGE = Path(__file__).parent
CONTRACTS = PACKAGE / "contracts"


@dataclass(frozen=True, slots=True)
class Override:
    """A method of the plugin's that may stand in for one of vLLM's: `symbol` is the base's, `parameters` are ours."""

    symbol: str
    parameters: tuple[str, ...]
    where: str


@dataclass(frozen=True, slots=True)
class Needs:
    """What the plugin needs of vLLM. `imports` maps a symbol to the file that imports it."""

    uses: tuple[Use, ...]
    imports: Mapping[str, str]
    overrides: tuple[Override, ...]

    def symbols(self) -> list[str]:
        names = {use.symbol for use in self.uses} | set(self.imports) | {o.symbol for o in self.overrides}
        return sorted(names)


@dataclass(frozen=True, slots=True)
class Contract:
    """The recorded declarations of one vLLM version."""

    version: str
    symbols: Mapping[str, Symbol]

    def to_json(self) -> dict[str, Any]:
        symbols = {name: _spelled(symbol) for name, symbol in sorted(self.symbols.items())}
        return {"schema": SCHEMA, "version": self.version, "symbols": symbols}

    @classmethod
    def from_json(cls, data: Any, source: str) -> Contract:
        """Raises `InputError` for what is not a contract."""
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise InputError(f"{source} is not a recorded contract ({SCHEMA})")
        try:
            symbols = {name: _unspelled(text) for name, text in data["symbols"].items()}
            return cls(data["version"], symbols)
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{source} is a damaged contract: {error!r}") from None


def needs(folder: Path = PACKAGE, uses: Sequence[Use] = USES) -> Needs:
    """What the sources in `folder` import from vLLM and override of it, and the declared uses."""
    imports: dict[str, str] = {}
    overrides: list[Override] = []
    for file in sorted(folder.glob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"), str(file))
        names = dict(_imports(tree))
        imports.update((symbol, file.name) for symbol in names.values())
        overrides.extend(_overrides(tree, names, file.name))
    return Needs(tuple(uses), imports, tuple(overrides))


def record(root: Path, version: str, wanted: Needs) -> Contract:
    """The declarations of what is `wanted`, from the folder that holds `vllm/`; what is missing there is left out."""
    tree = SourceTree(root)
    found = ((name, tree.symbol(name)) for name in wanted.symbols())
    return Contract(version, {name: symbol for name, symbol in found if symbol is not None})


def load_contracts(folder: Path = CONTRACTS) -> list[Contract]:
    """The committed contracts, oldest version first."""
    files = sorted(folder.glob("*.json"))
    return [Contract.from_json(json.loads(file.read_text(encoding="utf-8")), file.name) for file in files]


def problems(contract: Contract, wanted: Needs, overridden: frozenset[str] = frozenset()) -> list[str]:
    """What of `wanted` the contract does not give, one line each. `overridden`: methods that some version has and ours
    stand in for, so that one that is gone is noticed."""
    lines: list[str] = []
    for name, file in wanted.imports.items():
        if name not in contract.symbols:
            lines.append(f"{name} is gone from vLLM {contract.version} (imported in k3hal/vllm/{file})")
    for use in wanted.uses:
        symbol = contract.symbols.get(use.symbol)
        if symbol is None:
            lines.append(f"{use.symbol} is gone from vLLM {contract.version}")
        elif use.positional is not None and symbol.parameters is not None:
            problem = bind_problem(_unbound(symbol), use.positional, use.keywords)
            if problem:
                lines.append(f"{use.symbol} of vLLM {contract.version}: {problem}")
    for override in wanted.overrides:
        lines += _override_problems(contract, override, overridden)
    return sorted(set(lines))


def _override_problems(contract: Contract, override: Override, overridden: frozenset[str]) -> Iterator[str]:
    symbol = contract.symbols.get(override.symbol)
    if symbol is None:
        if override.symbol in overridden:
            yield f"{override.symbol} is gone from vLLM {contract.version}, so {override.where} overrides nothing"
        return
    if symbol.parameters is None:
        return
    theirs = [p.removesuffix("=") for p in _unbound(symbol) if not p.startswith("*") and p != "/"]
    problem = bind_problem(override.parameters[1:], 0, theirs)
    if problem:
        yield f"{override.symbol} of vLLM {contract.version} is not what {override.where} stands in for: {problem}"


def _spelled(symbol: Symbol) -> str:
    """`attribute`, or `method(self, x, y=)`."""
    return symbol.kind if symbol.parameters is None else f"{symbol.kind}({', '.join(symbol.parameters)})"


def _unspelled(text: str) -> Symbol:
    kind, opened, rest = text.partition("(")
    return Symbol(kind, tuple(filter(None, rest.removesuffix(")").split(", "))) if opened else None)


def _unbound(symbol: Symbol) -> tuple[str, ...]:
    """Parameters without `self` or `cls`."""
    parameters = symbol.parameters or ()
    return parameters if symbol.kind in ("function", "staticmethod") else parameters[1:]


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The local name and the symbol of everything imported from vLLM, wherever in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "vllm":
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}:{alias.name}"


def _overrides(tree: ast.Module, names: Mapping[str, str], file: str) -> Iterator[Override]:
    for owner in ast.walk(tree):
        if not isinstance(owner, ast.ClassDef):
            continue
        bases = [names[b.id] for b in map(_unsubscripted, owner.bases) if isinstance(b, ast.Name) and b.id in names]
        for item in owner.body:
            if not isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            for base in bases:
                yield Override(f"{base}.{item.name}", parameters_of(item.args), f"{owner.name}.{item.name} in {file}")


def _unsubscripted(node: ast.expr) -> ast.expr:
    return node.value if isinstance(node, ast.Subscript) else node


def main(argv: Sequence[str] | None = None) -> int:
    """Check vLLM's sources, or record them. Returns the exit code: 1 where something moved."""
    parser = argparse.ArgumentParser(prog="python -m k3hal.vllm.contract", description=__doc__)
    parser.add_argument("root", type=Path, help="folder that holds vllm/: site-packages, or an unpacked wheel")
    parser.add_argument("--record", metavar="VERSION", help="write contracts/VERSION.json, after a look at the diff")
    asked = parser.parse_args(argv)
    if not (asked.root / "vllm" / "__init__.py").is_file():
        print(f"error: {asked.root} holds no vllm/ package", file=sys.stderr)
        return 4
    if asked.record and minor_of(asked.record) not in SUPPORTED:
        print(f"error: {asked.record} is none of {', '.join(SUPPORTED)}", file=sys.stderr)
        return 4
    try:
        return _checked(asked.root, asked.record)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _checked(root: Path, version: str | None) -> int:
    """Print what moved in the vLLM below `root`, which is recorded first if it is given a `version`."""
    wanted = needs()
    contract = record(root, version or str(root), wanted)
    if version:
        _write(CONTRACTS / f"vllm-{minor_of(version)}.json", contract)
    overridden = frozenset(name for known in load_contracts() for name in known.symbols)
    moved = problems(contract, wanted, overridden)
    print("\n".join(moved) or f"{len(contract.symbols)} symbols as the plugin needs them")
    return 1 if moved else 0


def _write(file: Path, contract: Contract) -> None:
    try:
        file.write_text(json.dumps(contract.to_json(), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        hint = "record in a checkout that you may write to"
        raise InputError(f"{file} cannot be written: {error.strerror}", hint=hint) from None


if __name__ == "__main__":
    sys.exit(main())
