"""Parts of a grammar that no text satisfies: an answer that enters one never comes to its end."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

FORM = "v18"
"""The form in which the compiler writes grammars that is read here; of any other nothing is known."""

_CLASS, _REFERENCE, _SEQUENCE, _CHOICES, _REPEAT = 1, 4, 5, 6, 8
_LAST_CHARACTER = 0x10FFFF


def dead_end(grammar: Any) -> str | None:
    """The rule of an xgrammar grammar, in use, that holds a part no finite text satisfies; None if there is none."""
    written = json.loads(grammar.serialize_json())
    if written["__VERSION__"] != FORM:
        return None
    parts = _Parts(written)
    ends = parts.ending()
    for rule in parts.used():
        if not all(ends[part] for part in parts.within(rule)):
            return parts.names[rule]
    return None


class _Parts:
    """A grammar as numbered expressions, each a kind and its operands, and rules, each with its body's number."""

    def __init__(self, written: Mapping[str, Any]) -> None:
        data = written["grammar_expr_data"]
        self.parts: list[tuple[int, Sequence[int]]] = []
        for start in written["grammar_expr_indptr"]:
            self.parts.append((data[start], data[start + 2 : start + 2 + data[start + 1]]))
        self.names = [rule[0] for rule in written["rules"]]
        self._bodies = [rule[1] for rule in written["rules"]]
        self._root = written["root_rule_id"]

    def ending(self) -> list[bool]:
        """Of each expression, whether some text satisfies it, from the inside out."""
        missing = [self._needs(kind, of) for kind, of in self.parts]
        holders: list[list[int]] = [[] for _ in self.parts]
        for i, (kind, of) in enumerate(self.parts):
            for part in self._operands(kind, of):
                holders[part].append(i)
        left = [i for i, needs in enumerate(missing) if needs == 0]
        for part in left:
            for holder in holders[part]:
                missing[holder] -= 1
                if missing[holder] == 0:
                    left.append(holder)
        return [needs <= 0 for needs in missing]

    def _needs(self, kind: int, of: Sequence[int]) -> int:
        """How many operands have to end before an expression does."""
        if kind == _CLASS:
            return 0 if _holds_a_character(of) else 1
        if kind == _SEQUENCE:
            return len(of)
        if kind == _REPEAT:
            return min(of[1], 1)
        return 1 if kind in (_REFERENCE, _CHOICES) else 0

    def _operands(self, kind: int, of: Sequence[int]) -> Sequence[int]:
        if kind in (_REFERENCE, _REPEAT):
            return (self._bodies[of[0]],)
        return of if kind in (_SEQUENCE, _CHOICES) else ()

    def within(self, rule: int) -> list[int]:
        """The expressions of a rule's body; those of rules it refers to are theirs."""
        found, left = [], [self._bodies[rule]]
        while left:
            part = left.pop()
            found.append(part)
            kind, of = self.parts[part]
            if kind in (_SEQUENCE, _CHOICES):
                left.extend(of)
        return found

    def used(self) -> list[int]:
        """The rules that the root leads to, itself first."""
        order, known = [self._root], {self._root}
        for rule in order:
            for part in self.within(rule):
                kind, of = self.parts[part]
                if kind in (_REFERENCE, _REPEAT) and of[0] not in known:
                    known.add(of[0])
                    order.append(of[0])
        return order


def _holds_a_character(of: Sequence[int]) -> bool:
    """Whether a character class, its negation and then the ends of its ranges, leaves any character."""
    ranges = sorted(zip(of[1::2], of[2::2], strict=True))
    if not of[0]:
        return any(low <= high for low, high in ranges)
    free = 0
    for low, high in ranges:
        if low > free:
            return True
        free = max(free, high + 1)
    return free <= _LAST_CHARACTER
