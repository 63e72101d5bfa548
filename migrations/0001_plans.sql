-- One row a plan. `record` is the whole truth, checksummed (plancache/store/records.py); the other columns are an
-- index over it, and a lookup compares them with it. Hashes are SHA-256 in hex.
CREATE TABLE plans (
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
    record BLOB NOT NULL,
    PRIMARY KEY (key, route)
);

CREATE INDEX plans_by_graph ON plans (graph);

CREATE INDEX plans_by_topology ON plans (topology);
