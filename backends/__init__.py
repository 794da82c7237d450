"""Providers of operators, one package a backend; found by walking this package, never imported by name.

Modules whose names begin with an underscore are what backends share.
"""

if __name__ != "k3hal.backends":
    raise ImportError("import this package as k3hal.backends; a second copy would make a second registry")
