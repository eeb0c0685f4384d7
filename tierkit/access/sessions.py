"""Sessions of people with a browser: a cookie instead of a token, which scripts of a page can neither read nor keep.

The cookie holds the hash of the token that it was given for, and its end, and is signed. So nothing is stored: it
survives a restart of the service, and is invalid as soon as the token is revoked or has expired.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable

from tierkit.access.tokens import TokenEntry
from tierkit.errors import Unauthenticated

__all__ = ["SESSION_COOKIE", "SESSION_PATH", "SIGN_IN_PAGE", "Sessions", "cookie_of", "needs_no_token"]

SESSION_COOKIE = "terrace_session"
SESSION_PATH = "/v1/session"
"""Path at which a token is exchanged for a session, and a session is ended."""
SIGN_IN_PAGE = "/ui"
"""Path of the page at which people sign in."""
_OPEN = re.compile(rf"{SESSION_PATH}|/|{SIGN_IN_PAGE}(/.*)?", re.DOTALL)
"""Paths that need no token, where there are sessions: a page that holds no data, and asks for a token itself."""
_LIFETIME_S = 12 * 3600
_PERSON = b"terrace session\n"
"""Sets these signatures apart from whatever else is made with the same secret."""
_FORM = re.compile(r"([0-9a-f]{64})\.([0-9]{1,12})\.([0-9a-f]{64})", re.ASCII)


class Sessions:
    """Issues session cookies and reads them.

    Args:
        secret: of the service, the same after a restart.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def issue(self, entry: TokenEntry, now: float) -> tuple[str, int]:
        """Return a session of the holder of a token: the value of the cookie, and the seconds for which it is valid.

        Args:
            now: seconds since 1970.
        """
        expires = int(now) + _LIFETIME_S
        if entry.expires is not None:
            expires = min(expires, int(entry.expires.timestamp()))
        content = f"{entry.sha256}.{expires}"
        return f"{content}.{self._sign(content)}", max(0, expires - int(now))

    def token_of(self, value: str, now: float) -> str:
        """The hash of the token that a session was given for.

        Raises:
            Unauthenticated: it has expired, or is not from here.
        """
        form = _FORM.fullmatch(value)
        if form is None or not hmac.compare_digest(form[3], self._sign(f"{form[1]}.{form[2]}")):
            raise Unauthenticated("the session is unknown here: sign in again")
        if int(form[2]) <= now:
            raise Unauthenticated("the session has expired: sign in again")
        return form[1]

    def _sign(self, content: str) -> str:
        return hmac.digest(self._secret, _PERSON + content.encode(), "sha256").hex()


def needs_no_token(path: str) -> bool:
    """True if a service with sessions lets everybody in here."""
    return _OPEN.fullmatch(path) is not None


def cookie_of(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The session cookie of a request; None if there is none, or more than one.

    Args:
        headers: names in lower case.
    """
    wanted = SESSION_COOKIE.encode()
    pairs = [pair.partition(b"=") for name, value in headers if name == b"cookie" for pair in value.split(b";")]
    values = [value.strip() for name, _, value in pairs if name.strip() == wanted]
    return values[0].decode("latin-1") if len(values) == 1 else None
