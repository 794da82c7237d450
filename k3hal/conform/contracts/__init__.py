"""Recorded contracts of vendor libraries against the sources they are of."""
