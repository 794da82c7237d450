"""What shadowing has found so far in this process, for `/metrics`; loads no torch."""

from __future__ import annotations

from collections import Counter

compared: Counter[str] = Counter()
"""Calls compared with the reference, by operator."""
diverged: Counter[str] = Counter()
"""Of these, calls outside the tolerance policy, by operator."""
