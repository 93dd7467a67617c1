"""How parameters lie in flat buckets: the same for every version of a model, and for everybody who holds it.

    {"buckets": [[shard class, index, dtype, [[parameter, [starts], [sizes]], ...]], ...],
     "layout": 1, "parameters": {name: [dtype, [shape]]}}

Invariants
- Buckets stand in the order of their shard classes, and of their indices in these.
- A bucket has elements of one dtype, and at most 64 MiB of them. Its regions lie in it one behind the other, each
  row-major, without gaps.
- No element of the model lies in two places. Not every one has to lie somewhere: a relay may hold a few shard classes.
- A parameter has at most `AXES_MAX` axes and fewer than 2^63 elements.
- The same parameters and regions give the same packing, to the byte.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rose.errors import TransferError
from rose_transfer.codec.streams import BUCKET_BYTES_MAX
from rose_transfer.layout.box import AXES_MAX, Box
from rose_transfer.layout.disjoint import are_disjoint
from rose_transfer.layout.holdings import Region, shard_classes
from rose_transfer.layout.layout import Layout, Parameter
from rose_transfer.store import canonical

LAYOUT = 1
TEXT = canonical.Kind("packing", bytes_max=48 * 2**20, values_max=5 * 2**20)
"""235 billion parameters, experts each in a tensor, take 6 MiB and 0.6 million values for 8 ranks that share out the
experts, and 23 MiB and 2.6 million if every tensor is cut in 8: twice that may come, and no more, for each million
values costs whoever reads them a second or more and some 50 MiB, whether they make sense or not."""
LANE_BYTES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
WHOLE_MODEL = "all"
"""The shard class of everything, where ranks are not told apart."""


@dataclass(frozen=True, slots=True, order=True)
class BucketId:
    """Buckets of a shard class are counted from 0."""

    shard_class: str
    index: int

    def __str__(self) -> str:
        return f"{self.shard_class}/{self.index}"


@dataclass(frozen=True, slots=True)
class Bucket:
    """What one bucket holds: `regions`, in this order."""

    bucket_id: BucketId
    dtype: str
    regions: tuple[Region, ...]

    @property
    def elements(self) -> int:
        return sum(region.box.elements for region in self.regions)

    @property
    def lane(self) -> int:
        """Bytes per element."""
        return LANE_BYTES[self.dtype]

    @property
    def dense_bytes(self) -> int:
        return self.elements * self.lane

    def spans(self) -> Iterator[tuple[Region, slice]]:
        """Each region with its elements of the bucket."""
        at = 0
        for region in self.regions:
            yield region, slice(at, at + region.box.elements)
            at += region.box.elements


@dataclass(frozen=True, slots=True)
class Packing:
    """`parameters` describes the whole model, packed or not.

    Raises ValueError if the invariants above do not hold, TransferError if that is too laborious to tell.
    """

    parameters: Mapping[str, Parameter]
    buckets: tuple[Bucket, ...]

    def __post_init__(self) -> None:
        for name, parameter in self.parameters.items():
            if len(parameter.shape) > AXES_MAX or math.prod(parameter.shape) >= 2**63:
                raise ValueError(f"{name} has shape {parameter.shape[: AXES_MAX + 1]}")
        boxes: dict[str, list[Box]] = {}
        before = BucketId("", -1)
        for bucket in self.buckets:
            bucket_id = bucket.bucket_id
            if bucket_id <= before or bucket_id.index != (
                before.index + 1 if bucket_id.shard_class == before.shard_class else 0
            ):
                raise ValueError(f"bucket {bucket_id} is out of its order, behind {before}")
            before = bucket_id
            _check_bucket(bucket, self.parameters)
            for region in bucket.regions:
                boxes.setdefault(region.parameter, []).append(region.box)
        for name, held in boxes.items():
            if len(held) > 1 and not are_disjoint(held):
                raise ValueError(f"an element of {name} lies in two places")

    @property
    def dense_bytes(self) -> int:
        return sum(bucket.dense_bytes for bucket in self.buckets)

    def to_bytes(self) -> bytes:
        """The text described above."""
        return canonical.dump(_value(self), TEXT)


def pack_regions(
    parameters: Mapping[str, Parameter],
    classes: Mapping[str, Iterable[Region]],
    bucket_bytes: int = BUCKET_BYTES_MAX,
) -> Packing:
    """Fill buckets of up to `bucket_bytes` with the regions of each shard class, by name.

    Raises ValueError if regions overlap, lie outside, or have a dtype that no lane is for.
    """
    buckets: list[Bucket] = []
    for shard_class, regions in sorted(classes.items()):
        lanes: dict[str, list[Region]] = {}
        for region in sorted(regions):
            if region.box.elements:
                lanes.setdefault(parameters[region.parameter].dtype, []).append(region)
        filled = (
            (dtype, held)
            for dtype, wanted in sorted(lanes.items())
            for held in _fill(wanted, bucket_bytes // LANE_BYTES.get(dtype, bucket_bytes))
        )
        buckets += (
            Bucket(BucketId(shard_class, index), dtype, tuple(held)) for index, (dtype, held) in enumerate(filled)
        )
    return Packing(dict(sorted(parameters.items())), tuple(buckets))


def pack_whole(parameters: Mapping[str, Parameter], bucket_bytes: int = BUCKET_BYTES_MAX) -> Packing:
    """`pack_regions` of every parameter as one shard class."""
    regions = [Region(name, Box.whole(value.shape)) for name, value in parameters.items()]
    return pack_regions(parameters, {WHOLE_MODEL: regions}, bucket_bytes)


def pack_for(receivers: Iterable[Layout], bucket_bytes: int = BUCKET_BYTES_MAX) -> Packing:
    """What these ranks hold, in their dtypes; what several hold alike is one shard class.

    Raises TransferError if two of them say different things of a parameter.
    """
    layouts = tuple(receivers)
    parameters: dict[str, Parameter] = {}
    for layout in layouts:
        for name, value in layout.parameters.items():
            if parameters.setdefault(name, value) != value:
                raise TransferError(
                    f"{layout.holder} has {name} as {value}, another receiver as {parameters[name]}",
                    expected="receivers of one model, with the same dtypes",
                    to_do="publish to the others from a folder of their own",
                )
    classes = shard_classes(layouts)
    # The names of holders would grow with replicas; the regions say who needs a bucket.
    width = len(str(len(classes)))
    named = {f"shard-{number:0{width}}": found.regions for number, found in enumerate(classes)}
    return pack_regions(parameters, named, bucket_bytes)


def from_bytes(data: bytes) -> Packing:
    """The packing of a text. Raises MalformedRecord unless the text is one that `to_bytes` writes."""
    with canonical.reading(TEXT):
        value = canonical.load(data, TEXT, buckets=_bucket, parameters=_parameter)
        if value["layout"] != LAYOUT:
            raise ValueError(f"layout {value['layout']}, not {LAYOUT}")
        packing = Packing(value["parameters"], tuple(value["buckets"]))
        canonical.check(_value(packing), data, TEXT)
    return packing


def _fill(regions: Iterable[Region], elements_max: int) -> Iterator[list[Region]]:
    held: list[Region] = []
    room = elements_max
    for region in regions:
        for block in _blocks(region.box, elements_max):
            rest: Box | None = block
            while rest is not None:
                part, rest = _first_rows(rest, room)
                if part is None:
                    yield held
                    held, room = [], elements_max
                else:
                    held.append(Region(region.parameter, part))
                    room -= part.elements
    if held:
        yield held


def _blocks(box: Box, elements_max: int) -> Iterator[Box]:
    """`box` in parts that lie in one piece, one behind the other, and of which an empty bucket takes at least a row."""
    axis, row = _rows(box)
    if row <= elements_max:
        yield box
        return
    for at in range(box.sizes[axis]):
        yield from _blocks(_slice(box, axis, at, 1), elements_max)


def _first_rows(box: Box, room: int) -> tuple[Box | None, Box | None]:
    """As many rows as have room, and what follows them; None for nothing."""
    if box.elements <= room:
        return box, None
    axis, row = _rows(box)
    rows = room // row
    if rows == 0:
        return None, box
    return _slice(box, axis, 0, rows), _slice(box, axis, rows, box.sizes[axis] - rows)


def _rows(box: Box) -> tuple[int, int]:
    """The axis along which a box can be cut so that its parts lie in one piece, and the elements of a row there."""
    axis = next((axis for axis, size in enumerate(box.sizes) if size > 1), 0)
    return axis, math.prod(box.sizes[axis + 1 :])


def _slice(box: Box, axis: int, start: int, size: int) -> Box:
    starts, sizes = list(box.starts), list(box.sizes)
    starts[axis] += start
    sizes[axis] = size
    return Box(tuple(starts), tuple(sizes))


def _check_bucket(bucket: Bucket, parameters: Mapping[str, Parameter]) -> None:
    if bucket.dtype not in LANE_BYTES:
        raise ValueError(f"bucket {bucket.bucket_id} has {bucket.dtype} elements; there are {', '.join(LANE_BYTES)}")
    elements = 0
    for region in bucket.regions:
        parameter = parameters.get(region.parameter)
        if parameter is None or parameter.dtype != bucket.dtype:
            raise ValueError(f"bucket {bucket.bucket_id}: there is no {region.parameter} of {bucket.dtype}")
        held = region.box.elements if region.box.within(parameter.shape) else 0
        if held == 0:
            raise ValueError(f"bucket {bucket.bucket_id}: {region.parameter}{region.box} is empty or lies outside")
        elements += held
    if not 0 < elements * bucket.lane <= BUCKET_BYTES_MAX:
        raise ValueError(f"bucket {bucket.bucket_id} has {elements * bucket.lane} bytes, not 1 to {BUCKET_BYTES_MAX}")


def _value(packing: Packing) -> dict[str, Any]:
    return {
        "buckets": map(_bucket_value, packing.buckets),
        "layout": LAYOUT,
        "parameters": {name: [value.dtype, value.shape] for name, value in packing.parameters.items()},
    }


def _bucket_value(bucket: Bucket) -> list[Any]:
    regions = [[region.parameter, region.box.starts, region.box.sizes] for region in bucket.regions]
    return [bucket.bucket_id.shard_class, bucket.bucket_id.index, bucket.dtype, regions]


def _bucket(value: Any) -> Bucket:
    shard_class, index, dtype, regions = value
    numbers, text = canonical.numbers, canonical.text
    return Bucket(
        BucketId(text(shard_class), canonical.number(index)),
        text(dtype),
        tuple(
            Region(text(name), Box(numbers(starts, AXES_MAX), numbers(sizes, AXES_MAX)))
            for name, starts, sizes in regions
        ),
    )


def _parameter(value: Any) -> Parameter:
    dtype, shape = value
    return Parameter(canonical.numbers(shape, AXES_MAX), canonical.text(dtype))
