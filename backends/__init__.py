"""placeholder"""

if __name__ != "k3hal.backends":
    raise ImportError("import this package as k3hal.backends; a second copy would make a second registry")
