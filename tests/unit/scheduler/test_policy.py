"""Reading and settling a job's policy."""

from __future__ import annotations

import pytest

from scheduler.core.policy import JobPolicy, PolicyRequest, read_policy, settle
from tierkit.errors import InvalidInput
from tierkit.types import Scheme, UpstreamLoss


def test_fields_are_read_from_text():
    policy = read_policy([("scheme", "end-edge"), ("batch_size", "20"), ("deadline_s", "1.5"), ("name", "")])
    assert (policy.scheme, policy.batch_size, policy.deadline_s, policy.name) == (Scheme.END_EDGE, 20, 1.5, None)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (("shceme", "end"), "unknown field 'shceme': did you mean 'scheme'?"),
        (("zzz", "1"), "unknown field 'zzz': known are name, scheme"),
        (("scheme", "fog"), "scheme: .*'end', 'end-cloud', 'end-edge', 'mapping' or 'adaptive'"),
        (("batch_size", "0"), "batch_size: .*greater than or equal to 1"),
        (("batch_size", "many"), "batch_size: .*integer"),
        (("deadline_s", "-1"), "deadline_s: .*greater than 0"),
        (("deadline_s", "nan"), "deadline_s"),
        (("task_deadline_s", "inf"), "task_deadline_s"),
        (("privacy", "some"), "privacy"),
    ],
)
def test_a_wrong_field_is_named(field, message):
    with pytest.raises(InvalidInput, match=message):
        read_policy([field])


def test_a_field_given_twice_is_refused():
    with pytest.raises(InvalidInput, match="'scheme' is given twice"):
        read_policy([("scheme", "end"), ("scheme", "mapping")])


def settled(request: PolicyRequest) -> JobPolicy:
    return settle(request, scheme=Scheme.MAPPING, deadline_s=100.0, task_deadline_s=10.0)


def test_settling_fills_what_is_open():
    policy = settled(PolicyRequest())
    assert (policy.scheme, policy.deadline_s, policy.task_deadline_s) == (Scheme.MAPPING, 100.0, 10.0)
    policy = settled(PolicyRequest(scheme=Scheme.END, task_deadline_s=3.0))
    assert (policy.scheme, policy.task_deadline_s) == (Scheme.END, 3.0)


def test_waiting_for_an_upper_node_is_bounded_by_the_job_alone():
    wait = PolicyRequest(on_upstream_loss=UpstreamLoss.WAIT)
    assert settled(wait).task_deadline_s == 100.0
    assert settled(wait.model_copy(update={"deadline_s": 50.0})).task_deadline_s == 50.0
    assert settled(wait.model_copy(update={"task_deadline_s": 5.0})).task_deadline_s == 5.0
