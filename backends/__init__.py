"""Providers of operators, one package a backend; found by walking this package, never imported by name."""

if __name__ != "k3hal.backends":
    raise ImportError("import this package as k3hal.backends; a second copy would make a second registry")
