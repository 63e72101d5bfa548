"""Records that were written once are read for ever, and are what docs/record-format.md says.

The golden files were written by this code, version 1, on 2026-11-30: `python -m tests.test_record_format` wrote them,
and writes none that is there already.
"""

import hashlib
import hmac
import re
from dataclasses import asdict
from pathlib import Path

import msgpack
import pytest
import zstandard

from plancache import stored
from plancache.errors import RecordError
from plancache.keys import FORMAT, digest, topology
from plancache.store import records
from plancache.store.interface import Row
from tests.conftest import ROOT

GOLDEN = Path(__file__).parent / "data" / "records"
KEY = b"the golden records' signing key"
ROW = Row(
    key="0" * 64,
    route="native",
    graph="1" * 64,
    topology="2" * 64,
    device="3" * 64,
    environment="4" * 64,
    build="5" * 64,
    driver=13000,
    frontend=13200,
    name="eng4_k24=3",
    engine=4,
    created=1.5,
    seconds=0.25,
    size=4,
    builder="module.function",
)
FIELDS = {"plan": {"plans": [], "selected": 0, "inferred": [], "seconds": 0.25}, "documents": b"", "blob": b"\0\1\2\3"}


@pytest.mark.parametrize(("name", "key"), [("1-plain.bin", None), ("1-signed.bin", KEY)])
def test_a_golden_record_is_read(name, key):
    row, fields = records.decode((GOLDEN / name).read_bytes(), key)
    assert (row, fields) == (ROW, FIELDS)


def test_a_golden_record_of_a_real_plan_is_read_with_its_documents():
    row, fields = records.decode((GOLDEN / "1-matmul-h200.bin").read_bytes())
    documents = stored.documents(fields)
    assert row.graph == digest([FORMAT, documents["graph"]])
    assert row.topology == digest(topology(documents["graph"]))
    assert [row.device, row.environment, row.build] == [
        digest(documents[part]) for part in ("device", "environment", "build")
    ]
    assert row.key == hashlib.sha256(f"{row.graph}{row.device}{row.environment}{row.build}".encode()).hexdigest()
    assert row.size == len(fields["blob"])
    assert fields["plan"]["plans"][fields["plan"]["selected"]][:2] == [row.name, row.engine]
    assert documents["labels"][1] == "a"


def test_a_record_is_what_the_page_says():
    plain, signed = records.encode(ROW, FIELDS), records.encode(ROW, FIELDS, KEY)
    for record, kind in ((plain, b"s"), (signed, b"h")):
        assert record[:8] == b"PLANCA\x01" + kind
        body = record[40:]
        covered = record[:8] + body
        expected = hashlib.sha256(covered).digest() if kind == b"s" else hmac.digest(KEY, covered, "sha256")
        assert record[8:40] == expected
        unpacked = zstandard.decompress(body)
        assert msgpack.unpackb(unpacked) == {"row": asdict(ROW), **FIELDS}
        assert zstandard.frame_content_size(body) == len(unpacked)  # by which a reader refuses what is too large


def test_a_reader_takes_only_what_it_can_check():
    plain, signed = records.encode(ROW, FIELDS), records.encode(ROW, FIELDS, KEY)
    for record, key, says in (
        (plain, KEY, "not signed"),
        (signed, None, "no key to check it"),
        (signed, b"another key, long enough", "signature is wrong"),
        (plain[:6] + b"\x02" + plain[7:], None, "another version"),
        (b"SQLite format 3", None, "no plancache record"),
    ):
        with pytest.raises(RecordError, match=says):
            records.decode(record, key)


def test_the_page_names_every_field():
    page = (ROOT / "docs" / "record-format.md").read_text()
    names = set(re.findall(r"`(\w+)`", page))
    assert {*Row.__dataclass_fields__, "row", *FIELDS, "plans", "selected", "inferred", "labels", "properties"} <= names


def write_golden() -> None:
    """Write the golden files that are not there yet."""
    import tempfile

    import plancache
    from tests import graphs

    with plancache.target("h200"), plancache.open(tempfile.mkdtemp()) as cache:
        cache.build(graphs.matmul()[0], builder="tests.graphs.matmul")
        (listed,) = cache.rows()
        real = cache.store.get(listed.row.key, listed.row.route)
    for name, record in (
        ("1-plain.bin", records.encode(ROW, FIELDS)),
        ("1-signed.bin", records.encode(ROW, FIELDS, KEY)),
        ("1-matmul-h200.bin", real),
    ):
        if not (GOLDEN / name).exists():
            (GOLDEN / name).write_bytes(record or b"")


if __name__ == "__main__":
    write_golden()
