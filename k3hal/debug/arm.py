"""Arms what the environment asks for, around the building of an engine. Loads nothing when it asks for nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager


@contextmanager
def armed(environ: Mapping[str, str]) -> Iterator[None]:
    """Engines built inside record calls (`K3HAL_DUMP`) and are shadowed by references (`K3HAL_SHADOW`) if asked to.

    Raises `UsageError` for a malformed value.
    """
    with ExitStack() as stack:
        if dump := environ.get("K3HAL_DUMP"):
            from k3hal.debug.dump_spec import parse_dump
            from k3hal.debug.record import Recorder
            from k3hal.dispatch.observe import observing

            stack.enter_context(observing(Recorder(parse_dump(dump))))
        if shadow := environ.get("K3HAL_SHADOW"):
            from k3hal.debug.shadow import Shadow, parse_shadow
            from k3hal.dispatch.observe import observing

            stack.enter_context(observing(Shadow(parse_shadow(shadow))))
        yield
