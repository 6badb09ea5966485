"""What a client service enforces by itself while no router counts."""

from corolla.chassis.tenant_limits import Use
from corolla.client.quotas.share import LocalShare, Shortage


def flow(amount: int, limit: int = 10, *, must_fit: bool = True) -> Use:
    """Of a limit that comes anew each second."""
    return Use("flow", amount, limit, must_fit, 1000)


def hold(amount: int, limit: int = 10, *, must_fit: bool = True) -> Use:
    return Use("hold", amount, limit, must_fit, 0)


def test_a_bucket_is_full_at_first_and_fills_with_time() -> None:
    share = LocalShare()
    assert [share.take("t", str(number), [flow(4)], 0.0) for number in range(3)] == [None, None, Shortage("flow", 0.2)]
    assert share.take("t", "2", [flow(4)], 0.19) is not None
    assert share.take("t", "2", [flow(4)], 0.21) is None


def test_a_bucket_never_holds_more_than_the_limit() -> None:
    share = LocalShare()
    share.take("t", "a", [flow(10)], 0.0)
    assert share.take("t", "b", [flow(10)], 100.0) is None
    assert share.take("t", "c", [flow(1)], 100.0) is not None


def test_more_than_a_full_bucket_is_taken_from_a_full_one_and_made_up_for() -> None:
    share = LocalShare()
    assert share.take("t", "a", [flow(25)], 0.0) is None
    assert share.take("t", "b", [flow(1)], 0.0) == Shortage("flow", 1.6)
    assert share.take("t", "b", [flow(1)], 1.7) is None


def test_what_was_used_already_is_charged_in_any_case() -> None:
    share = LocalShare()
    assert share.take("t", "a", [flow(30, must_fit=False)], 0.0) is None
    assert share.take("t", "b", [flow(1)], 1.0) is not None


def test_the_same_take_again_changes_nothing() -> None:
    share = LocalShare()
    for _ in range(5):
        assert share.take("t", "a", [flow(10), hold(10)], 0.0) is None
    assert share.held("t", "a") == {"hold": 10}


def test_nothing_of_a_take_that_does_not_fit_is_counted() -> None:
    share = LocalShare()
    assert share.take("t", "a", [flow(10), hold(11)], 0.0) == Shortage("hold", 0.0)
    assert share.take("t", "a", [hold(10), flow(11, 20)], 0.0) is None


def test_what_is_held_is_given_back_once() -> None:
    share = LocalShare()
    assert share.take("t", "a", [hold(6)], 0.0) is None
    assert share.take("t", "b", [hold(6)], 0.0) == Shortage("hold", 0.0)
    for _ in range(2):
        share.give_back("t", "a")
    assert share.take("t", "b", [hold(6)], 0.0) is None
    assert share.take("t", "c", [hold(5)], 0.0) is not None


def test_tenants_do_not_take_from_each_other() -> None:
    share = LocalShare()
    assert share.take("t", "a", [flow(10), hold(10)], 0.0) is None
    assert share.take("u", "a", [flow(10), hold(10)], 0.0) is None


def test_a_share_is_a_part_of_the_limit_and_never_nothing() -> None:
    share = LocalShare()
    assert share.take("t", "a", [hold(5), flow(5)], 0.0, num_shares=2) is None
    assert share.take("t", "b", [hold(1)], 0.0, num_shares=2) == Shortage("hold", 0.0)
    assert share.take("t", "b", [flow(1)], 0.0, num_shares=2) == Shortage("flow", 0.2)
    assert share.take("u", "a", [hold(1, 2), flow(1, 2)], 0.0, num_shares=30) is None
