"""A client as a page that answers in the browser, with no server behind it."""

from .export import export_page

__all__ = ["export_page"]
