"""The page at `/`: one file, whose own scripts and styles are all that a browser may run there."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

_FOUND = "<{0}(?:\\s[^>]*)?>(.*?)</{0}>"


def load() -> tuple[bytes, dict[str, str]]:
    """Return the page, and the headers that it is sent with."""
    page = resources.files("jllama.server").joinpath("page.html").read_text("utf-8")
    rules = {
        "default-src": "'none'",
        "script-src": _hashes("script", page),
        "style-src": _hashes("style", page),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    headers = {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in rules.items()),
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return page.encode(), headers


def _hashes(tag: str, page: str) -> str:
    """The hashes of what stands between such tags, as https://www.w3.org/TR/CSP3/ has them."""
    found = re.findall(_FOUND.format(tag), page, re.DOTALL | re.IGNORECASE)
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in found]
    return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
