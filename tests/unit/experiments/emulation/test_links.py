"""The file of links: what it says, and how it says what is wrong."""

from pathlib import Path

import pytest

from experiments.emulation.links import read_links
from tierkit.errors import SetupError


def written(folder: Path, text: str) -> Path:
    path = folder / "links.toml"
    path.write_text(text)
    return path


def test_a_link_leads_to_addresses_networks_and_names(tmp_path: Path) -> None:
    text = '[[link]]\nname = "up"\nto = ["10.0.9.0/24", "edge.local", "::1"]\ndelay_s = 0.5\n'
    (link,) = read_links(written(tmp_path, text)).link
    assert link.delay_s == 0.5
    hosts = ("10.0.9.7", "edge.local", "::1", "10.0.8.7", "cloud.local", "::2")
    assert [link.leads_to(host) for host in hosts] == [True, True, True, False, False, False]


def test_a_single_place_needs_no_list(tmp_path: Path) -> None:
    (link,) = read_links(written(tmp_path, '[[link]]\nname = "up"\nto = "10.0.9.0/24"\n')).link
    assert link.to == ("10.0.9.0/24",)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "link is missing"),
        ("seed = -1\n[[link]]\nname='a'\nto=['x']", "seed is -1: input should be greater than or equal to 0"),
        ("link = [1", "is not valid TOML"),
        ("[[link]]\nname='a'\nto=['x']\ndelay_s = -0.5", "link.0.delay_s is -0.5: input should be greater"),
        ("[[link]]\nname='a'\nto=['x']\ndelay = 0.5", "link.0.delay is unknown; did you mean delay_s?"),
        ("[[link]]\nname='a'\nto=['x']\nzzz = 1", "link.0.zzz is unknown; known are delay_s, jitter_s"),
        ("[[link]]\nname='a'\nto=['x']\ndelay_s = inf", "link.0.delay_s is inf: input should be a finite number"),
        ("[[link]]\nname='a'\nto=['x']\nreset = 1.5", "link.0.reset is 1.5: input should be less"),
        ("[[link]]\nname='a'\nto=['x']\njitter_s = 1", "link.0: jitter_s (1) must be at most delay_s (0)"),
        ("[[link]]\nname='a'\nto=['x']\nreset = 0.6\nstall = 0.6", "reset and stall add up to 1.2"),
        (
            "[[link]]\nname='a'\nto=['x']\nbandwidth_bps = 0",
            "link.0.bandwidth_bps is 0: input should be greater than or equal to 1",
        ),
        ("[[link]]\nname='a'\nto=['x']\ndelay_s = 3601", "link.0.delay_s is 3601: input should be less than or"),
        ("[[link]]\nname='a'\nto=['x']\ndelay_s = true", "link.0.delay_s is True: input should be a valid number"),
        ("link = 5", "link is 5: input should be a list"),
        ("link = ['up']", "link.0 is 'up': input should be a table"),
        ("[[link]]\nto=['x']", "link.0.name is missing"),
        ("[[link]]\nname=''\nto=[]", "link.0.to has too few entries"),
        ("[[link]]\nname=7\nto=['x']", "link.0.name is 7: input should be a valid string"),
        ("[[link]]\nname='a'\nto=['x']\n[[link]]\nname='b c'\ndelay_s=0", "link.1.to is missing"),
        ("[[link]]\nname='a'\nto=['x']\n[[link]]\nname='a'\nto=[]", "link.1.to has too few entries"),
        ("[[link]]\nname='a'\nto=[]", "link.0.to has too few entries: 0, at least 1"),
        ("link = []", "link has too few entries: 0, at least 1"),
        ("[[link]]\nname='a'\nto=['x', '127.0.0.300/40']", ": link.0.to: '127.0.0.300/40' is not an address, network"),
        ("[[link]]\nname='a'\nto=''", "link.0.to is '': '' is not an address, network"),
        (
            "[[link]]\nname='a'\nto=7",
            "link.0.to is 7: expected is an address, network (10.0.9.0/24) or host name, or",
        ),
        ("[[link]]\nname='a'\nto=true", "link.0.to is True: expected is an address"),
        (
            "[[link]]\nname='a'\nto={a = 1}",
            "link.0.to: expected is an address, network (10.0.9.0/24) or host name, or",
        ),
        ("[[link]]\nname='a'\nto=['x', 7]", "link.0.to: 7 is not an address, network (10.0.9.0/24) or host name"),
        ("[[link]]\nname='a'\nto=['127.0.0.300']", "'127.0.0.300' is not an address, network"),
        ("[[link]]\nname='a'\nto=['http://node-1:8000']", "'http://node-1:8000' is not an address, network"),
        ("[[link]]\nname='a'\nto=['x']\n[[link]]\nname='a'\nto=['y']", "several links are called a"),
        ("sed = 1\n[[link]]\nname='a'\nto=['x']", "sed is unknown; did you mean seed?"),
    ],
)
def test_a_wrong_file_is_refused_in_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(SetupError) as caught:
        read_links(written(tmp_path, text))
    assert sentence in str(caught.value)
    assert "links.toml" in str(caught.value)
    # That the wrong link does not count, and all else that it says, is no news.
    assert "tuple should" not in str(caught.value)
    assert "{" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"cannot read the links file .*nowhere\.toml: No such file"):
        read_links(tmp_path / "nowhere.toml")
