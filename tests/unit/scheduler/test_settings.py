"""Settings that contradict each other or can mean nothing: one sentence that names them."""

from collections.abc import Mapping

import pytest

from end_node.settings import EndSettings
from scheduler.settings import SchedulerSettings
from tierkit.errors import SetupError
from tierkit.settings import ServiceSettings, load_settings


@pytest.mark.parametrize(
    ("service", "flags", "sentence"),
    [
        (
            SchedulerSettings,
            {"heartbeat_s": "10"},
            "the default of suspect_s is 0.5: must be longer than heartbeat_s (10)",
        ),
        (
            SchedulerSettings,
            {"suspect_s": "4"},
            "the default of lease_s is 3.0: must be longer than suspect_s (4)",
        ),
        (
            SchedulerSettings,
            {"suspect_s": "4", "lease_s": "4"},
            "the flag --lease-s is '4': must be longer than suspect_s (4)",
        ),
        (
            SchedulerSettings,
            {"trusted": "end,foo_bar!"},
            "the flag --trusted is 'end,foo_bar!': 'foo_bar!' is neither a tier (end, edge, cloud) nor a node id",
        ),
        (
            EndSettings,
            {"allowed_upstreams": "http://10.0.0.5:8072,foo"},
            "the flag --allowed-upstreams is 'foo': must start with http:// or https://",
        ),
    ],
)
def test_what_cannot_be_is_told(service: type[ServiceSettings], flags: Mapping[str, str], sentence: str) -> None:
    with pytest.raises(SetupError) as caught:
        load_settings(service, flags=flags)
    assert str(caught.value) == sentence


def test_tiers_and_node_ids_may_be_trusted() -> None:
    assert load_settings(SchedulerSettings, flags={"trusted": "end,rack_cloud-1"}).trusted == ("end", "rack_cloud-1")


def test_upstreams_are_urls() -> None:
    settings = load_settings(EndSettings, flags={"allowed_upstreams": "http://10.0.0.5:8072/, https://far/edge"})
    assert settings.allowed_upstreams == ("http://10.0.0.5:8072", "https://far/edge")
