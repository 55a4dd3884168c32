import threading

import pytest

from rayrec.serve.events.grouping import Grouped


def test_requests_that_come_during_one_share_the_next():
    groups, began, may_go_on = [], threading.Event(), threading.Event()

    def work(requests):
        groups.append(list(requests))
        if len(groups) == 1:
            began.set()
            may_go_on.wait(30)
        return [request * 10 for request in requests]

    grouped, results = Grouped(work), {}
    threads = [
        threading.Thread(target=lambda n=n: results.update({n: grouped(n)}), daemon=True) for n in range(6)
    ]
    threads[0].start()
    began.wait(30)
    for thread in threads[1:]:
        thread.start()
    while len(grouped._waiting) < 5:
        pass
    may_go_on.set()
    for thread in threads:
        thread.join(30)

    assert results == {n: n * 10 for n in range(6)}
    assert groups[0] == [0]
    assert sorted(groups[1]) == [1, 2, 3, 4, 5]
    assert len(groups) == 2
    assert grouped(7) == 70, "a lone request waits for nobody"


def test_who_shares_a_step_that_fails_is_told_and_the_next_begins_anew():
    def work(requests):
        if "bad" in requests:
            raise OSError("no room")
        return requests

    grouped = Grouped(work)

    with pytest.raises(OSError, match="no room"):
        grouped("bad")
    assert grouped("good") == "good"


def test_every_request_of_many_threads_gets_its_own_answer():
    grouped, wrong = Grouped(lambda requests: [request + 1 for request in requests], most=3), []

    def ask(first):
        wrong.extend(n for n in range(first, first + 300) if grouped(n) != n + 1)

    threads = [threading.Thread(target=ask, args=(1000 * n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert not wrong
    assert not any(thread.is_alive() for thread in threads)
