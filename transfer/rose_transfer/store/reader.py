"""A store as one sees it who only reads: which versions there are, what they hold, how to get from one to another.

    objects/<key>                     deltas, packings and manifests
    links/v000007-from-v000006        the key of a manifest, one per way to a version; "-whole" for one without a base
    versions/v000007                  marks of the versions that are kept

Invariants
- A version counts as there if its mark is, which is written last and removed first.
- Manifests that are damaged, lack an object or lead to other bits than their version's mark says count as not there.
- What is read has the hashes of the version. Where a delta turns out damaged, another way is tried; never is a bucket
  handed out half-way.

A writer may change the folder meanwhile: `scan` looks again, and sees it as it was at one moment. All methods may be
called from several threads: what they look things up in is replaced, never changed.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rose.errors import TransferError
from rose.logs import logger
from rose_transfer.codec import Delta, MalformedDelta, WrongBase, from_wire
from rose_transfer.store import chain, manifest, packing
from rose_transfer.store.chain import Link
from rose_transfer.store.files import NotAFile, check_file, disk_trouble, files_in, strangers_in
from rose_transfer.store.manifest import BucketEntry, Manifest
from rose_transfer.store.objects import LostObject, Objects
from rose_transfer.store.packing import Packing
from rose_transfer.store.roles import Role, told_role

log = logger("weight store")
Bits = NDArray[np.unsignedinteger[Any]]
Ends = tuple[int, int | None]
"""Version and base of a link: two manifests with the same ends do not exist at a time."""
_SCANS_MAX = 100
_NAME = re.compile(r"v[0-9]{6,}(-whole|-from-v[0-9]{6,})?")
"""What a mark or a link is named."""


@dataclass(frozen=True, slots=True)
class Step:
    """The objects of `manifest`, to apply to what the step before left; `backwards`: to undo."""

    manifest: Manifest
    backwards: bool


class StoreReader:
    """The store in `folder`. Raises TransferError if there is none."""

    def __init__(self, folder: Path) -> None:
        self._links_folder = folder / "links"
        self._versions_folder = folder / "versions"
        if not self._versions_folder.is_dir():
            raise TransferError(f"{folder} is not a weight store", expected="a folder that a store was opened in")
        self.folder = folder
        self.objects = Objects(folder / "objects")
        self._packings: dict[str, Packing] = {}
        self._guard = threading.Lock()
        self.not_counted: Mapping[str, str] = {}
        self._strangers: Mapping[str, str] = {}
        self.scan()

    def scan(self) -> None:
        """Look at the folder anew; `not_counted` says then by its name which file counts as not there, and why.

        Where a writer has gone on meanwhile, a way and what took its place may both have been missed: then once more.

        Raises TransferError if that does not end, or the disk fails.
        """
        before = self._names()
        for _ in range(_SCANS_MAX):
            not_counted = self._scan()
            after = self._names()
            if after == before:
                return self._tell(not_counted)
            before = after
        raise TransferError(
            f"the store in {self.folder} changes faster than it can be looked at", to_do="try it again in a while"
        )

    def is_linked(self, found: Manifest) -> bool:
        """Whether this way still counts for the writer. Raises TransferError if the disk fails."""
        link = self._links_folder / link_name(found.version, found.base)
        with disk_trouble(f"{link} cannot be read"):
            try:
                check_file(link)
                return link.read_bytes() == found.key.encode()
            except (FileNotFoundError, NotAFile):
                return False

    def _names(self) -> tuple[str, ...]:
        folders = (self._versions_folder, self._links_folder)
        with disk_trouble(f"{self.folder} cannot be read"):
            return tuple(f"{folder.name}/{name}" for folder in folders for name, _ in files_in(folder))

    def _tell(self, not_counted: Mapping[str, str]) -> None:
        """Say of each file once what counts as not there, and what is no file."""
        strangers: dict[str, str] = {}
        for folder in (self._versions_folder, self._links_folder, self.objects.folder):
            with disk_trouble(f"{folder} cannot be read"):
                strangers |= {f"{folder.name}/{name}": why for name, why in strangers_in(folder).items()}
        for name in sorted(strangers.keys() - self._strangers.keys()):
            log.warning("what is no file is passed over", what=strangers[name])
        for name in sorted(not_counted.keys() - self.not_counted.keys()):
            log.warning("a file of the store counts as not there", file=name, why=not_counted[name])
        spoiled = {name: why for name, why in strangers.items() if _NAME.fullmatch(name.partition("/")[2])}
        self._strangers, self.not_counted = strangers, {**not_counted, **spoiled}

    def _scan(self) -> dict[str, str]:
        """See what is there. Returns what counts as not there, and why."""
        marks: dict[int, str] = {}
        not_counted: dict[str, str] = {}
        for name, data in _contents(self._versions_folder):
            try:
                version, whole = manifest.mark_from_bytes(data)
            except TransferError as error:
                not_counted[f"versions/{name}"] = str(error)
                continue
            if name == mark_name(version):
                marks[version] = whole
        known = dict(marks)
        manifests: dict[Ends, Manifest] = {}
        for name, data in _contents(self._links_folder):
            try:
                found = manifest.from_bytes(self.objects.read(data.decode("ascii", "replace")))
                self._check(found, name, known)
            except TransferError as error:
                not_counted[f"links/{name}"] = str(error)
                continue
            manifests[found.version, found.base] = found
        with self._guard:
            self._marks, self._manifests = marks, manifests
        return not_counted

    def versions(self) -> tuple[int, ...]:
        """The versions that are kept, oldest first."""
        return tuple(sorted(self._marks))

    @property
    def newest(self) -> int | None:
        """The highest of them, None if there is none."""
        return max(self._marks, default=None)

    def fingerprint(self, version: int) -> str:
        """Identifies the bits of a version. Raises TransferError if it is not kept."""
        if version not in self._marks:
            kept = ", ".join(map(str, self.versions())) or "none"
            raise TransferError(f"version {version} is not in {self.folder}", expected=f"one that is kept: {kept}")
        return self._marks[version]

    def holds(self, version: int, fingerprint: str) -> bool:
        """Whether a way may begin at `version` with these bits: it is kept, or only passed through."""
        if version in self._marks:
            return self._marks[version] == fingerprint
        return any(
            (version, fingerprint) in ((found.version, found.fingerprint), (found.base, found.base_fingerprint))
            for found in self._manifests.values()
        )

    def manifests(self) -> tuple[Manifest, ...]:
        """All ways there are, in a fixed order."""
        manifests = self._manifests
        return tuple(manifests[link.version, link.base] for link in _links(manifests))

    def links(self) -> tuple[Link, ...]:
        """The same for `chain`."""
        return _links(self._manifests)

    def packing(self, version: int) -> Packing:
        """Which parameters lie where in the buckets of a version. Raises TransferError if it is not kept, or lost."""
        return self.read_packing(self.packing_key(version))

    def packing_key(self, version: int) -> str:
        """The key of the object with the packing of a version. Raises as `packing` does."""
        self.fingerprint(version)
        for found in self._manifests.values():
            if version in (found.version, found.base):
                return found.packing
        raise self._lost(version)

    def read_packing(self, key: str) -> Packing:
        """The packing in an object; the last one is kept in memory. Raises LostObject, or MalformedRecord."""
        if key not in self._packings:
            self._packings = {key: packing.from_bytes(self.objects.read(key))}
        return self._packings[key]

    def steps(self, start: int | None, goal: int) -> tuple[Step, ...]:
        """What leads from version `start`, or from nothing, to `goal` in the fewest bytes, by what is there now.

        A first step without a base begins anew: what is held takes no part. Raises TransferError if `goal` is not
        kept, or lost.
        """
        self.fingerprint(goal)
        manifests = self._manifests
        route = chain.cheapest(_links(manifests), start, goal)
        if route is None:
            raise self._lost(goal)
        return tuple(Step(manifests[hop.link.version, hop.link.base], hop.backwards) for hop in route)

    def read(self, version: int) -> Iterator[Bits]:
        """The buckets of a version, one by one, in the order of its packing.

        Raises TransferError if it is not kept, or if one of its buckets cannot be had by any way any more.
        """
        for index in range(len(self.packing(version).buckets)):
            yield self.read_bucket(version, index)

    def read_bucket(self, version: int, index: int) -> Bits:
        """One bucket of `read`."""
        while True:
            bits: Bits | None = None
            current = 0
            for step in self.steps(None, version):
                try:
                    bits, current = self._advance(step, index, bits, current)
                except (LostObject, MalformedDelta, WrongBase) as error:
                    self.leave_out(step.manifest, str(error))
                    break
            else:
                assert bits is not None
                return bits

    def load(self, found: Manifest, entry: BucketEntry) -> Delta:
        """The delta of a bucket. Raises LostObject, or MalformedDelta if it is not the one that the manifest says."""
        return delta_of(found, entry, self.objects.read(entry.key))

    def leave_out(self, damaged: Manifest, why: str) -> None:
        """Go other ways from now on: an object of this manifest could not be read, or was not what it should be.

        What has taken its place meanwhile stays. What the writer itself has removed meanwhile is not told as damage.
        """
        if self.has_way(damaged):
            self._change_manifests(without={(damaged.version, damaged.base)})
            if self.is_linked(damaged):
                log.warning("a way to a version is damaged", version=damaged.version, base=str(damaged.base), why=why)

    def has_way(self, found: Manifest) -> bool:
        """Whether this very one of `manifests` is gone by still; an equal one may have been written anew since."""
        return self._manifests.get((found.version, found.base)) is found

    def _change_manifests(self, *more: Manifest, without: Collection[Ends] = ()) -> None:
        with self._guard:
            rest = {ends: found for ends, found in self._manifests.items() if ends not in without}
            self._manifests = rest | {(found.version, found.base): found for found in more}

    def _advance(self, step: Step, index: int, bits: Bits | None, current: int) -> tuple[Bits, int]:
        """The bucket after a step, in place if there was one, and its hash."""
        entry = step.manifest.buckets[index]
        delta = self.load(step.manifest, entry)
        if step.manifest.base is None or bits is None:
            bits = np.empty(delta.elements, dtype=f"<u{delta.lane}")
        elif delta.mode == "overwrite" and current != entry.before:
            raise WrongBase(f"bucket {entry.bucket_id} is not that of version {step.manifest.base}")
        return bits, delta.undo(bits, current) if step.backwards else delta.apply(bits, current)

    def _check(self, found: Manifest, name: str, known: dict[int, str]) -> None:
        """`known` has the fingerprints of versions, kept or not, and learns those that are new."""
        if name != link_name(found.version, found.base):
            raise TransferError(f"it leads to version {found.version} from {found.base}")
        for version, whole in ((found.version, found.fingerprint), (found.base, found.base_fingerprint)):
            if version is not None and whole is not None and known.setdefault(version, whole) != whole:
                raise TransferError(f"it takes version {version} for another one")
        for entry in found.buckets:
            if self.objects.size_bytes(entry.key) != entry.encoded_bytes:
                raise TransferError(f"the object of bucket {entry.bucket_id} is not there whole")
        if not self.objects.has(found.packing):
            raise TransferError("its packing is not there")

    def _lost(self, version: int) -> TransferError:
        publish = "publish it again under a new number"
        # A relay cannot: what it has comes from elsewhere.
        fetch = "end the relay, remove its folder and start it again: it fetches the newest version anew"
        to_do = fetch if told_role(self.folder.parent) is Role.RELAY else publish
        return TransferError(f"no way leads to version {version} in {self.folder} any more", to_do=to_do)


def delta_of(found: Manifest, entry: BucketEntry, data: bytes) -> Delta:
    """The delta in the object of an entry. Raises MalformedDelta if it is not the one that the manifest says.

    What needs no base holds every element: anything less would leave some as they happen to be.
    """
    delta = from_wire(data)
    told = (found.mode, entry.after, entry.encoded_bytes, entry.dense_bytes)
    is_told = (delta.mode, delta.after, len(data), delta.elements * delta.lane) == told
    is_based = delta.mode != "steps" or delta.before == entry.before
    if not is_told or not is_based or (found.base is None and delta.coded < delta.elements):
        raise MalformedDelta(
            f"object {entry.key[:12]} is another delta than that of bucket {entry.bucket_id} "
            f"to version {found.version}",
            to_do="publish the version again",
        )
    return delta


def mark_name(version: int) -> str:
    return f"v{version:06d}"


def link_name(version: int, base: int | None) -> str:
    return f"v{version:06d}-{'whole' if base is None else f'from-v{base:06d}'}"


def _contents(folder: Path) -> Iterator[tuple[str, bytes]]:
    # A disk that fails is not damage: to take it for that would have a writer remove what is there.
    with disk_trouble(f"{folder} cannot be read"):
        for name, _ in files_in(folder):
            with contextlib.suppress(FileNotFoundError):
                yield name, (folder / name).read_bytes()


def _links(manifests: Mapping[Ends, Manifest]) -> tuple[Link, ...]:
    """In a fixed order, so that of two ways as good as each other the same one is always taken."""
    links = (found.link for found in manifests.values())
    return tuple(sorted(links, key=lambda link: (link.version, -1 if link.base is None else link.base)))
