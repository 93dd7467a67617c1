"""From one trainer to engines everywhere: versions are published, relayed, fetched; only what is needed crosses a link.

Follow a version: `publisher` packs and stores it and announces an `offer`; a `receiver` hears of it, asks for the `way`
from what it holds, and fetches what that names; `source` is who answers, on a publisher and on a `relay` alike.

| module | holds |
|---|---|
| `publisher`, `receiver`, `relay` | what people use: publish, fetch, pass on |
| `offer`, `way`, `ancestry` (pure) | what is announced, how one gets there, over which relays; strictly parsed texts |
| `known_answer` (pure), `told_answers` | what a version answers, told beside it |
| `source`, `outlet` | a store behind a transport: objects, ways made on demand, announcements |
| `subscription`, `following` | hearing of versions; one attempt at fetching what leads to one |
| `above` | what a relay asks of its upstream beside versions |
| `lineage` | versions into a relay's store, and another lineage into its place |
| `shelf`, `arrival` | objects that were fetched, and those under way, resumable after a kill |

A relay runs without torch, so only who asks for `WeightPublisher` imports that.
"""

from typing import TYPE_CHECKING

from rose_transfer.distribution.offer import Offer
from rose_transfer.distribution.outlet import MakeServer
from rose_transfer.distribution.receiver import Fetched, Receiver
from rose_transfer.distribution.relay import Relay, Relayed

if TYPE_CHECKING:
    from rose_transfer.distribution.publisher import WeightPublisher

__all__ = ["Fetched", "MakeServer", "Offer", "Receiver", "Relay", "Relayed", "WeightPublisher"]


def __getattr__(name: str) -> object:
    if name != "WeightPublisher":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rose_transfer.distribution.publisher import WeightPublisher

    return WeightPublisher
