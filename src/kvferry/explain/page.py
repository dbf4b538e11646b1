"""One HTML file out of a document: style, script and data inside, and a policy that lets it load nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any, Final

import msgspec

_FILES: Final = files("kvferry.explain")
_SCRIPTS: Final = ("arithmetic.js", "words.js", "grid.js", "crossing.js", "walk.js", "pane.js", "page.js")


def page(document: Mapping[str, Any]) -> str:
    """The page that shows `document`."""
    style = _text("page.css")
    script = '"use strict";\n' + "\n".join(_text(name) for name in _SCRIPTS)
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; "
        f"script-src 'sha256-{_digest(script)}'; style-src 'sha256-{_digest(style)}'"
    )
    title = document["title"]
    slots = {
        "policy": policy,
        "title": escape(f"{title['model']}: {title['prefill']} → {title['decode']}"),
        "style": style,
        "script": script,
        "document": _quoted(document),
    }
    return re.sub(r"{{(\w+)}}", lambda slot: slots[slot[1]], _text("page.html"))


def _text(name: str) -> str:
    return (_FILES / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _quoted(document: Mapping[str, Any]) -> str:
    """JSON that cannot end the element it stands in."""
    return msgspec.json.encode(document).decode().replace("<", "\\u003c")
