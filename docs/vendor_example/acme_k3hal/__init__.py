"""K3HAL's backend for Acme's chips."""

from k3hal.dispatch import Backend

BACKEND = Backend(name="acme", vendors=("acme", "cpu"), priority=40)
