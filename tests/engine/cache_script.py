"""Random scripts for an engine with its prefix cache on: conversations, resends, edits, aborts, failures."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from k3hal.engine.cache.policies import make_policy
from k3hal.engine.core import FAILED_STEPS_UNTIL_DEAD
from k3hal.engine.interface import PrefixContext
from k3hal.errors import K3HALError
from k3hal.sampling_params import SamplingParams

from .cache_audit import audit
from .fold_model import VOCAB
from .harness import Harness, greedy_by_hand

Action = tuple[Any, ...]
POLICIES = ("none", "prompt", "second-hit", "interval:4", "interval:12", "cost")
POISON = VOCAB - 1
_MODEL_LEN = 64


@dataclass(frozen=True)
class Script:
    """A harness's sizes and what to do to it."""

    sizes: dict[str, Any]
    actions: tuple[Action, ...]


def random_script(seed: int) -> Script:
    rng = random.Random(seed)
    page_tokens = rng.choice([4, 4, 3, 8])
    sizes = {
        "page_tokens": page_tokens,
        "match_unit": rng.choice([page_tokens, page_tokens, 2 * page_tokens, 2, 3, 5]),
        "num_runs": rng.choice([7, 8, 9, 12, 12, 30, 30]),
        "max_num_seqs": rng.choice([1, 3, 5]),
        "max_num_batched_tokens": rng.choice([6, 11, 24, 64]),
        "policy": rng.choice(POLICIES[1:]),
        "async_depth": rng.choice([1, 1, 2, 3]),
        "graphs": random.Random(f"graphs {seed}").random() < 0.3,
        "drafts": rng.choice([0, 0, 1, 3, 7]),
        "wrong_drafts": rng.choice([1, 2, 5, 1000]),
    }
    return Script(sizes, tuple(_random_action(rng) for _ in range(30)))


def _random_action(rng: random.Random) -> Action:
    roll = rng.random()
    priority, count = rng.choice([0, 0, 0, 1]), rng.choice([1, 2, 4, 8, 16, 24])
    if roll < 0.25:
        shared = [rng.randint(2, 4) for _ in range(rng.randint(0, 3))]
        return "new", (tuple(shared), rng.randint(0, 20), rng.randint(1, 12), rng.randint(0, 99)), count, priority
    if roll < 0.50:
        return "turn", rng.random(), tuple(_tokens(rng, rng.randint(1, 9))), count, priority
    if roll < 0.60:
        return "again", rng.random(), count, priority
    if roll < 0.68:
        return "edit", rng.random(), rng.random(), rng.randint(2, VOCAB - 2), count, priority
    if roll < 0.73:
        return "abort", rng.random()
    if roll < 0.76:
        return ("fail",)
    if roll < 0.79:
        return "poison", rng.random(), count
    if roll < 0.81:
        return "policy", rng.choice(POLICIES)
    return "steps", rng.randint(1, 14)


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randint(2, VOCAB - 2) for _ in range(count)]


@dataclass
class Run:
    """A script under way."""

    script: Script
    change: Callable[[Harness], None] | None = None
    prompts: dict[str, tuple[list[int], SamplingParams]] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)
    failures: int = 0

    def __post_init__(self) -> None:
        self.harness = Harness(max_model_len=_MODEL_LEN, **self.script.sizes)
        self.harness.model.poison = {POISON}
        if self.change:
            self.change(self.harness)

    def play(self) -> Run:
        """Run everything to its end, or to the engine's, and compare all of it. Raises `AssertionError`."""
        for action in self.script.actions:
            getattr(self, "_" + action[0])(*action[1:])
            self.harness.step()
            self.look()
            if self.harness.core.dead:
                break
        self.harness.run()
        self._check()
        if self.harness.core.dead:  # it leaves its rows as they are
            assert self.failures >= FAILED_STEPS_UNTIL_DEAD
        else:
            self.harness.assert_clean()
        return self

    def look(self) -> None:
        audit(self.harness.cache)

    def _new(self, text: tuple[tuple[int, ...], int, int, int], count: int, priority: int) -> None:
        shared, common, own, seed = text
        rng = random.Random(seed)
        self._add([*shared * 3, *range(2, 2 + common), *_tokens(rng, own)], count, priority)

    def _turn(self, which: float, tokens: tuple[int, ...], count: int, priority: int) -> None:
        if name := self._pick(which):
            self._add([*self.prompts[name][0], *self.harness.tokens(name), *tokens], count, priority)

    def _again(self, which: float, count: int, priority: int) -> None:
        if name := self._pick(which):
            self._add(self.prompts[name][0], count, priority)

    def _edit(self, which: float, where: float, token: int, count: int, priority: int) -> None:
        if name := self._pick(which):
            prompt = [*self.prompts[name][0], *self.harness.tokens(name)]
            prompt[int(where * len(prompt))] = token
            self._add(prompt, count, priority)

    def _poison(self, which: float, count: int) -> None:
        if name := self._pick(which):
            self._add([*self.prompts[name][0], POISON], count, 0)

    def _abort(self, which: float) -> None:
        if name := self._pick(which):
            ended = self.harness.keep(self.harness.core.abort([name]))
            self.aborted.update(output.request_id for output in ended)

    def _fail(self) -> None:
        self.harness.model.fail_next = 1
        self.failures += 1

    def _policy(self, name: str) -> None:
        self.harness.cache.use(make_policy(name))

    def _steps(self, count: int) -> None:
        for _ in range(count):
            self.harness.step()

    def _pick(self, which: float) -> str | None:
        names = list(self.prompts)
        return names[int(which * len(names))] if names else None

    def _add(self, prompt: list[int], count: int, priority: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        name = f"r{len(self.prompts)}"
        context = PrefixContext(boundaries=(len(prompt) // 3, len(prompt) // 2))
        try:
            self.harness.add(name, prompt, params, priority, context)
        except K3HALError:
            return
        self.prompts[name] = prompt, params

    def _check(self) -> None:
        failed = 0
        for name, (prompt, params) in self.prompts.items():
            expected = greedy_by_hand(prompt, params, _MODEL_LEN - len(prompt), frozenset({POISON}))
            got = self.harness.tokens(name), self.harness.reason(name)
            error = self.harness.outputs[name][-1].error or ""
            if name in self.aborted:
                assert got[0] == expected[0][: len(got[0])], name
            elif "simulated" in error:
                failed += 1
                assert got[0] == expected[0][: len(got[0])], name
            else:
                assert got == expected, (name, prompt, error)
        assert not failed or self.failures


def shrink(script: Script, fails: Callable[[Script], bool]) -> Script:
    """A script that still fails and from which no action can be left out."""
    size = len(script.actions) // 2
    while size:
        at = 0
        while at < len(script.actions):
            shorter = Script(script.sizes, script.actions[:at] + script.actions[at + size :])
            if fails(shorter):
                script = shorter
            else:
                at += size
        size //= 2
    return script


@dataclass
class Totals:
    """What many scripts tried together."""

    steps: int = 0
    cached: int = 0
    resumed: int = 0
    evicted: int = 0
    preempted: int = 0
    accepted: int = 0
    rejected: int = 0
    ahead: int = 0
    surplus: int = 0

    def add(self, run: Run) -> None:
        stats, harness = run.harness.cache.stats, run.harness
        self.steps += harness.steps
        self.accepted += harness.model.accepted
        self.rejected += harness.drafted - harness.model.accepted
        self.ahead += harness.ahead
        self.surplus += harness.surplus
        self.cached += stats.cached_tokens
        self.resumed += stats.resumed_cached_tokens
        self.evicted += stats.snapshots_evicted
        self.preempted += run.harness.scheduler.preemptions


def play_many(seeds: range, steps: int) -> Totals:
    """Scripts from `seeds` on until they made `steps` steps. A failure is raised as the smallest script that fails."""
    totals = Totals()
    for seed in seeds:
        script = random_script(seed)
        try:
            totals.add(Run(script).play())
        except Exception as error:
            smallest = shrink(script, lambda candidate: fails(candidate, None))
            raise AssertionError(f"seed {seed} fails as {smallest}") from error
        if totals.steps >= steps:
            break
        if seed % 25 == 0:
            gc.collect()  # engines are cycles of few objects and many bytes: the collector does not see the hurry
    return totals


def fails(script: Script, change: Callable[[Harness], None] | None) -> bool:
    """Whether a script ends in anything but the right outputs."""
    try:
        Run(script, change).play()
    except Exception:  # noqa: BLE001
        return True
    return False
