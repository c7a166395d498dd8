"""Who may ask: a key, or a browser's page of our own. Pure ASGI, so that streams end when their readers go."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from jllama.errors import quoted
from jllama.server.errors import ApiError

_PUBLIC = ("/", "/health")
KEY = "jllama.key"  # in a scope: the key that opened it, "" for none


class Guard:
    """Refuse those who bring none of the keys; without keys, pages of others, whatever name they reach us by.

    Args:
      app: what is guarded.
      keys: any of which opens it.
      host: the address that it listens at.
      origins: of pages elsewhere that may ask.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], host: str, origins: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._origins = {origin.lower() for origin in origins}
        names = [urlsplit(origin).hostname for origin in origins]
        self._hosts = {"localhost", host.lower(), socket.gethostname().lower(), *filter(None, names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it with a refusal."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        scope[KEY] = ""
        refused = self._check_key(scope, headers) if self._keys else self._check_page(headers)
        if refused is None:
            await self._app(scope, receive, send)
        else:
            answer = JSONResponse(refused.envelope, refused.status, refused.headers)
            await answer(scope, receive, send)

    def _check_key(self, scope: Scope, headers: Headers) -> ApiError | None:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key") or headers.get("api-key", "")
        found = [
            hmac.compare_digest(key, given.encode("latin-1")) for key in self._keys
        ]  # all of them, whichever it is
        if any(found):
            scope[KEY] = given
            return None
        if scope["path"] in _PUBLIC:
            return None
        message = "this key is not known here" if given else "a key is missing: expected Authorization: Bearer KEY"
        return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def _check_page(self, headers: Headers) -> ApiError | None:
        """A page elsewhere can send what needs no permission, and with a name of its own for our address read too."""
        host = headers.get("host", "")
        if not self._knows(host):
            return ApiError(
                403, f"the host {quoted(host)} is not known here: expected an address, a --cors_origin, or a key"
            )
        origin = headers.get("origin")
        if origin is None or urlsplit(origin).netloc == host or self._origins & {origin.lower(), "*"}:
            return None
        return ApiError(403, f"pages of {quoted(origin)} may not ask here: expected a --cors_origin, or a key")

    def _knows(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
            if name in self._hosts or name.endswith(".localhost"):
                return True
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True
