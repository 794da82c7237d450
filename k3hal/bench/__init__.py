"""Measurements of whole engines and of dispatch; docs/bench.md says how."""
