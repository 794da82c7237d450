"""Conformance: proves the providers of a machine and writes the proof as a package that others can verify."""
