"""A transfer as one page to look at: the manifests of two sides and a request go in, a self-contained HTML file comes out.

Decides nothing: what the page shows is what the plans say, in one JSON document that the page's own arithmetic reads.
"""

from kvferry.explain.document import Title, document
from kvferry.explain.page import page

__all__ = ["Title", "document", "page"]
