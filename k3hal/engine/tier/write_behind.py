"""Gives the backing what host memory took, afterwards."""

from __future__ import annotations

import errno
import logging

import numpy as np

from k3hal.engine.tier.backing import Backing
from k3hal.engine.tier.catalogue import Entry
from k3hal.engine.tier.shelf import LEFT_ALONE, Shelf

logger = logging.getLogger(__name__)

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""Failures that removing something may help against."""


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
    try:
        for step in chain:
            _write(shelf, step)
    finally:
        with shelf.changed:
            shelf.unpin(chain)
            shelf.changed.notify_all()


def _unwritten(shelf: Shelf, entry: Entry) -> list[Entry]:
    """What the backing lacks of an object's prefix, in order; nothing when host memory lacks some of that."""
    chain = [step for step in shelf.catalogue.chain(entry) if not step.stored]
    whole = all(step.in_host and step.sums(True) is not None and not step.pending for step in chain)
    return chain if whole else []


def _write(shelf: Shelf, entry: Entry) -> None:
    """Write an object; where it turns out that there is no room for it, once more after older ones were removed."""
    backing = shelf.backing
    assert backing is not None and entry.kv is not None and entry.state is not None
    size, sums = backing.size(entry.meta), entry.all_sums()
    rows = shelf.rows(np.concatenate((entry.kv, entry.state)))
    for may_remove in (True, False):
        with shelf.changed:
            if not _has_room(shelf, entry, size, backing):
                return
        try:
            backing.write(entry.meta, sums, rows)
        except OSError as error:
            with shelf.changed:
                _note_failure(shelf, error)
                removed = may_remove and error.errno in _NO_ROOM and _remove_older(shelf, entry, size, backing)
                if not removed:
                    shelf.leave_alone()
                    return
            continue
        with shelf.changed:
            shelf.written(entry)
        return


def _remove_older(shelf: Shelf, entry: Entry, size: int, backing: Backing) -> bool:
    """Remove `size` bytes from a full backing; False, and nothing removed, where an object's prefix would go with them.

    What else fills the disk is not ours to remove: an object that needs more than there is of ours costs nobody else.
    """
    kept = [step for step in shelf.catalogue.chain(entry) if step.stored]
    if backing.shared or shelf.stats.backing_bytes - sum(backing.size(step.meta) for step in kept) < size:
        return False
    shelf.shrink(shelf.stats.backing_bytes - size)
    return True


def _has_room(shelf: Shelf, entry: Entry, size: int, backing: Backing) -> bool:
    """Whether an object may be written: somebody may want it, what it builds on is there, and it fits beside that.

    Nothing is removed for what does not.
    """
    if entry.dead or not shelf.answers or (entry.parent is not None and not entry.parent.stored):
        return False
    before = shelf.catalogue.chain(entry.parent) if entry.parent is not None and not backing.shared else []
    if size + sum(backing.size(step.meta) for step in before) > backing.capacity:
        return False
    shelf.catalogue.touch(entry)
    shelf.shrink(backing.capacity - size)
    begins = entry.parent is None or entry.parent.stored
    return begins and not entry.dead


def _note_failure(shelf: Shelf, error: OSError) -> None:
    """Count a failed write, and tell of the first of its kind."""
    shelf.stats.write_errors += 1
    if error.errno in shelf.told:
        return
    shelf.told.add(error.errno)
    if error.errno in _NO_ROOM:
        logger.warning(
            "the external prefix cache has less room than it may take: %s. Older objects make room; further failures "
            "of this kind are only counted",
            error,
        )
    else:
        logger.error(
            "the external prefix cache cannot be written: %s. It is tried again every %d seconds; further failures of "
            "this kind are only counted",
            error,
            LEFT_ALONE,
        )
