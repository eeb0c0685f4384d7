"""Profiles: those that ship, those that people write, and the files of links that come of them."""

from pathlib import Path

import pytest

from experiments.emulation.links import read_links
from experiments.profile import PathSpec, address_of, profile_names, read_profile, write_links
from tierkit.errors import InvalidInput, SetupError
from tierkit.types import Tier

HEAD = 'title = "t"\nsource = "s"\n'
NODES = "[nodes]\nend = 2\nedge = 1\ncloud = 1\n"


def test_every_profile_that_ships_can_be_read_and_names_its_source() -> None:
    assert profile_names() == ["5g", "lte", "native", "paper", "wan", "wifi"]
    for name in profile_names():
        assert len(read_profile(name).source) > 10


def test_the_paper_profile_has_the_figures_of_the_paper() -> None:
    paper = read_profile("paper")
    assert [paper.nodes.of(tier) for tier in Tier] == [8, 4, 1]
    assert [paper.compute_ms_per_image.of(tier) for tier in Tier] == [7.41, 5.99, 7.36]
    # Table 2: 0.5 s and 1 s, sending and receiving together.
    assert {name: 2 * spec.delay_s for name, spec in paper.path.items()} == {"end-edge": 0.5, "end-cloud": 1.0}


def test_the_links_of_an_end_device_lead_to_the_tiers_above(tmp_path: Path) -> None:
    assert write_links(read_profile("paper"), "end", tmp_path / "links.toml")
    edge, cloud = read_links(tmp_path / "links.toml").link
    assert (edge.name, edge.delay_s, cloud.name, cloud.delay_s) == ("end-edge", 0.25, "end-cloud", 0.5)
    assert edge.leads_to(address_of(Tier.EDGE, 4))
    assert cloud.leads_to(address_of(Tier.CLOUD, 1))
    assert not any(link.leads_to(host) for link in (edge, cloud) for host in ("127.0.0.1", address_of(Tier.END, 1)))


def test_each_end_device_has_its_own_link_from_the_scheduler(tmp_path: Path) -> None:
    wifi = read_profile("wifi")
    assert write_links(wifi, "scheduler", tmp_path / "links.toml")
    links = read_links(tmp_path / "links.toml").link
    assert len(links) == 8
    assert [link.leads_to(address_of(Tier.END, 3)) for link in links].index(True) == 2
    assert {link.bandwidth_bps for link in links} == {wifi.path["scheduler-end"].bandwidth_bps}


def test_without_a_link_there_is_no_file(tmp_path: Path) -> None:
    assert not write_links(read_profile("native"), "end", tmp_path / "links.toml")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (HEAD, "nodes is missing (a table with the numbers of nodes: end, edge and cloud)"),
        (HEAD + "[nodes]\nend = 2\nedge = 1", "mine.toml: nodes.cloud is missing (number of cloud nodes, 0 to 254)"),
        (
            HEAD + NODES + "[path.end-edge]\nbandwidth_bps = 1",
            "path.end-edge.delay_s is missing (seconds one way, half",
        ),
        (HEAD + NODES + "[compute_ms_per_image]\nend = -1", "compute_ms_per_image.end is -1: input should be greater"),
        (HEAD + NODES + "[compute_ms_per_image]\nedeg = 1", "compute_ms_per_image.edeg is unknown; did you mean edge?"),
        (HEAD + NODES + "[path.end-cloud]\ndelay_s = -1", "path.end-cloud.delay_s is -1: input should be greater"),
        (HEAD + NODES + "[path.end-cloud]\nbandwith_bps = 1", "is unknown; did you mean bandwidth_bps?"),
        (HEAD + NODES + "[path.end-clod]\ndelay_s = 1", "there is no path end-clod; did you mean end-cloud?"),
        (HEAD + "[nodes]\nend = 0\nedge = 1\ncloud = 1", "nodes.end is 0: input should be greater than or equal to 1"),
        (HEAD + "nodes = 5", "nodes is 5: input should be a table"),
        (HEAD + "nodes = [1]", "nodes: input should be a table"),
        (HEAD + NODES + "[path]\nend-edge = 1", "path.end-edge is 1: input should be a table"),
        ("path = 1\n" + HEAD + NODES, "path is 1: input should be a table"),
        (
            HEAD + NODES + "[path.end-edge]\ndelay_s = 1e300",
            "delay_s is 1e+300: input should be less than or equal to 3600",
        ),
        (
            HEAD + NODES + "[compute_ms_per_image]\nend = 1e300",
            "is 1e+300: input should be less than or equal to 3600000",
        ),
        ("\udcff", "mine.toml is not text in UTF-8"),
        (HEAD + "[nods]\nend = 1", "nods is unknown; did you mean nodes?"),
        (HEAD + "[nodes]\nend = true\nedge = 1\ncloud = 1", "nodes.end is True: input should be a valid integer"),
        (HEAD + "[nodes]\nend = '3'\nedge = 1\ncloud = 1", "nodes.end is '3': input should be a valid integer"),
    ],
)
def test_a_wrong_profile_is_refused_in_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(SetupError) as caught:
        read_profile(str(path))
    assert sentence in str(caught.value)


def test_the_example_of_the_documentation_is_a_profile(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "experiments.md").read_text(encoding="utf-8")
    (example,) = (block for block in page.split("```toml\n")[1:] if block.startswith("title"))
    (tmp_path / "mine.toml").write_text(example.partition("```")[0])
    profile = read_profile(str(tmp_path / "mine.toml"))
    assert (profile.nodes.edge, profile.path["end-cloud"].delay_s) == (1, 0.03)


def test_a_byte_order_mark_is_no_part_of_a_profile(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(HEAD + NODES, encoding="utf-8-sig")
    assert read_profile(str(tmp_path / "mine.toml")).nodes.end == 2


def test_a_profile_says_what_it_emulates() -> None:
    path = {**read_profile("lte").path, "end-cloud": PathSpec(delay_s=0.5, reset=0.1)}
    lte = read_profile("lte").model_copy(update={"path": path})
    assert str(lte) == (
        "End devices on LTE: 8 end, 4 edge, 1 cloud; links, one way: end-edge 0.0175 s +- 0.008 s, 12 Mbit/s; "
        "end-cloud 0.5 s, 0.1 of all reset"
    )
    assert lte.limits == "end-edge 12 Mbit/s"
    assert str(read_profile("native")).endswith("; no links")


def test_an_unknown_profile_brings_the_closest_name() -> None:
    with pytest.raises(InvalidInput, match="there is no profile 'papr'; did you mean paper"):
        read_profile("papr")
