"""Operator contracts, probing and selection: which provider runs each operator, and why."""

if __name__ != "k3hal.dispatch":
    raise ImportError("import this package as k3hal.dispatch; a second copy would make a second registry")

from k3hal.dispatch.call import Answer, Call, No, Yes
from k3hal.dispatch.device import DeviceDescription
from k3hal.dispatch.faults import Fault
from k3hal.dispatch.provider import Backend, Needs, Provider, provides

__all__ = ["Answer", "Backend", "Call", "DeviceDescription", "Fault", "Needs", "No", "Provider", "Yes", "provides"]
