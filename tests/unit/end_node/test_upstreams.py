"""Which upstream nodes a request may name."""

import json

import pytest

from tierkit.errors import InvalidInput
from tierkit.inference.upstreams import MAX_UPSTREAMS, forbidden_url, is_allowed, read_upstreams


def header(*urls: str) -> str:
    rest = {"tier": "edge", "model": "m", "sha256": "0" * 64, "encoding": None}
    return json.dumps([{"node_id": f"n{i}", "url": url, **rest} for i, url in enumerate(urls)])


@pytest.mark.parametrize("value", [None, "[]"])
def test_none_means_that_the_coarse_answer_is_enough(value: str | None) -> None:
    assert read_upstreams(value) == ()


def test_the_order_is_kept() -> None:
    upstreams = read_upstreams(header("http://a:1", "https://[::1]:2/path"))
    assert [(upstream.node_id, upstream.url) for upstream in upstreams] == [
        ("n0", "http://a:1"),
        ("n1", "https://[::1]:2/path"),
    ]


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("", "cannot be read"),
        ("{}", "cannot be read"),
        ('[{"node_id": "a"}]', "0.url: Field required"),
        (header("http://a:1").replace("edge", "moon"), "0.tier"),
        (header("http://a:1").replace("edge", "end"), "0.tier: must be 'edge' or 'cloud', the tiers above the end"),
        (header("http://a:1").replace("edge", "End"), "0.tier: must be 'edge' or 'cloud', the tiers above the end"),
        (header("http://a:1").replace('"edge"', "[]"), "0.tier: must be 'edge' or 'cloud', the tiers above the end"),
        (header("http://a:1")[:-2] + ', "extra": 1}]', "0.extra"),
        (header("ftp://a"), "0.url"),
        (header("http://a:1").replace(', "encoding": null', ""), "0.encoding: Field required"),
        (header("file:///etc/passwd"), "0.url"),
        (header("http://user:secret@a:1"), "0.url: must"),
        (header("http://a:1/?q=1"), "0.url: must"),
        (header("http://a:1/#f"), "0.url: must"),
        (header("http://"), "0.url: must"),
        (header("http://a:1\\@b"), "0.url: must"),
        (header("http://a:1\r\nhost: b"), "0.url: must"),
        (header("http://a:port"), "0.url: must"),
        (header("http://a:99999"), "0.url: must"),
        (header("http://[::1"), "0.url: must"),
        (header(*["http://a:1"] * (MAX_UPSTREAMS + 1)), "names 17 nodes; at most 16"),
    ],
)
def test_what_is_no_route_is_refused(value: str, sentence: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_upstreams(value)
    assert sentence in str(caught.value)


ALLOWED = ("http://10.0.0.5:7402", "https://cloud.example/terrace/")


@pytest.mark.parametrize(
    "url",
    [
        "http://10.0.0.5:7402",
        "http://10.0.0.5:7402/deep/er",
        "https://cloud.example/terrace",
        "https://CLOUD.example:443/terrace/a",
    ],
)
def test_below_an_allowed_url(url: str) -> None:
    assert is_allowed(url, ALLOWED)
    assert is_allowed(url, ())


@pytest.mark.parametrize(
    "url",
    [
        "http://10.0.0.5",
        "http://10.0.0.5:7403",
        "https://10.0.0.5:7402",
        "http://10.0.0.5.evil.example:7402",
        "https://cloud.example",
        "https://cloud.example/terrace-2",
        "https://cloud.example/terrace/../admin",
        "https://cloud.example/terrace/%2e%2e/admin",
        "https://evil.example/https://cloud.example/terrace",
    ],
)
def test_outside_every_allowed_url(url: str) -> None:
    assert not is_allowed(url, ALLOWED)


ENCODING = {"name": "m.conv1", "head": "0" * 64, "tail": "1" * 64}


def relayed(relay: str, encoding: object = ENCODING) -> str:
    upstream = {"node_id": "a", "url": ALLOWED[0], "tier": "cloud", "model": "m.conv1", "encoding": encoding}
    return json.dumps([{**upstream, "relay": {"node_id": "b", "url": relay}}])


def test_the_list_of_allowed_urls_holds_for_the_node_that_encodes_as_well() -> None:
    (near,), (far,) = read_upstreams(relayed(ALLOWED[0])), read_upstreams(relayed("http://elsewhere:1"))
    assert forbidden_url(near, ALLOWED) is None
    assert forbidden_url(far, ALLOWED) == "http://elsewhere:1"
    assert forbidden_url(far, ()) is None
    assert forbidden_url(near, ("http://elsewhere:1",)) == ALLOWED[0]


def test_a_node_that_encodes_needs_an_encoding() -> None:
    with pytest.raises(InvalidInput, match="a relay is there to encode"):
        read_upstreams(relayed(ALLOWED[0], encoding=None))
