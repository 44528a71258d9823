import pytest

from baton.service.errors import Overloaded
from gateway.queue.admission import AdmissionControl
from gateway.queue.quota_file import Quota
from gateway.queue.quotas import Quotas


def test_the_gateway_and_its_tenants():
    admission = AdmissionControl(3, Quotas({"a": Quota(concurrent_requests=1)}))
    first = admission.enter("1", "a")
    with pytest.raises(Overloaded) as caught:
        admission.enter("2", "a")
    assert caught.value.reason == "TENANT_REQUESTS"
    admission.enter("3", "b")
    admission.enter("4", "b")
    with pytest.raises(Overloaded) as caught:
        admission.enter("5", "b")
    assert caught.value.reason == "TOO_MANY_REQUESTS"
    admission.leave("1", first, 0)
    admission.enter("2", "a")


def test_a_flood_leaves_the_others_their_places():
    admission = AdmissionControl(8)
    held = [admission.enter(f"f{i}", "flood") for i in range(8)]
    with pytest.raises(Overloaded) as caught:
        admission.enter("f8", "flood")
    assert caught.value.reason == "TOO_MANY_REQUESTS"
    for i in range(4):
        admission.enter(f"q{i}", "quiet")
    with pytest.raises(Overloaded):
        admission.enter("q4", "quiet")
    for i, reservation in enumerate(held):
        admission.leave(f"f{i}", reservation, 0)
    admission.enter("q4", "quiet")
