"""What is wrong in a record or a database in other ways than by a flipped bit: nonsense that somebody wrote, keys."""

import hashlib
from dataclasses import replace

import pytest
import zstandard

import plancache
from plancache.errors import RecordError
from plancache.outcome import Reason, Source
from plancache.store import records
from plancache.store.database import FILE
from tests import graphs
from tests.stores import fill


def test_a_signed_cache_is_left_alone_by_whoever_has_no_key(tmp_path, targeted, caplog):
    (tmp_path / "key").write_bytes(b"a key of more than sixteen bytes")
    with plancache.open(tmp_path / "cache", key_file=tmp_path / "key") as cache:
        assert cache.build(graphs.matmul()[0]).stored
    with plancache.open(tmp_path / "cache") as cache:
        outcome = cache.build(graphs.matmul()[0])
        assert (outcome.source, outcome.reason, outcome.stored) == (Source.BUILT, Reason.FOREIGN, False)
        report = cache.verify(repair=True)
        assert (len(report.bad), report.removed) == (1, 0)
    with plancache.open(tmp_path / "cache", key_file=tmp_path / "key") as cache:
        assert cache.build(graphs.matmul()[0]).source is Source.DISK


@pytest.mark.parametrize("driver", ["abc", None, 1.5])
def test_a_record_with_a_right_digest_and_nonsense_in_it_is_a_miss(warm, targeted, driver):
    with plancache.open(warm) as cache:
        listed = next(one.row for one in cache.rows() if one.row.key == cache.key(graphs.matmul()[0]).hash)
        row, fields = records.decode(cache.store.get(listed.key, listed.route))
        connection = cache.store.database.connection()
        nonsense = records.encode(replace(row, driver=driver), fields)
        connection.execute("UPDATE plans SET record = ? WHERE key = ?", (nonsense, row.key))
        outcome = cache.build(graphs.matmul()[0])
        assert (outcome.source, outcome.reason) == (Source.BUILT, Reason.DAMAGED)
        assert cache.build(graphs.matmul()[0]).source is Source.DISK


def test_a_record_that_claims_to_be_huge_is_unfit_and_takes_no_memory():
    body = bytearray(zstandard.compress(b"x" * 1000, 3))
    huge = b"\x28\xb5\x2f\xfd\xe0" + (1 << 45).to_bytes(8, "little") + bytes(body[6:])
    prefix = b"PLANCA\x01s"
    record = prefix + hashlib.sha256(prefix + huge).digest() + huge
    with pytest.raises(RecordError, match="unpacked"):
        records.decode(record)


def test_one_flipped_bit_in_the_version_of_a_database_does_not_lock_it(warm, targeted):
    content = bytearray((warm / FILE).read_bytes())
    content[63] ^= 0x80  # the last byte of user_version
    (warm / FILE).write_bytes(content)
    with plancache.open(warm) as cache:
        assert cache.build(graphs.matmul()[0]).source is Source.DISK


def test_good_records_that_do_not_fit_stay_in_the_database_that_was_set_aside(tmp_path, monkeypatch):
    with plancache.open(tmp_path / "cache") as cache:
        fill(cache.store, 20)
    (tmp_path / "cache" / FILE).rename(tmp_path / "cache" / f"damaged-1-{FILE}")
    with plancache.open(tmp_path / "cache") as cache:
        monkeypatch.setattr(type(cache.store), "put", lambda *_: False)  # as where a reader stands still
        report = cache.verify(repair=True)
        assert report.recovered == 0
        assert [file.name for file in report.aside] == [f"damaged-1-{FILE}"]
        monkeypatch.undo()
        assert cache.verify(repair=True).recovered == 20
