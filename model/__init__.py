"""Kimi K3 and Kimi-Linear, written once against operators."""

if __name__ != "k3hal.model":
    raise ImportError("import this package as k3hal.model; a second copy would make a second registry")
