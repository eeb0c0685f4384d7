"""What pages of other sites can have a browser send."""

import pytest

from tierkit.access import check_host, check_origin
from tierkit.errors import Forbidden

HOST = "10.0.0.5:8070"


def headers(**fields: str) -> list[tuple[bytes, bytes]]:
    return [(name.replace("_", "-").encode(), value.encode()) for name, value in {"host": HOST, **fields}.items()]


@pytest.mark.parametrize("by_cookie", [False, True])
@pytest.mark.parametrize(
    ("scheme", "host", "origin", "passes"),
    [
        ("http", HOST, f"http://{HOST}", True),
        ("https", HOST, f"https://{HOST}", True),
        ("http", "Hub.Example", "http://hub.example", True),
        ("http", "[::1]:8070", "http://[::1]:8070", True),
        ("http", "hub.example", "https://hub.example", True),  # TLS ends in front of it
        ("https", "hub.example", "http://hub.example", False),
        ("http", HOST, "http://evil.example", False),
        ("http", HOST, "http://10.0.0.5", False),
        ("http", HOST, "http://10.0.0.5:8071", False),
        ("http", HOST, f"http://{HOST}.evil.example", False),
        ("http", HOST, f"http://{HOST}/", False),
        ("http", HOST, f"http://user@{HOST}", False),
        ("http", HOST, "null", False),
        ("http", HOST, "", False),
        ("http", HOST, HOST, False),
        ("http", "", "http://", True),  # HTTP/1.0 without a host; no browser sends this
    ],
)
def test_the_origin_of_a_request_that_changes_something(
    scheme: str, host: str, origin: str, passes: bool, by_cookie: bool
) -> None:
    given = headers(host=host, origin=origin)
    check_origin("GET", scheme, given, by_cookie=by_cookie)
    for method in ("POST", "PUT", "DELETE", "PATCH", "UNKNOWN"):
        if passes:
            check_origin(method, scheme, given, by_cookie=by_cookie)
            continue
        with pytest.raises(Forbidden, match="another origin"):
            check_origin(method, scheme, given, by_cookie=by_cookie)


def test_programs_send_no_origin_and_cookies_need_one() -> None:
    check_origin("POST", "http", headers())
    for method in ("GET", "HEAD", "OPTIONS"):
        check_origin(method, "http", headers(), by_cookie=True)
    with pytest.raises(Forbidden, match="needs the header Origin"):
        check_origin("POST", "http", headers(), by_cookie=True)


@pytest.mark.parametrize(
    ("site", "passes"),
    [("same-origin", True), ("none", True), ("same-site", False), ("cross-site", False), ("", False)],
)
def test_with_a_cookie_the_browser_must_not_name_another_site(site: str, passes: bool) -> None:
    given = headers(origin=f"http://{HOST}", sec_fetch_site=site)
    check_origin("POST", "http", given)
    if passes:
        check_origin("POST", "http", given, by_cookie=True)
        return
    with pytest.raises(Forbidden, match="another site"):
        check_origin("POST", "http", given, by_cookie=True)


@pytest.mark.parametrize(
    ("host", "passes"),
    [
        ("127.0.0.1:8070", True),
        ("127.0.0.1", True),
        ("[::1]:8070", True),
        ("[::1]", True),
        ("localhost:8070", True),
        ("LOCALHOST", True),
        ("localhost.:8070", True),
        ("terrace.localhost", True),
        ("pi:8070", True),
        ("pi.local:8070", True),
        ("PI.local.", True),
        ("hub.example:8070", True),
        ("evil.example", False),
        ("evil.example:8070", False),
        ("evil.example.", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("127.0.0.1.nip.io:8070", False),
        ("xlocalhost.com", False),
        ("pi.evil.example", False),
        ("[evil.example]", False),
        ("\xe9vil.example", False),
    ],
)
def test_the_name_by_which_an_open_service_is_found(host: str, passes: bool) -> None:
    given = [(b"host", host.encode("latin-1"))]
    if passes:
        check_host(given, ("hub.example", "pi.local"))
        return
    with pytest.raises(Forbidden, match="not this machine's"):
        check_host(given, ("hub.example", "pi.local"))


def test_without_a_host_no_browser_asks() -> None:
    check_host([], ())
