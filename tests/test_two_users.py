"""Two users and root over one directory: who may read, who may write, and whose native code is run."""

import os
import stat

import pytest

import plancache
from plancache.errors import StoreError
from plancache.store.database import FILE
from plancache.store.layers import Options, open_store
from tests.stores import fill, found, record, row, snapshot
from tests.users import ALICE, BOB, TEAM

KEY = b"a key of more than sixteen bytes"

# Reads and writes through the store as a job would open it; prints what it may do, and what it found and stored.
USE = """
import os, pathlib, sys
from plancache.errors import StoreError
from plancache.settings import Settings, signing_key
from plancache.store.layers import Options, open_store
from tests.stores import record, row
path, kind, mine, theirs = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), map(int, sys.argv[4:])
settings = Settings.read()
key = settings.key_file and signing_key(settings.key_file)
try:
    store, access = open_store(path, Options(kind=kind, key=key, trusted=settings.trusted))
    has = [store.get(row(number).key, "native") == record(row(number), key=key) for number in theirs]
    print("read-only" if access.read_only else "read-write", *has)
    if not access.read_only:
        assert store.put(row(mine), record(row(mine), key=key))
    store.flush()
    store.maintain()
    store.close()
except StoreError as error:
    print(error)
"""


@pytest.fixture(params=["sqlite", "files"])
def kind(request):
    return request.param


def baked(directory, kind, count=3, key=None):
    """Fill a cache as root."""
    store, _ = open_store(directory, Options(kind=kind, key=key))
    stored = fill(store, count, key=key)
    store.close()
    return stored


def given(directory, user):
    for path in (directory, *directory.rglob("*")):
        os.chown(path, user, user)


def modes(directory):
    """The modes of all directories and of all files in a directory."""
    every = [directory, *directory.rglob("*")]
    return (
        {oct(stat.S_IMODE(path.stat().st_mode)) for path in every if path.is_dir()},
        {oct(stat.S_IMODE(path.stat().st_mode)) for path in every if path.is_file()},
    )


# ------------------------------------------------------------ one's own


def test_what_a_user_makes_is_for_that_user_alone(kind, users):
    home = users.home(ALICE)
    home.chmod(0o755)
    path = home / "cache" / "plans"
    assert users.run(ALICE, USE, path, kind, 1) == "read-write\n"
    assert oct(stat.S_IMODE(path.stat().st_mode)) == "0o700"
    assert modes(path)[1] == {"0o600"}
    refused = users.run(BOB, USE, path, kind, 2, 1)
    assert "belongs to another user (1000)" in refused
    assert "PLANCACHE_TRUST" in refused
    named = users.run(BOB, USE, path, kind, 2, 1, PLANCACHE_TRUST=str(path))
    assert "cannot be read" in named
    assert "may not enter" in named


def test_a_directory_below_one_that_may_not_be_entered_is_a_fault_and_no_crash(kind, users):
    path = users.home(ALICE) / "plans"
    assert users.run(ALICE, USE, path, kind, 1) == "read-write\n"
    for place in (path, path / "deeper", path / "plans.bundle"):
        assert "Permission denied" in users.run(BOB, USE, place, kind, 2, PLANCACHE_TRUST=str(place))


def test_roots_private_directory_is_closed_to_others(kind, users):
    directory = users.directory("private", mode=0o700)
    baked(directory, kind)
    assert "may not enter" in users.run(ALICE, USE, directory, kind, 9, 0)


def test_what_root_bakes_for_all_is_read_by_all_and_written_by_none(kind, users):
    directory = users.directory("baked", mode=0o755)
    baked(directory, kind)
    assert modes(directory) == ({"0o755"}, {"0o644"})
    before = snapshot(directory)
    for user in (ALICE, BOB):
        assert users.run(user, USE, directory, kind, 9, 0, 1, 2, 3) == "read-only True True True False\n"
    assert snapshot(directory) == before


def test_a_umask_of_ones_own_does_not_change_what_the_directory_says(kind, users):
    directory = users.directory("strict", owner=ALICE, mode=0o755)
    strict = USE.replace("import os, pathlib, sys", "import os, pathlib, sys\nos.umask(0o077)")
    assert users.run(ALICE, strict, directory, kind, 1) == "read-write\n"
    assert modes(directory) == ({"0o755"}, {"0o644"})
    assert users.run(BOB, USE, directory, kind, 2, 1, PLANCACHE_TRUST=str(directory)) == "read-only True\n"


# ------------------------------------------------------------ shared by a group


def shared(users, mode=0o2775, owner=0):
    return users.directory("shared", owner=owner, mode=mode, group=TEAM)


def test_two_users_of_a_group_read_and_write_and_their_files_follow_the_directory(kind, users):
    directory = shared(users)
    assert users.run(ALICE, USE, directory, kind, 1, 2, groups=[TEAM]) == "read-write False\n"
    assert users.run(BOB, USE, directory, kind, 2, 1, groups=[TEAM]) == "read-write True\n"
    assert users.run(ALICE, USE, directory, kind, 3, 1, 2, groups=[TEAM]) == "read-write True True\n"
    assert modes(directory) == ({"0o2775"}, {"0o664"})
    assert {path.stat().st_gid for path in directory.rglob("*")} == {TEAM}


def test_a_group_directory_that_is_closed_to_others_keeps_its_files_closed(kind, users):
    directory = shared(users, mode=0o2770)
    assert users.run(ALICE, USE, directory, kind, 1, groups=[TEAM]) == "read-write\n"
    assert users.run(BOB, USE, directory, kind, 2, 1, groups=[TEAM]) == "read-write True\n"
    assert modes(directory) == ({"0o2770"}, {"0o660"})


HOLD = """
import os, pathlib, sys
from plancache.store.layers import Options, open_store
from plancache.store.locks import SingleFlight
from tests.stores import record, row
store, access = open_store(pathlib.Path(sys.argv[1]), Options(kind="sqlite"))
number = int(sys.argv[2])
assert store.put(row(number), record(row(number)))
with SingleFlight(pathlib.Path(sys.argv[1]), access, 10.0).turn(row(number).key, lambda: False) as mine:
    print("holding", mine, flush=True)
    sys.stdin.readline()
    print(store.get(row(int(sys.argv[3])).key, "native") is not None, store.put(row(number + 10), b"x"))
store.close()
"""


def test_two_users_have_one_database_open_at_once(users):
    directory = shared(users)
    with (
        users.start(ALICE, HOLD, directory, 1, 2, groups=[TEAM]) as one,
        users.start(BOB, HOLD, directory, 2, 1, groups=[TEAM]) as two,
    ):
        for process in (one, two):
            assert process.stdout.readline() == "holding True\n", process.stderr.read()
        names = {path.name for path in directory.iterdir()}
        assert {FILE, f"{FILE}-wal", f"{FILE}-shm", "locks", "migrate.lock"} <= names
        assert modes(directory) == ({"0o2775"}, {"0o664"})
        for process in (one, two):
            assert process.communicate("\n", timeout=60) == ("True True\n", "")


RACE = """
import pathlib, sys
import filelock, sqlite_utils
from plancache.store.layers import Options, open_store
from tests.stores import record, row
print("ready", flush=True)
sys.stdin.readline()
store, _ = open_store(pathlib.Path(sys.argv[1]), Options(kind=sys.argv[2]))
print(store.put(row(int(sys.argv[3])), record(row(int(sys.argv[3])))))
store.close()
"""


def test_processes_of_two_users_that_make_one_cache_at_once_can_all_write(kind, users):
    directory = shared(users)
    running = [
        users.start((ALICE, BOB)[number % 2], RACE, directory, kind, number, groups=[TEAM]) for number in range(12)
    ]
    for process in running:
        assert process.stdout.readline() == "ready\n"
    for process in running:
        print(file=process.stdin, flush=True)
    assert [process.communicate(timeout=60) for process in running] == [("True\n", "")] * 12
    store, _ = open_store(directory, Options())
    assert found(store, {row(number): record(row(number)) for number in range(12)}) == 12
    store.close()
    assert modes(directory) == ({"0o2775"}, {"0o664"})


def test_what_root_writes_into_a_groups_directory_stays_the_groups(kind, users, run):
    directory = shared(users, owner=ALICE)
    assert users.run(ALICE, USE, directory, kind, 1, groups=[TEAM]) == "read-write\n"
    assert run(USE, directory, kind, 2, 1) == "read-write True\n"
    assert users.run(BOB, USE, directory, kind, 3, 1, 2, groups=[TEAM]) == "read-write True True\n"
    assert modes(directory) == ({"0o2775"}, {"0o664"})


def test_a_log_that_a_killed_user_left_is_taken_over_by_the_other(users):
    directory = shared(users)
    with users.start(ALICE, HOLD, directory, 1, 2, groups=[TEAM]) as killed:
        assert killed.stdout.readline() == "holding True\n"
        killed.kill()
        killed.communicate()
    assert (directory / f"{FILE}-wal").stat().st_size > 0
    assert users.run(BOB, USE, directory, "sqlite", 2, 1, groups=[TEAM]) == "read-write True\n"


# ------------------------------------------------------------ refused, unless it is vouched for


def test_another_ordinary_owners_directory_is_refused_unless_it_is_named_or_signed(kind, users):
    directory = users.directory("theirs")
    baked(directory, kind, key=KEY)
    given(directory, ALICE)
    (users.place / "key").write_bytes(KEY)
    refused = users.run(BOB, USE, directory, kind, 9, 0)
    assert "the cache directory is refused, since others could put native code into it" in refused
    assert f"{directory} belongs to another user (1000)" in refused
    key = {"PLANCACHE_KEY_FILE": str(users.place / "key")}
    assert users.run(BOB, USE, directory, kind, 9, 0, **key) == "read-only True\n"
    plain = users.directory("plain")
    baked(plain, kind)
    given(plain, ALICE)
    trust = {"PLANCACHE_TRUST": f"/elsewhere:{plain}"}
    assert users.run(BOB, USE, plain, kind, 9, 0, **trust) == "read-only True\n"
    assert "is refused" in users.run(BOB, USE, directory, kind, 9, 0, **trust)
    assert users.run(ALICE, USE, plain, kind, 9, 0) == "read-write True\n"


def test_a_directory_that_a_group_of_others_may_write_is_refused_unless_it_is_signed(kind, users):
    directory = shared(users, owner=ALICE)
    baked(directory, kind, key=KEY)
    assert "may be written by a group that you are not in" in users.run(BOB, USE, directory, kind, 9, 0)
    (users.place / "key").write_bytes(KEY)
    key = {"PLANCACHE_KEY_FILE": str(users.place / "key")}
    assert users.run(BOB, USE, directory, kind, 9, 0, **key) == "read-only True\n"


def test_a_directory_that_everybody_may_write_is_refused_whoever_vouches_for_it(kind, users, run):
    (users.place / "key").write_bytes(KEY)
    for owner in (0, ALICE):
        directory = users.directory(f"open-{owner}", owner=owner)
        baked(directory, kind, key=KEY) if owner == 0 else None
        directory.chmod(0o777)
        for environment in ({}, {"PLANCACHE_TRUST": str(directory)}, {"PLANCACHE_KEY_FILE": str(users.place / "key")}):
            for refused in (
                users.run(ALICE, USE, directory, kind, 9, 0, **environment),
                run(USE, directory, kind, 9, 0, **environment),
            ):
                assert f"{directory} may be written by everybody. chmod o-w {directory}\n" in refused


def test_a_bundle_is_judged_by_the_same_rules(users, tmp_path):
    bundle = users.place / "plans.bundle"
    with plancache.open(tmp_path / "cache") as cache:
        fill(cache.store, 1)
        cache.export_bundle(bundle)
    assert users.run(ALICE, USE, bundle, "sqlite", 9, 0) == "read-only True\n"  # root's
    os.chown(bundle, BOB, BOB)
    assert "the bundle is refused" in users.run(ALICE, USE, bundle, "sqlite", 9, 0)
    named = {"PLANCACHE_TRUST": str(bundle)}
    assert users.run(ALICE, USE, bundle, "sqlite", 9, 0, **named) == "read-only True\n"
    assert users.run(BOB, USE, bundle, "sqlite", 9, 0) == "read-only True\n"
    bundle.chmod(0o666)
    assert "may be written by everybody" in users.run(BOB, USE, bundle, "sqlite", 9, 0, **named)
    with plancache.open(tmp_path / "cache") as cache, pytest.raises(StoreError, match="the bundle is refused"):
        cache.import_bundle(bundle)


# ------------------------------------------------------------ a job gets its graph in every case

JOB = """
import logging, sys, plancache
from tests import graphs
logging.basicConfig(format="%(message)s", stream=sys.stdout)
with plancache.target("h200"):
    for directory in sys.argv[1:]:
        with plancache.open(directory) as cache:
            for _ in range(2):
                outcome = cache.build(graphs.unary()[0])
                print(outcome.source, outcome.reason, outcome.stored)
"""
BUILT = "built the cache could not be read False"


def test_a_job_gets_its_graph_and_one_warning_whatever_directory_it_is_given(users):
    theirs = users.directory("theirs", owner=BOB, mode=0o755)
    private = users.directory("private", owner=BOB, mode=0o700)
    everybodys = users.directory("everybodys", owner=ALICE, mode=0o777)
    roots = users.directory("roots", mode=0o700)
    cases = {
        theirs: "belongs to another user",
        private / "below": "Permission denied",
        everybodys: "may be written by everybody",
        roots: "may not enter",
    }
    lines = users.run(ALICE, JOB, *cases).splitlines()
    assert len(lines) == 3 * len(cases)
    for number, reason in enumerate(cases.values()):
        warning, *outcomes = lines[3 * number : 3 * number + 3]
        assert reason in warning
        assert outcomes == [BUILT, BUILT]


def test_what_root_has_baked_is_served_to_an_ordinary_user(users, warm, run):
    with plancache.open(users.directory("baked")) as cache, plancache.open(warm) as source:
        source.export_bundle(users.place / "plans.bundle")
        cache.import_bundle(users.place / "plans.bundle")
    before = snapshot(users.place / "baked")
    served = users.run(ALICE, JOB.replace("unary", "matmul"), users.place / "baked", users.place / "plans.bundle")
    assert served.splitlines() == ["disk found False"] * 4
    assert snapshot(users.place / "baked") == before
