"""Access control of services: tokens and the token file, limits per token, TLS of both sides."""

from tierkit.access.authentication import Authenticator
from tierkit.access.browsers import READS, check_host, check_origin
from tierkit.access.callers import CALLER, Allowance, Caller, Role
from tierkit.access.files import (
    TokenFile,
    check_private,
    checked_token,
    follow_files,
    read_private,
    read_token,
    signature,
)
from tierkit.access.forwarded import Proxies, checked_network, checked_root_path
from tierkit.access.sessions import SESSION_COOKIE, SESSION_PATH, SIGN_IN_PAGE, Sessions, needs_no_token
from tierkit.access.tickets import TICKET_HEADER, Tickets, issued, secret_of_run
from tierkit.access.tls import ServerTls, client_context, tls_trouble, trust_further
from tierkit.access.tokens import (
    TokenEntry,
    TokenRights,
    TokenRole,
    digest_of,
    invitation_of,
    new_token,
    read_book,
    write_book,
)

__all__ = [
    "CALLER",
    "READS",
    "SESSION_COOKIE",
    "SESSION_PATH",
    "SIGN_IN_PAGE",
    "TICKET_HEADER",
    "Allowance",
    "Authenticator",
    "Caller",
    "Proxies",
    "Role",
    "ServerTls",
    "Sessions",
    "Tickets",
    "TokenEntry",
    "TokenFile",
    "TokenRights",
    "TokenRole",
    "check_host",
    "check_origin",
    "check_private",
    "checked_network",
    "checked_root_path",
    "checked_token",
    "client_context",
    "digest_of",
    "follow_files",
    "invitation_of",
    "issued",
    "needs_no_token",
    "new_token",
    "read_book",
    "read_private",
    "read_token",
    "secret_of_run",
    "signature",
    "tls_trouble",
    "trust_further",
    "write_book",
]
