"""Half an hour of versions over links that break, with a relay and a receiver that come and go: nothing grows."""

from __future__ import annotations

import os
from statistics import median

import pytest
from soak_main import Sample, soak

SECONDS = float(os.environ.get("ROSE_SOAK_S", "1800"))
WARM_SHARE = 0.3


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 120)
def test_memory_descriptors_and_threads_stay_flat() -> None:
    samples: list[Sample] = []
    soak(SECONDS, samples.append)
    warm = samples[int(WARM_SHARE * len(samples)) :]
    early, late = warm[: len(warm) // 2], warm[len(warm) // 2 :]

    def grown(of: str) -> float:
        return median(getattr(one, of) for one in late) / median(getattr(one, of) for one in early)

    # Short-lived threads fragment the allocator's arenas a little; to keep one delta a version would be a fifth.
    assert grown("resident_bytes") < 1.1
    assert grown("descriptors") < 1.2
    assert grown("threads") < 1.2
    assert samples[-1].applied > samples[-1].published
