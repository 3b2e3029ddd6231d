"""What every request passes through before it is answered: access, limits of size and time, security headers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from strandline.rest.access import Access, Refusal, is_page_file

MAX_BODY_BYTES = 64 * 1024
BODY_SECONDS = 10.0
"""How long a client may take to send the body of a request."""
ANSWER_SECONDS = 60.0
"""How long an answer may take, with the time that the client needs to read it."""

_CONTENT_SECURITY_POLICY = (
    "default-src 'self'; img-src 'self' data: blob:; object-src 'none'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'"
)
_HEADERS = (
    (b"content-security-policy", _CONTENT_SECURITY_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
)


class Guard:
    """An ASGI middleware that answers refused requests by itself."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        send = _with_headers(send, b"no-cache" if is_page_file(scope["path"]) else b"no-store")
        headers = _headers(scope)
        refusal = self._access.refusal(scope["method"], scope["path"], headers) or _too_large(headers)
        if refusal is not None:
            await _refuse(send, refusal)
            return
        try:
            body = await _body(receive)
        except _BodyError as error:
            await _refuse(send, Refusal(error.status, str(error)))
            return
        await self._answer(scope, _once(body, receive), send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = False

        async def noting(message: Message) -> None:
            nonlocal began
            began = True
            await send(message)

        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._app(scope, receive, noting)
        except TimeoutError:
            # An answer that has begun stays incomplete, and the server closes the connection.
            if not began:
                await _refuse(send, Refusal(503, f"there was no answer within {ANSWER_SECONDS:.0f} s; try again later"))


class _BodyError(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def _headers(scope: Scope) -> Mapping[str, str]:
    """The headers by name. Of a header that comes twice, the values are joined, so that no check sees only one."""
    found: dict[str, str] = {}
    for raw_name, raw_value in scope["headers"]:
        name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
        found[name] = f"{found[name]}, {value}" if name in found else value
    return found


def _too_large(headers: Mapping[str, str]) -> Refusal | None:
    length = headers.get("content-length", "0")
    if length.isdecimal() and len(length) < 12 and int(length) <= MAX_BODY_BYTES:
        return None
    return Refusal(413, f"the body of a request has at most {MAX_BODY_BYTES:,} bytes")


async def _body(receive: Receive) -> bytes:
    """The whole body, so that no endpoint waits for a slow client."""
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    raise _BodyError(400, "the client closed the connection before its request was complete")
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > MAX_BODY_BYTES:
                    raise _BodyError(413, f"the body of a request has at most {MAX_BODY_BYTES:,} bytes")
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise _BodyError(408, f"the body of the request did not arrive within {BODY_SECONDS:.0f} s") from None


def _once(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body that was read already, and then what the connection gives."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return waiting.pop() if waiting else await receive()

    return next_message


def _with_headers(send: Send, caching: bytes) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ()), *_HEADERS, (b"cache-control", caching)]
            message = {**message, "headers": headers}
        await send(message)

    return send_with_headers


async def _refuse(send: Send, refusal: Refusal) -> None:
    body = msgspec.json.encode({"errors": [refusal.reason]})
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if refusal.status in (408, 413):
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
