"""The books: whatever the order of events and wherever a run stops, they can be closed and then balance."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rose.ledger import Account
from rose.trainer.books import Books


class Page:
    """An engine's counts, by request."""

    engine_id = "engine-0"

    def __init__(self, incarnation: str = "a") -> None:
        self.incarnation = incarnation
        self.counts: dict[str, int] = {}

    def total_tokens(self) -> int:
        return sum(self.counts.values())

    def request_tokens(self, request_id: str) -> int:
        return self.counts.get(request_id, 0)


def watched(books: Books, incarnation: str = "a") -> Page:
    page = Page(incarnation)
    books.watch(page)
    return page


def balance(books: Books) -> tuple[int, int, tuple[str, ...]]:
    return books.ledger.gap(), books.ledger.unsettled() + books.ledger.open_requests(), books.ledger.violations()


def test_a_turn_that_arrived_whole_is_trained(books: Books) -> None:
    page = watched(books)
    books.open_trajectory("t")
    books.start_request("r", "t", page)
    page.counts["r"] = 5
    books.end_request("r", 5)
    books.settle("t", Account.TRAINED)
    books.read_pages()
    assert books.ledger.accounts()[Account.TRAINED] == 5
    assert balance(books) == (0, 0, ())


def test_what_an_engine_made_and_nobody_got_is_unreceived(books: Books) -> None:
    page = watched(books)
    books.open_trajectory("t")
    books.start_request("r", "t", page)
    page.counts["r"] = 7
    books.end_request("r", 4, page.request_tokens("r"))
    books.settle("t", Account.TRAINED)
    books.read_pages()
    accounts = books.ledger.accounts()
    assert (accounts[Account.TRAINED], accounts[Account.UNRECEIVED]) == (4, 3)
    assert balance(books) == (0, 0, ())


def test_closing_counts_open_requests_by_the_page_of_their_own_incarnation(books: Books) -> None:
    dead, live = watched(books, "a"), watched(books, "b")
    for index, page in enumerate((dead, live)):
        books.open_trajectory(f"t{index}")
        books.start_request(f"r{index}", f"t{index}", page)
        page.counts[f"r{index}"] = 10 + index
    books.close()
    assert books.ledger.accounts()[Account.UNRECEIVED] == 21
    assert books.ledger.generated() == 21
    assert balance(books) == (0, 0, ())


def test_closing_aborts_what_was_received_and_not_settled(books: Books) -> None:
    page = watched(books)
    books.open_trajectory("t")
    books.start_request("r", "t", page)
    page.counts["r"] = 3
    books.end_request("r", 3)
    books.close()
    assert books.ledger.accounts()[Account.ABORTED] == 3
    assert balance(books) == (0, 0, ())


def test_closing_twice_changes_nothing(books: Books) -> None:
    page = watched(books)
    books.open_trajectory("t")
    books.start_request("r", "t", page)
    page.counts["r"] = 2
    books.close()
    before = books.ledger.accounts()
    books.close()
    assert books.ledger.accounts() == before
    assert balance(books) == (0, 0, ())


@given(
    turns=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(0, 9), st.booleans(), st.booleans()), max_size=12
    ),
    settled=st.sets(st.integers(0, 5)),
    deaths=st.sets(st.integers(0, 11)),
)
def test_whatever_happened_before_closed_books_balance(
    turns: list[tuple[int, int, int, bool, bool]], settled: set[int], deaths: set[int]
) -> None:
    """Turns of six trajectories: (trajectory, received, made beyond that, whether the stream broke, still open)."""
    books = Books()
    page = watched(books, "0")
    for trajectory in range(6):
        books.open_trajectory(f"t{trajectory}")
    still_open = {trajectory for trajectory, _, _, _, left_open in turns if left_open}
    for index, (trajectory, received, lost, broke, left_open) in enumerate(turns):
        request = f"r{index}"
        books.start_request(request, f"t{trajectory}", page)
        page.counts[request] = received + (lost if broke or left_open else 0)
        if not left_open:
            books.end_request(request, received, page.counts[request] if broke else None)
        if index in deaths:
            page = watched(books, f"{index + 1}")
    for trajectory in settled - still_open:
        books.settle(f"t{trajectory}", Account.TRAINED)
    books.close()
    assert balance(books) == (0, 0, ())
    assert books.ledger.accounts()[Account.IN_FLIGHT] == 0
