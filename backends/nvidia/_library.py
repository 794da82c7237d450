"""What the adapters of vendor libraries share."""

PRIORITY = 30
"""Below the portable kernels: a library is taken where they say No, or by name."""
