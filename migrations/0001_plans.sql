-- One row a plan. `record` is the whole truth, checksummed (docs/record-format.md); the other columns are an index
-- over it, and what is read is compared with it. Hashes are SHA-256 in hex; times are seconds since 1970.
CREATE TABLE plans (
    -- 31 bits of a hash of the key's second half, then 32 of one of key and route: found without an index, and put
    -- without writing to one; what has the second half in common lies side by side.
    id INTEGER PRIMARY KEY,
    key TEXT NOT NULL,
    route TEXT NOT NULL,
    graph TEXT NOT NULL,
    topology TEXT NOT NULL,
    device TEXT NOT NULL,
    environment TEXT NOT NULL,
    build TEXT NOT NULL,
    driver INTEGER NOT NULL,
    frontend INTEGER NOT NULL,
    name TEXT NOT NULL,
    engine INTEGER NOT NULL,
    created REAL NOT NULL,
    seconds REAL NOT NULL,
    size INTEGER NOT NULL,
    builder TEXT NOT NULL,
    operation TEXT NOT NULL,
    -- Of use, not of the record: written in batches, best effort.
    used REAL NOT NULL,
    hits INTEGER NOT NULL,
    record BLOB NOT NULL
);

CREATE INDEX plans_by_use ON plans (environment, used);

-- How often lookups came to what, by day: added to in batches, best effort (plancache/store/tallies.py).
CREATE TABLE tallies (
    device TEXT NOT NULL,
    environment TEXT NOT NULL,
    source TEXT NOT NULL,
    reason TEXT NOT NULL,
    day INTEGER NOT NULL, -- since 1970-01-01, UTC
    count INTEGER NOT NULL,
    recorded REAL NOT NULL, -- seconds that building took of what was served
    spent REAL NOT NULL, -- seconds that these lookups and builds took
    PRIMARY KEY (device, environment, source, reason, day)
) WITHOUT ROWID;
