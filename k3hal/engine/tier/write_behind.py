"""Gives the backing what host memory took, afterwards."""

from __future__ import annotations

import logging

import numpy as np

from k3hal.engine.tier.backing import Backing
from k3hal.engine.tier.catalogue import Entry
from k3hal.engine.tier.shelf import Shelf

logger = logging.getLogger(__name__)


def write_behind(shelf: Shelf, entry: Entry) -> None:
    """In the writing thread: note the checksums of a pinned object, give it to the backing, and unpin it.

    With it goes whatever it builds on that could not be written before.
    """
    for is_state in (False, True):
        pages = entry.pages(is_state)
        assert pages is not None
        entry.hold(is_state, pages, shelf.sums(pages))
    with shelf.changed:
        chain = _unwritten(shelf, entry) if shelf.answers and not entry.dead else []
        shelf.pin(chain)
        shelf.unpin([entry])
    for step in chain:
        _write(shelf, step)
    with shelf.changed:
        shelf.unpin(chain)
        shelf.changed.notify_all()


def _unwritten(shelf: Shelf, entry: Entry) -> list[Entry]:
    """What the backing lacks of an object's prefix, in order; nothing when host memory lacks some of that."""
    chain = [step for step in shelf.catalogue.chain(entry) if not step.stored]
    whole = all(step.in_host and step.sums(True) is not None and not step.pending for step in chain)
    return chain if whole else []


def _write(shelf: Shelf, entry: Entry) -> None:
    """Write an object; once more after something was removed, in case the backing was full."""
    backing = shelf.backing
    assert backing is not None and entry.kv is not None and entry.state is not None
    size, sums = backing.size(entry.meta), entry.all_sums()
    rows = shelf.rows(np.concatenate((entry.kv, entry.state)))
    for _ in range(2):
        with shelf.changed:
            if not _has_room(shelf, entry, size, backing):
                return
        try:
            backing.write(entry.meta, sums, rows)
        except OSError as error:
            with shelf.changed:
                _note_failure(shelf, error)
                shelf.shrink(shelf.stats.backing_bytes - size)
            continue
        with shelf.changed:
            shelf.written(entry)
        return


def _has_room(shelf: Shelf, entry: Entry, size: int, backing: Backing) -> bool:
    """Whether an object may be written: somebody may want it, what it builds on is there, and it fits beside that.

    Nothing is removed for what does not.
    """
    if entry.dead or (entry.parent is not None and not entry.parent.stored):
        return False
    before = shelf.catalogue.chain(entry.parent) if entry.parent is not None and not backing.shared else []
    if size + sum(backing.size(step.meta) for step in before) > backing.capacity:
        return False
    shelf.catalogue.touch(entry)
    shelf.shrink(backing.capacity - size)
    begins = entry.parent is None or entry.parent.stored
    return begins and shelf.answers and not entry.dead


def _note_failure(shelf: Shelf, error: OSError) -> None:
    shelf.no_answer()
    shelf.stats.write_errors += 1
    if shelf.stats.write_errors == 1:
        logger.warning("the external prefix cache cannot be written: %s. Further failures are only counted", error)
