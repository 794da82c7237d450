"""What the cache counts, and why tokens were not found."""

from __future__ import annotations

from dataclasses import dataclass, field

LABELS = ("cold", "evicted_kv", "no_state", "alignment", "cap", "draft")


@dataclass(frozen=True, slots=True)
class Lookup:
    """What is known of a prompt: `cached` tokens need no computing, `labels` counts the others by why they do.

    cold: never seen. evicted_kv: seen, but their KV is gone. no_state: their KV is here and no state after it.
    alignment: seen, beyond the last whole match unit. cap: the last token always runs, for its logits, and what falls
    into its unit with it. draft: lost to a drafter's needs.
    """

    cached: int
    labels: dict[str, int]


@dataclass(slots=True)
class CacheStats:
    """Counters that only grow. Those of resumed requests (preempted before) are apart, so that they flatter no rate."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    labels: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LABELS, 0))
    resumed_requests: int = 0
    resumed_tokens: int = 0
    resumed_cached_tokens: int = 0
    snapshots_taken: int = 0
    snapshots_kept_at_end: int = 0
    snapshots_evicted: int = 0
    pages_evicted: int = 0
    pages_copied: int = 0
    stops: int = 0

    def count(self, found: Lookup) -> None:
        self.requests += 1
        self.cached_tokens += found.cached
        self.prompt_tokens += found.cached
        for label, tokens in found.labels.items():
            self.labels[label] += tokens
            self.prompt_tokens += tokens

    def count_resumed(self, found: Lookup) -> None:
        self.resumed_requests += 1
        self.resumed_tokens += found.cached + sum(found.labels.values())
        self.resumed_cached_tokens += found.cached


def label_tokens(num_tokens: int, cached: int, matched: int, seen: int, unit: int) -> Lookup:
    """Divide a prompt's tokens. `matched` of them have their KV, `seen` were seen, both whole units of the prompt."""
    labels: dict[str, int] = dict.fromkeys(LABELS, 0)
    capped = (num_tokens - 1) // unit * unit
    whole = num_tokens // unit * unit
    matched, seen = max(matched, cached), max(matched, seen, cached)
    labels["no_state"] = max(min(matched, capped) - cached, 0)
    reach = max(min(matched, capped), cached)
    labels["evicted_kv"] = max(min(seen, capped) - reach, 0)
    reach = max(min(seen, capped), reach)
    if seen >= whole:
        labels["cap"] = num_tokens - reach if whole == num_tokens else 1
        labels["alignment"] = num_tokens - reach - labels["cap"]
    else:
        labels["cold"] = num_tokens - reach
    return Lookup(cached, labels)
