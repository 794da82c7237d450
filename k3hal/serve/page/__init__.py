"""The page at `/`: a chat box, live figures and the dispatch plan, served with everything they need."""

from k3hal.serve.page.routes import add_page

__all__ = ["add_page"]
