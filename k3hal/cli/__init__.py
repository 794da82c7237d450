"""The `k3hal` command. `main` is the only entry point and the only place where an exception becomes an exit code."""

from k3hal.cli.run import main

__all__ = ["main"]
