"""Requests whose body is too large, or does not come: answered, where vLLM's would wait.

vLLM's server takes it as a middleware.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

MIDDLEWARE = f"{__name__}.Bodies"
MOST_BYTES = 1 << 26  # of a body; a prompt of a million token ids takes an eighth of it
BODY_SECONDS = 60.0  # for all of a body to come


class Refused(Exception):
    """A request that is not answered otherwise.

    Attributes
    ----------
    status
        of HTTP.
    """

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Bodies:
    """Middleware of the server: what answers gets a request when its body is there.

    Parameters
    ----------
    app
        what answers.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request; see ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            messages = await _messages(scope, receive)
        except Refused as refused:
            await _refuse(refused, send)
            return

        async def again() -> Any:
            return messages.pop(0) if messages else await receive()

        await self._app(scope, again, send)


async def _messages(scope: Any, receive: Any) -> list[Any]:
    """What comes of a request until its body is whole, or its client is gone.

    Raises
    ------
    Refused
        it is too large, or takes too long.
    """
    declared = dict(scope["headers"]).get(b"content-length", b"0")
    size = int(declared) if declared.isdigit() else 0
    messages, came = list[Any](), 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while size <= MOST_BYTES:
                messages.append(message := await receive())
                if message["type"] != "http.request" or not message.get("more_body"):
                    return messages
                came += len(message.get("body", b""))
                size = max(size, came)
    except TimeoutError:
        raise Refused(408, f"the body did not come in {BODY_SECONDS:g} s") from None
    raise Refused(413, f"the body has {size} bytes; expected at most {MOST_BYTES}")


async def _refuse(refused: Refused, send: Any) -> None:
    body = json.dumps({"error": {"message": str(refused), "code": refused.status}}).encode()
    length = str(len(body)).encode()
    # What is still to come of the body is not read: the next request cannot stand behind it.
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", length),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
