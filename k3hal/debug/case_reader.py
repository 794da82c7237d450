"""Turns the parts of a `.k3case` file into a case, believing none of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from k3hal.debug.case import Case
from k3hal.debug.memory import place
from k3hal.dispatch.call import PHASES, Phase
from k3hal.dispatch.host import host_memory
from k3hal.dispatch.operator import Operator
from k3hal.dispatch.registry import get_operator, operator_names
from k3hal.dispatch.words import nearest
from k3hal.errors import InputError

_SCHEMA, _MAJOR = "k3hal.case", "1"
_PLAIN = (int, float, str, bool, type(None))
_DTYPES = ("bfloat16", "float32")
_LIMIT = 1 << 63
_MAX_AXES = 16
_MAX_BLOCK = 1 << 40
_UNCOVERED = 0xFF


def read_case(where: str, data: Any, values: Mapping[str, Tensor]) -> Case:
    """The case in `case.json` (parsed) with the tensors beside it. Raises `InputError` that begins with `where`."""
    return _Reader(where, values).case(data)


@dataclass(frozen=True, slots=True)
class _Reader:
    where: str
    values: Mapping[str, Tensor]

    def fail(self, what: str, hint: str = "") -> NoReturn:
        raise InputError(f"{self.where}: case.json: {what}", hint=hint)

    def case(self, data: Any) -> Case:
        if not isinstance(data, dict):
            self.fail("not a JSON object")
        name, _, version = self.text(data, "schema").partition("/")
        if name != _SCHEMA or version.partition(".")[0] != _MAJOR:
            self.fail(f"schema is {data['schema']!r}", hint=f"this version reads {_SCHEMA}/{_MAJOR}")
        op = self.text(data, "op")
        if op not in operator_names():
            self.fail(f"unknown operator {op!r}", hint=nearest(op, operator_names()))
        operator = get_operator(op)
        arguments = self.object(data, "arguments")
        if set(arguments) != set(operator.parameters):
            odd = sorted(set(arguments) ^ set(operator.parameters))
            self.fail(f"the arguments are not those of {op}: {', '.join(odd)}")
        blocks = self.blocks(data.get("blocks"))
        args = {parameter: self.argument(parameter, arguments[parameter], blocks) for parameter in operator.parameters}
        recorded = data.get("recorded", [])
        if not isinstance(recorded, list) or any(output not in operator.outputs for output in recorded):
            self.fail(f"'recorded' is not a list of outputs of {op}")
        seed = data.get("seed")
        if seed is not None and (type(seed) is not int or not 0 <= seed < _LIMIT):
            self.fail("'seed' is not an integer from 0 to 2^63 - 1")
        tags = data.get("tags", [])
        if not isinstance(tags, list) or any(not isinstance(tag, str) for tag in tags):
            self.fail("'tags' is not a list of words")
        return Case(
            op,
            self.text(data, "name"),
            self.activations(self.text(data, "dtype")),
            args,
            self.phase(self.text(data, "phase")),
            self.dims(data, operator),
            seed,
            frozenset(tags),
            self.object(data, "origin"),
            {output: self.stored(f"recorded/{output}") for output in recorded},
        )

    def activations(self, word: str) -> str:
        if word not in _DTYPES:
            self.fail(f"dtype is {word!r}", hint=f"one of {', '.join(_DTYPES)}")
        return word

    def dims(self, data: Mapping[str, Any], operator: Operator) -> dict[str, Any]:
        """The dims, each of a type that the operator's samples give it, and enough to tell its parts by."""
        if "dims" not in data:
            self.fail("'dims' is missing")
        dims, kinds = self.object(data, "dims"), _kinds(operator)
        for name, value in dims.items():
            known = kinds.get(name, _PLAIN)
            if type(value) not in known:
                self.fail(f"'dims': {name} is {str(value)[:40]!r}, not {'/'.join(kind.__name__ for kind in known)}")
            if isinstance(value, int | float) and not 0 <= value < _LIMIT:
                self.fail(f"'dims': {name} is {str(value)[:40]}, not from 0 to 2^63 - 1")
        try:
            operator.parts_of(dims)
        except KeyError as error:
            self.fail(f"'dims': no {error} as {operator.name} needs")
        return dims

    def blocks(self, sizes: Any) -> list[Tensor]:
        if not isinstance(sizes, list) or any(type(n) is not int or not 0 < n <= _MAX_BLOCK for n in sizes):
            self.fail("'blocks' is not a list of sizes in bytes")
        if sum(sizes) > host_memory()[0]:
            raise InputError(f"{self.where}: case.json: its blocks of {sum(sizes) / 1e9:.1f} GB do not fit into memory")
        try:
            return [torch.full((size,), _UNCOVERED, dtype=torch.uint8) for size in sizes]
        except RuntimeError as error:
            raise InputError(f"{self.where}: its {sum(sizes) / 1e9:.1f} GB do not fit into memory") from error

    def argument(self, name: str, entry: Any, blocks: list[Tensor]) -> Any:
        if not isinstance(entry, dict) or len({"value", "torch_dtype", "tensor"} & set(entry)) != 1:
            self.fail(f"argument {name} is neither a value nor a tensor")
        if "torch_dtype" in entry:
            return self.dtype(name, entry["torch_dtype"])
        if "value" in entry:
            if not isinstance(entry["value"], _PLAIN):
                self.fail(f"argument {name} is no plain value")
            return entry["value"]
        dtype = self.dtype(name, entry.get("dtype"))
        shape, strides = (self.sizes(name, entry, key) for key in ("shape", "strides"))
        if len(shape) != len(strides):
            self.fail(f"argument {name} has {len(shape)} axes and {len(strides)} strides")
        if math.prod(max(n, 1) for n in shape) * dtype.itemsize > _MAX_BLOCK:
            self.fail(f"argument {name}: 'shape' is larger than any memory")
        stored = self.stored(str(entry["tensor"]))
        once = [1 if stride == 0 and size > 1 else size for size, stride in zip(shape, strides, strict=True)]
        if stored.dtype is not dtype or list(stored.shape) != once:
            self.fail(f"argument {name} is {dtype} {once}, its stored values {stored.dtype} {list(stored.shape)}")
        if not stored.numel():
            return torch.empty_strided(shape, strides, dtype=dtype)
        return self.placed(name, entry, stored, (shape, strides), blocks)

    def dtype(self, name: str, word: Any) -> torch.dtype:
        found = getattr(torch, str(word), None)
        if not isinstance(found, torch.dtype):
            self.fail(f"argument {name} has dtype {word!r}")
        return found

    def placed(
        self, name: str, entry: Mapping[str, Any], stored: Tensor, layout: tuple[list[int], list[int]], blocks: Any
    ) -> Tensor:
        """The argument where it lies in its block, holding its stored values."""
        shape, strides = layout
        block, offset, width = entry.get("block"), entry.get("offset"), stored.element_size()
        if type(block) is not int or not 0 <= block < len(blocks) or type(offset) is not int or offset < 0:
            self.fail(f"argument {name} lies in no block")
        reach = offset + width * (1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)))
        if offset % width or reach > blocks[block].numel():
            self.fail(f"argument {name} does not lie inside its block")
        once = place(blocks[block], offset, stored.dtype, stored.shape, strides)
        try:
            once.copy_(stored)
        except RuntimeError as error:
            raise InputError(f"{self.where}: case.json: argument {name} overlaps itself") from error
        return once.expand(shape)

    def sizes(self, name: str, entry: Mapping[str, Any], key: str) -> list[int]:
        value = entry.get(key)
        if not isinstance(value, list) or len(value) > _MAX_AXES or any(type(n) is not int or n < 0 for n in value):
            self.fail(f"argument {name}: {key!r} is not a list of sizes")
        if any(n > _MAX_BLOCK for n in value):
            self.fail(f"argument {name}: {key!r} reaches beyond any memory")
        return value

    def stored(self, name: str) -> Tensor:
        if name not in self.values:
            self.fail(f"{name} is not in tensors.safetensors")
        return self.values[name]

    def phase(self, word: str) -> Phase:
        for phase in PHASES:
            if phase == word:
                return phase
        return self.fail(f"phase is {word!r}", hint=f"one of {', '.join(PHASES)}")

    def text(self, data: Mapping[str, Any], key: str) -> str:
        if not isinstance(data.get(key), str):
            self.fail(f"{key!r} is {'not a string' if key in data else 'missing'}")
        return data[key]

    def object(self, data: Mapping[str, Any], key: str) -> dict[str, Any]:
        value = data.get(key, {})
        if not isinstance(value, dict):
            self.fail(f"{key!r} is not an object")
        return value


def _kinds(operator: Operator) -> dict[str, set[type]]:
    """The types each dim has in the operator's samples; a dim that none of them has may be any plain value."""
    out: dict[str, set[type]] = {}
    for sample in operator.samples():
        for name, value in sample.dims.items():
            out.setdefault(name, set()).add(type(value))
    return out
