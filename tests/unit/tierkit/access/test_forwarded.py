"""What reverse proxies say of a request, and whom of them a service believes."""

import pytest
from hypothesis import given, strategies as st

from tierkit.access import Proxies, checked_network, checked_root_path

HERE = ("127.0.0.0/8", "::1")


def headers(**said: str) -> list[tuple[bytes, bytes]]:
    return [(f"x-forwarded-{name}".encode(), value.encode("latin-1")) for name, value in said.items()]


@pytest.mark.parametrize(
    ("client", "trusted", "believed"),
    [
        ("127.0.0.1", HERE, True),
        ("127.0.0.2", HERE, True),
        ("::1", HERE, True),
        ("::ffff:127.0.0.1", HERE, True),
        ("10.1.2.3", HERE, False),
        ("10.1.2.3", ("10.0.0.0/8",), True),
        ("11.1.2.3", ("10.0.0.0/8",), False),
        ("10.1.2.3", ("10.1.2.3",), True),
        ("127.0.0.1", (), False),
        (None, HERE, False),
        ("", HERE, False),
        ("testclient", HERE, False),
    ],
)
def test_a_proxy_is_believed_by_its_address(client: str | None, trusted: tuple[str, ...], believed: bool) -> None:
    said = Proxies("", trusted).read(client, headers(prefix="/terrace", proto="https", host="vision.example"))
    assert (said.root_path, said.scheme, said.hosts) == (
        ("/terrace", "https", ("vision.example",)) if believed else ("", None, ())
    )


@pytest.mark.parametrize(
    ("prefix", "root_path"),
    [
        ("/terrace", "/terrace"),
        ("/terrace/", "/terrace"),
        ("/a/b.c/d~e", "/a/b.c/d~e"),
        ("/outer, /inner", "/outer"),
        ("/", ""),
        ("", ""),
        # What would lead elsewhere, or become markup, is not taken at all.
        ("terrace", "/set"),
        ("//evil.example", "/set"),
        ("/a//b", "/set"),
        ("/../admin", "/set"),
        ("/a/./b", "/set"),
        ("https://evil.example/", "/set"),
        ("/a?b", "/set"),
        ("/a b", "/set"),
        ('/"><script>', "/set"),
        ("/\\evil", "/set"),
        ("/" + "a" * 300, "/set"),
        ("/\xe9", "/set"),
    ],
)
def test_the_path_of_the_site(prefix: str, root_path: str) -> None:
    assert Proxies("/set", HERE).read("127.0.0.1", headers(prefix=prefix)).root_path == root_path


def test_a_path_that_is_set_counts_whoever_asks() -> None:
    for client in ("127.0.0.1", "10.0.0.1", None):
        assert Proxies("/set", HERE).read(client, []).root_path == "/set"


@pytest.mark.parametrize(
    ("said", "scheme", "hosts"),
    [
        ({"proto": "https", "host": "Vision.Example"}, "https", ("vision.example",)),
        ({"proto": "https", "host": "vision.example:443"}, "https", ("vision.example",)),
        ({"proto": "http", "host": "vision.example:80"}, "http", ("vision.example",)),
        ({"proto": "https", "host": "vision.example:8443"}, "https", ("vision.example:8443",)),
        (
            {"proto": "https", "host": "vision.example", "port": "8443"},
            "https",
            ("vision.example", "vision.example:8443"),
        ),
        ({"proto": "https", "host": "vision.example", "port": "443"}, "https", ("vision.example",)),
        ({"proto": "https", "host": "[fd00::1]:8443"}, "https", ("[fd00::1]:8443",)),
        ({"proto": "https, http", "host": "vision.example, inner"}, "https", ("vision.example",)),
        ({"host": "vision.example"}, None, ("vision.example",)),
        ({"proto": "https"}, "https", ()),
        ({"proto": "ftp", "host": "vision.example/evil"}, None, ()),
        ({"proto": "https", "host": "a@b"}, "https", ()),
        ({"proto": "https", "host": "vision.example", "port": "x"}, "https", ("vision.example",)),
    ],
)
def test_the_scheme_and_the_names_of_the_site(said: dict[str, str], scheme: str | None, hosts: tuple[str, ...]) -> None:
    found = Proxies("", HERE).read("127.0.0.1", headers(**said))
    assert (found.scheme, found.hosts) == (scheme, hosts)


@given(st.text(st.characters(max_codepoint=255)), st.text(st.characters(max_codepoint=255)))
def test_whatever_a_proxy_says_is_safe_in_a_link(prefix: str, host: str) -> None:
    found = Proxies("", HERE).read("127.0.0.1", headers(prefix=prefix, host=host, proto=prefix))
    assert found.root_path == "" or found.root_path[0] == "/"
    assert not found.root_path.startswith("//")
    assert not set(found.root_path) & set("\"'<>&?#\\ %:@\r\n")


def test_settings_that_are_no_path_or_network_are_refused() -> None:
    assert checked_root_path("/terrace/") == "/terrace"
    assert checked_network("10.0.0.7/8") == "10.0.0.7/8"
    for path in ("terrace", "//a", "/a b"):
        with pytest.raises(ValueError, match="such as /terrace"):
            checked_root_path(path)
    for path in ("/v1", "/v1/jobs", "/ui/", "/docs", "/metrics"):
        with pytest.raises(ValueError, match="of the service itself"):
            checked_root_path(path)
        assert Proxies("/site", HERE).read("127.0.0.1", headers(prefix=path)).root_path == "/site"
    assert checked_root_path("/docs/terrace") == "/docs/terrace"
    for network in ("proxy", "10.0.0.0/33", "*"):
        with pytest.raises(ValueError, match="IP address or a network"):
            checked_network(network)
