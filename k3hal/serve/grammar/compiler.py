"""Grammars compiled for a vocabulary by xgrammar, in threads of their own."""

from __future__ import annotations

import asyncio
import functools
import importlib.metadata
import json
import re
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from packaging.version import Version

from k3hal.engine.interface import Constraint, ConstraintError, DeadEndError, Matcher
from k3hal.errors import RequestError, UnsupportedError
from k3hal.serve.chat_prompt import ChatPrompt
from k3hal.serve.grammar.answers import Grammar, answer_grammar, is_constrained
from k3hal.serve.grammar.dead_ends import dead_end
from k3hal.tokenizer import Tokenizer

CACHED = 256
"""Compiled grammars that are kept; one takes from tens of kilobytes to some megabytes."""
_OLDEST = Version("0.2.9")
_THREADS = 2
_MOST_SPACE = 16
"""White space in a row within JSON that is not compact."""
# A character of a JSON string where its length is bounded, as xgrammar writes it, and as it has to be: no control
# characters, and no halves of surrogate pairs, which are no characters in UTF-8.
_BOUNDED_CHARACTER = r"""[^\"\\\r\n]"""
_JSON_CHARACTER = r"""[\x20-\x21\x23-\x5b\x5d-\ud7ff\ue000-\U0010ffff]"""
_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|.)", re.DOTALL)


class Constraints:
    """Constraints for the prompts of one model. `vocab_size` is the model's, which may exceed the tokenizer's."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, Future[Any]] = OrderedDict()
        self._asked: OrderedDict[str, Future[Any]] = OrderedDict()

    async def of(self, prompt: ChatPrompt) -> Constraint | None:
        """What `prompt` may be answered; None if that is anything. The event loop goes on meanwhile.

        Raises `RequestError` for output that cannot be enforced.
        """
        return await asyncio.to_thread(self.constraint, prompt) if is_constrained(prompt) else None

    def constraint(self, prompt: ChatPrompt) -> Constraint | None:
        """As `of`, for callers that wait."""
        if not is_constrained(prompt):
            return None
        try:
            compiled = self._begun(prompt).result()
        except RequestError as error:
            raise RequestError(error.message, param=prompt.constrained_by) from None
        constraint = _Compiled(compiled, prompt.prefill)
        constraint.check()
        return constraint

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _begun(self, prompt: ChatPrompt) -> Future[Any]:
        """The compilation for a prompt. What was asked for lately is found without writing its grammar again."""
        key = _asked(prompt)
        with self._lock:
            future = self._asked.get(key)
            if future is not None and not (future.done() and (future.cancelled() or future.exception())):
                self._asked.move_to_end(key)
                return future
        future = self._cached(answer_grammar(prompt, self._tokenizer))
        with self._lock:
            self._asked[key] = future
            if len(self._asked) > CACHED:
                self._asked.popitem(last=False)
        return future

    def _cached(self, grammar: Grammar) -> Future[Any]:
        """The compilation of a grammar, begun once however many ask for it at a time; a failed one is forgotten."""
        key = json.dumps([grammar.source, grammar.values])

        def forget(done: Future[Any]) -> None:
            if done.cancelled() or done.exception() is not None:
                with self._lock:
                    self._compiled.pop(key, None)

        with self._lock:
            future = self._compiled.get(key)
            if future is not None:
                self._compiled.move_to_end(key)
                return future
            future = self._compiled[key] = self._pool.submit(self._compile, grammar)
            if len(self._compiled) > CACHED:
                self._compiled.popitem(last=False)
        future.add_done_callback(forget)
        return future

    def _compile(self, grammar: Grammar) -> Any:
        xgrammar, info, compiler = self._compiler
        named: dict[str, Any] = {}
        try:
            for name, (kind, of) in grammar.values.items():
                named[name] = _named(xgrammar, kind, of)
                _check_ends(named[name])
                if kind == "grammar":
                    self._check_begins(_Matcher(xgrammar.GrammarMatcher(compiler.compile_grammar(named[name]))))
            source = xgrammar.Grammar.from_lark(grammar.source, tokenizer_info=info, named_grammars=named)
            return compiler.compile_grammar(source)
        except (RuntimeError, ValueError) as error:
            raise RequestError(f"the requested output cannot be enforced: {_reason(error):.300}") from None

    def _check_begins(self, matcher: Matcher) -> None:
        """Raise `RequestError` for a grammar that nothing can begin, such as one whose rules never end."""
        try:
            matcher.fill(np.empty((self._vocab_size + 31) // 32, np.int32))
        except ConstraintError as error:
            raise RequestError(f"the requested output cannot be enforced: {error}") from None

    @functools.cached_property
    def _compiler(self) -> tuple[Any, Any, Any]:
        """The module, the vocabulary as it knows it, and the compiler over that.

        Control tokens get bytes that no text holds, so that a grammar takes them only where it names their ids.
        """
        try:
            import xgrammar
        except ImportError as error:
            raise UnsupportedError(
                f"constrained output needs the package xgrammar, which cannot be imported: {error}",
                hint="install it: pip install xgrammar",
            ) from None
        found = importlib.metadata.version("xgrammar")
        if Version(found) < _OLDEST:
            raise UnsupportedError(
                f"constrained output needs xgrammar from {_OLDEST} on, and {found} is installed",
                hint="vLLM pins an older one: run `k3hal serve` in an environment of its own",
            )
        tokenizer = self._tokenizer
        ordinary = tokenizer.special_base
        names = (b"\xff" + tokenizer.token_bytes(i) for i in range(ordinary, tokenizer.vocab_size))
        vocabulary = [*(tokenizer.token_bytes(i) for i in range(ordinary)), *names]
        info = xgrammar.TokenizerInfo(
            vocabulary,
            xgrammar.VocabType.RAW,
            vocab_size=self._vocab_size,
            stop_token_ids=sorted(tokenizer.eos_ids),
        )
        return xgrammar, info, xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def _asked(prompt: ChatPrompt) -> str:
    """A text that is the same for prompts that ask for the same."""
    tools, form = prompt.tools, prompt.response_format
    functions = [tools.all[name] for name in tools.allowed]
    asked = [prompt.channel, functions, tools.choice, tools.parallel, form.kind, form.value, form.strict, form.param]
    try:
        return json.dumps(asked)
    except RecursionError:
        raise RequestError("the requested output is nested too deep to be enforced") from None


def _named(xgrammar: Any, kind: str, of: Any) -> Any:
    """The grammar of a value of `Rules`."""
    if kind == "regex":
        return xgrammar.Grammar.from_regex(of)
    return xgrammar.Grammar.from_ebnf(of) if kind == "grammar" else _json(xgrammar, *of)


def _check_ends(grammar: Any) -> None:
    """Raise `RequestError` for a grammar with a part that no text satisfies: an answer could begin it and never end."""
    rule = dead_end(grammar)
    if rule is not None:
        raise RequestError(
            f"the requested output cannot be enforced: nothing satisfies a part of its rule {rule!r:.100}"
        )


def _json(xgrammar: Any, schema: str, separators: tuple[str, str] | None) -> Any:
    """The grammar of a schema's values."""
    if separators is None:
        grammar = xgrammar.Grammar.from_json_schema(schema, max_whitespace_cnt=_MOST_SPACE)
    else:
        grammar = xgrammar.Grammar.from_json_schema(schema, any_whitespace=False, separators=tuple(separators))
    text = str(grammar)
    if _BOUNDED_CHARACTER not in text:
        return grammar
    return xgrammar.Grammar.from_ebnf(_ended_escapes(text).replace(_BOUNDED_CHARACTER, _JSON_CHARACTER))


def _ended_escapes(text: str) -> str:
    """A grammar as it is printed, with four digits where an escape has two: the parser reads on after two."""
    return _ESCAPE.sub(lambda found: f"\\u00{found[1]}" if found[1] else found[0], text)


def _reason(error: Exception) -> str:
    """What an error says, without the place in the compiler's own source that its message begins with."""
    return re.sub(r"^\[[\d:]+\] \S+: ", "", str(error).strip()).partition("\n")[0] or repr(error)


class _Compiled:
    """A compiled grammar, entered as far as the answer has already been given."""

    def __init__(self, compiled: Any, prefill: str) -> None:
        self._compiled = compiled
        self._prefill = prefill

    def check(self) -> None:
        """Raises `RequestError` if the answer given does not begin one that is allowed."""
        try:
            self.matcher()
        except ConstraintError:
            raise RequestError(
                "the message to be continued does not begin an answer in the requested format", param="messages"
            ) from None

    def matcher(self) -> Matcher:
        import xgrammar

        matcher = xgrammar.GrammarMatcher(self._compiled)
        if self._prefill and not matcher.accept_string(self._prefill):
            raise ConstraintError("the answer begins with what is not allowed")
        return _Matcher(matcher)


class _Matcher:
    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def fill(self, mask: np.ndarray) -> bool:
        """After the end of the answer anything may come: only who ignores the end token reads on."""
        if self._matcher.is_terminated():
            return False
        try:
            needed = self._matcher.fill_next_token_bitmask(mask.reshape(1, -1))
        except RuntimeError as error:
            raise ConstraintError(str(error).strip()) from None
        if needed and not mask.any():
            raise DeadEndError("the grammar allows nothing here")
        return needed

    def accept(self, token_id: int) -> None:
        if not self._matcher.is_terminated() and not self._matcher.accept_token(token_id):
            raise ConstraintError(f"token {token_id} is not allowed here")
