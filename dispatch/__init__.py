"""placeholder"""

if __name__ != "k3hal.dispatch":
    raise ImportError("import this package as k3hal.dispatch; a second copy would make a second registry")
