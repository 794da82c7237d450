"""Random scripts for an engine with an external tier in which everything goes wrong."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from .cache_audit import audit
from .cache_script import Action, Run, Script, random_script, shrink
from .harness import Harness

FAULTS = (
    "slow_job", "lost_job", "slow_move", "failed_move", "repeated_end", "foreign_end", "damaged", "lost_object",
    "read_error", "write_error",
)  # fmt: skip


def random_tier_script(seed: int) -> Script:
    """A script of the cache's, over a tier, with device memory that forgets now and then."""
    base, rng = random_script(seed), random.Random(-1 - seed)
    chances = {name: rng.choice([0.05, 0.3]) for name in FAULTS if rng.random() < 0.3}
    chances["slow_job"] = chances["slow_move"] = rng.choice([0.0, 0.3, 0.7])
    kit = {
        "host_pages": rng.choice([12, 30, 60, 200]),
        "backing_pages": rng.choice([0, 0, 20, 60, 300]),
        "chances": chances,
        "timeout": rng.choice([3.0, 20.0, 20.0]),
        "seed": seed,
        "most_writes": rng.choice([1, 8]),
    }
    actions: list[Action] = []
    for action in base.actions:
        roll = rng.random()
        if roll < 0.10:
            actions.append(("clear",))
        elif roll < 0.15:
            actions.append(("restart", rng.random() < 0.5))
        elif roll < 0.19:
            actions.append(("lose",))
        actions.append(action)
    return Script({**base.sizes, "tier": kit}, tuple(actions))


class TierRun(Run):
    """A script under way, whose books are looked at on both sides."""

    def _clear(self) -> None:
        """Device memory is needed for something else."""
        self.harness.cache.index.clear()

    def _lose(self) -> None:
        """The next copies do not happen, and their step fails."""
        self.harness.fail_copies = 1
        self.failures += 1

    def _restart(self, in_order: bool) -> None:
        """The process ends, maybe without having written what it should."""
        if self.harness.core.dead:
            return
        ended = self.harness.keep(self.harness.core.abort_all())
        self.aborted.update(output.request_id for output in ended)
        self.harness.restart(in_order=in_order)

    def look(self) -> None:
        audit(self.harness.cache)
        assert self.harness.kit is not None
        self.harness.kit.audit()


def play_tier(script: Script, change: Callable[[Harness], None] | None = None) -> TierRun:
    run = TierRun(script, change)
    run.play()
    run.look()
    return run


def tier_script_fails(script: Script, change: Callable[[Harness], None] | None = None) -> bool:
    try:
        play_tier(script, change)
    except Exception:  # noqa: BLE001
        return True
    return False


def play_many_tiers(seeds: range, steps: int) -> Counter[str]:
    """Scripts from `seeds` on until they made `steps` steps. A failure is raised as the smallest script that fails."""
    totals = Counter[str]()
    for seed in seeds:
        script = random_tier_script(seed)
        try:
            run = play_tier(script)
        except Exception as error:
            raise AssertionError(f"seed {seed} fails as {shrink(script, tier_script_fails)}") from error
        totals["steps"] += run.harness.steps
        totals["restarts"] += sum(action[0] == "restart" for action in script.actions)
        assert run.harness.kit is not None
        totals += run.harness.kit.totals()
        if totals["steps"] >= steps:
            break
    return totals
