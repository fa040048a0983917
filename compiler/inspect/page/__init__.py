"""The inspector's page: a plan as one HTML file that needs nothing else, neither a server nor a network."""

from monarch.compiler.inspect.page.document import TEMPLATE, page

__all__ = ["TEMPLATE", "page"]
