-- Views over one run, for `duckdb -init RUN/open.sql` from any directory. They show the snapshot of
-- the manifest that was read. `.read RUN/open.sql` moves on to a newer snapshot. The path below is
-- where the run was started. A run that was moved or copied since has to be read from inside its
-- directory. Its next start, or `gigpo fsck --repair RUN`, writes the new path.
SET VARIABLE run = '.';
SET VARIABLE max_staleness = 0;

SET VARIABLE manifest = (
    SELECT m FROM read_json(getvariable('run') || '/manifest.json', columns = {
        segments: 'VARCHAR[]', tables: 'MAP(VARCHAR, STRUCT(path VARCHAR)[])'}) AS m);
SET VARIABLE segments = list_transform(
    getvariable('manifest').segments, lambda path: getvariable('run') || '/' || path);
-- Columns and types come from the first segment, which has no rows. No other file is opened to
-- learn its columns, because a run has thousands of files.
SET VARIABLE columns = (
    SELECT map_from_entries(list({
        key: column_name,
        value: {name: column_name, type: column_type, default_value: NULL::VARCHAR}}))
    FROM (DESCRIBE FROM read_parquet(getvariable('segments')[1])));
SET VARIABLE parts = map_from_entries(list_transform(
    map_entries(getvariable('manifest').tables),
    lambda entry: {
        key: entry.key,
        value: list_transform(
            entry.value, lambda part: getvariable('run') || '/' || part.path)}));

-- The exported tables of the catalog. A row that changed later is in more than one part.
CREATE SCHEMA IF NOT EXISTS exported;
CREATE OR REPLACE VIEW exported.groups AS
    FROM read_parquet(getvariable('parts')['groups'], union_by_name = TRUE);
CREATE OR REPLACE VIEW exported.ledger AS
    FROM read_parquet(getvariable('parts')['ledger'], union_by_name = TRUE);
CREATE OR REPLACE VIEW exported.lineage AS
    FROM read_parquet(getvariable('parts')['lineage'], union_by_name = TRUE);
CREATE OR REPLACE VIEW exported.critic AS
    FROM read_parquet(getvariable('parts')['critic'], union_by_name = TRUE);
CREATE OR REPLACE VIEW exported.versions AS
    FROM read_parquet(getvariable('parts')['versions'], union_by_name = TRUE);
CREATE OR REPLACE VIEW exported.checkpoints AS
    FROM read_parquet(getvariable('parts')['checkpoints'], union_by_name = TRUE);
CREATE OR REPLACE VIEW exported.metrics AS
    FROM read_parquet(getvariable('parts')['metrics'], union_by_name = TRUE);
CREATE OR REPLACE VIEW exported.component AS
    FROM read_parquet(getvariable('parts')['component'], union_by_name = TRUE);
CREATE OR REPLACE VIEW exported.events AS
    FROM read_parquet(getvariable('parts')['events'], union_by_name = TRUE);
CREATE OR REPLACE VIEW exported.unfinished AS
    FROM read_parquet(getvariable('parts')['unfinished'], union_by_name = TRUE);
CREATE OR REPLACE VIEW exported.excluded AS
    FROM read_parquet(getvariable('parts')['excluded'], union_by_name = TRUE);
