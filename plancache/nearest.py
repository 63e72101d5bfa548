"""The stored entry that comes nearest to a key that missed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

from plancache import stored
from plancache.errors import RecordError, StoreError
from plancache.explain import Difference, differences
from plancache.kernels import is_kernel
from plancache.keys import PlanKey, digest, topology
from plancache.store import records
from plancache.store.interface import Row, Store
from plancache.store.layers import Layers

# Records that are unpacked and compared at most: newest first, of the same graph, then of the same kind, then any.
_COMPARED = 200


def nearest_in(
    layers: Layers,
    key: PlanKey,
    route: str,
    labels: Mapping[int, str],
    signing_key: bytes | None,
    other_than: bool = False,
) -> tuple[Row, list[Difference]] | None:
    """`nearest` of a cache and the layers under it, of equally near ones the upper one's.

    Those that cannot be read are passed over, as by a lookup.

    Raises:
        StoreError: none of them can be read.
    """
    best: tuple[Row, list[Difference]] | None = None
    failures: list[StoreError] = []
    for number in range(len(layers)):
        try:
            found = nearest(layers[number], key, route, labels, signing_key, other_than)
        except StoreError as error:
            failures.append(error)
            continue
        if found is not None and (best is None or len(found[1]) < len(best[1])):
            best = found
    if len(failures) == len(layers):
        raise failures[0]
    return best


def nearest(
    store: Store,
    key: PlanKey,
    route: str,
    labels: Mapping[int, str],
    signing_key: bytes | None,
    other_than: bool = False,
) -> tuple[Row, list[Difference]] | None:
    """The row with the fewest differences to `key`, and those; None where nothing is stored.

    With `other_than`, the key's own rows do not count.

    Raises:
        StoreError: the cache cannot be read.
    """
    best: tuple[Row, list[Difference]] | None = None
    for row in islice(_candidates(store, key), _COMPARED):
        if best is not None and len(best[1]) <= 1:
            break
        if other_than and row.key == key.hash:
            continue
        found = _compared(store, row, key, route, labels, signing_key)
        if found is not None and (best is None or len(found) < len(best[1])):
            best = row, found
    return best


def _candidates(store: Store, key: PlanKey) -> Iterator[Row]:
    kind = digest(topology(key.documents["graph"]))
    surroundings = (key.device, key.environment, key.build)

    def far(row: Row) -> tuple[bool, bool, bool]:
        return row.topology != kind, row.graph != key.graph, (row.device, row.environment, row.build) != surroundings

    # The sort is stable: of those that are equally far the newest comes first.
    yield from sorted((listed.row for listed in store.rows() if not is_kernel(listed.row)), key=far)


def _compared(
    store: Store, row: Row, key: PlanKey, route: str, labels: Mapping[int, str], signing_key: bytes | None
) -> list[Difference] | None:
    record = store.get(row.key, row.route, use=False)
    if record is None:
        return None
    try:
        theirs = stored.documents(records.decode(record, signing_key)[1])
    except RecordError:
        return None
    found = list(differences(key.documents, theirs, labels))
    if row.route != route:
        found.append(Difference("route", "", "route", route, row.route))
    return found
