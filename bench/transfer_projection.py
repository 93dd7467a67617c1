"""What the measured points say of larger models on faster links, held against a point that it was not fitted to.

A version is published (every weight read, every changed one written), sent, and applied while it arrives:

    seconds = publish + max(send, apply) + min(send, apply) / buckets
    publish = (a x bytes + b x changed) / cores          apply = (c x bytes + d x changed) / cores
    send    = bytes per changed x changed / rate of the link

a, b, c and d come from two densities; what the model says of a third one is compared with what was measured there.
Projections assume that work divides among cores (buckets are independent, and each rank publishes its own), that these
read memory as fast together as one does alone, and that nothing else is on the link. They are no measurements.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds on one core: `per_byte` of weights, `per_changed` element."""

    per_byte: float
    per_changed: float

    def seconds(self, model_bytes: float, changed: float) -> float:
        return self.per_byte * model_bytes + self.per_changed * changed


@dataclass(frozen=True, slots=True)
class Point:
    """What one density took."""

    changed: float
    publish_s: float
    apply_s: float


@dataclass(frozen=True, slots=True)
class Costs:
    publish: Work
    apply: Work
    bytes_per_changed: float


def fitted(model_bytes: float, sparse: Point, dense: Point, bytes_per_changed: float) -> Costs:
    """Through two points of one model. Raises ValueError if they have the same changes."""
    return Costs(
        _line(model_bytes, (sparse.changed, sparse.publish_s), (dense.changed, dense.publish_s)),
        _line(model_bytes, (sparse.changed, sparse.apply_s), (dense.changed, dense.apply_s)),
        bytes_per_changed,
    )


def projected_s(
    costs: Costs, model_bytes: float, changed: float, link_bytes_per_s: float, cores: int, buckets: int
) -> float:
    """Seconds from new weights at the trainer to new weights at the engine; `cores` at each end."""
    publish = costs.publish.seconds(model_bytes, changed) / cores
    apply = costs.apply.seconds(model_bytes, changed) / cores
    send = costs.bytes_per_changed * changed / link_bytes_per_s
    return publish + max(send, apply) + min(send, apply) / buckets


def _line(model_bytes: float, one: tuple[float, float], other: tuple[float, float]) -> Work:
    if one[0] == other[0]:
        raise ValueError("two points with the same changes make no line")
    per_changed = (other[1] - one[1]) / (other[0] - one[0])
    return Work((one[1] - per_changed * one[0]) / model_bytes, per_changed)
