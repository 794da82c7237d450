"""The report of a conformance package as one self-contained HTML page."""

from k3hal.conform.page.write import write_page

__all__ = ["write_page"]
