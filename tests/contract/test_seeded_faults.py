"""The contract checks can fail: each of five faults in the core is seen by at least one of them."""

from tests.seeded_faults import FAULTS, seen_by


def test_every_seeded_fault_is_seen_and_a_right_core_passes():
    found = seen_by()
    assert found.pop("none") == []
    assert set(found) == set(FAULTS)
    for fault, names in found.items():
        assert names, fault
