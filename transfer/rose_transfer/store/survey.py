"""What people ask of a store: what is in it, whether it is whole, what changed from one version to another."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from rose.errors import TransferError
from rose_transfer.store import chain
from rose_transfer.store.packing import Packing
from rose_transfer.store.reader import StoreReader


@dataclass(frozen=True, slots=True)
class VersionRow:
    """One kept version. `ways` are (base, bytes) of the manifests that lead to it; `joiner_bytes` is what somebody
    fetches who holds nothing, `dense_bytes` what the model itself takes; both are None if the version is lost.
    """

    version: int
    fingerprint: str
    ways: tuple[tuple[int | None, int], ...]
    joiner_bytes: int | None
    dense_bytes: int | None


@dataclass(frozen=True, slots=True)
class ParameterChange:
    """`changed` of the `elements` of a parameter that is packed have other bits."""

    parameter: str
    elements: int
    changed: int


def listing(store: StoreReader) -> tuple[VersionRow, ...]:
    """The kept versions, oldest first."""
    links = store.links()
    dense = {end: found.dense_bytes for found in store.manifests() for end in (found.version, found.base)}
    rows: list[VersionRow] = []
    for version in store.versions():
        ways = tuple((link.base, link.encoded_bytes) for link in links if link.version == version)
        route = chain.find_route(links, None, version)
        joiner_bytes = None if route is None else chain.route_bytes(route)
        dense_bytes = None if route is None else dense[version]
        rows.append(VersionRow(version, store.fingerprint(version), ways, joiner_bytes, dense_bytes))
    return tuple(rows)


def verify(store: StoreReader) -> tuple[str, ...]:
    """Read every object and rebuild every version; what is wrong, a line each. Reads as much as all of that is.

    A writer may go on meanwhile: what it has removed is not wrong, and what it has added is not looked at. What seems
    wrong is looked at again, until the same is found twice and the writer has left alone what could not be read.
    """
    wrong, overtaken = _wrong(store)
    while wrong:
        store.scan()
        again, overtaken_again = _wrong(store, wrong)
        again = {thing: line for thing, line in again.items() if thing in wrong}
        if again.keys() == wrong.keys() and not overtaken and not overtaken_again:
            break
        wrong, overtaken = again, overtaken_again
    return tuple(wrong.values())


def _wrong(store: StoreReader, among: Collection[str] | None = None) -> tuple[dict[str, str], bool]:
    """By what it is that is wrong, a line that says so; with `among`, other buckets and versions are not read.

    And whether the writer has meanwhile removed a way that could not be read: it may have put another in its place.
    """
    scanned = store.manifests()
    wrong = {name: f"{name}: {why}" for name, why in store.not_counted.items()}
    for found in scanned:
        for entry in found.buckets:
            thing = f"{entry.bucket_id} of {found.key}"
            if among is None or thing in among:
                try:
                    store.load(found, entry)
                except TransferError as error:
                    base = "nothing" if found.base is None else f"version {found.base}"
                    wrong[thing] = f"from {base} to version {found.version}, bucket {entry.bucket_id}: {error}"
    for version in store.versions():
        thing = f"version {version}"
        if among is None or thing in among:
            try:
                for _ in store.read(version):
                    pass
            except TransferError as error:
                wrong[thing] = f"version {version}: {error}"
    left_out = set(scanned) - set(store.manifests())
    return wrong, not all(map(store.is_linked, left_out))


def diff(store: StoreReader, old: int, new: int) -> tuple[ParameterChange, ...]:
    """What changed by parameter, in the order in which these lie in buckets. A writer may go on meanwhile.

    Raises TransferError if a version is not kept, was retired meanwhile or is lost, or the two are packed in different
    ways.
    """
    compared = {version: store.fingerprint(version) for version in (old, new)}
    while True:
        ways = set(store.manifests())
        try:
            packing = store.packing(new)
            changes = _changes(store, packing, old, new) if store.packing(old) == packing else None
        except TransferError:
            unreadable = ways - set(store.manifests())
            store.scan()
            for version, whole in compared.items():
                if version not in store.versions() or store.fingerprint(version) != whole:
                    raise TransferError(
                        f"version {version} was retired meanwhile", to_do="compare versions that are kept"
                    ) from None
            if ways == set(store.manifests()) or (unreadable and all(map(store.is_linked, unreadable))):
                raise
        else:
            if changes is None:
                raise TransferError(
                    f"versions {old} and {new} are packed in different ways", expected="the same parameters"
                )
            return changes


def _changes(store: StoreReader, packing: Packing, old: int, new: int) -> tuple[ParameterChange, ...]:
    elements: dict[str, int] = {}
    changed: dict[str, int] = {}
    for bucket, before, after in zip(packing.buckets, store.read(old), store.read(new), strict=True):
        differs = before != after
        for region, span in bucket.spans():
            name = region.parameter
            elements[name] = elements.get(name, 0) + region.box.elements
            changed[name] = changed.get(name, 0) + int(np.count_nonzero(differs[span]))
    return tuple(ParameterChange(name, elements[name], changed[name]) for name in elements)
