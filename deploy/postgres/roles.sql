-- Makes the two roles of a fleet and its database; run it once as a superuser, and again to change the passwords:
--   OWNER_PASSWORD_FILE=... NODE_PASSWORD_FILE=... psql -d postgres -f deploy/postgres/roles.sql
-- `autotune` owns the tables, for API, tuners, beat and operators; `autotune_node` is for node workers. Neither can do
-- anything outside this database: no files, no programs, no other roles. The image of PostgreSQL runs this file by
-- itself when its data folder is new. Afterwards, with the owner's URL: `autotune db migrate`, and then
-- `autotune db grant autotune_node`.
\set ON_ERROR_STOP on
\set owner_password `cat "${OWNER_PASSWORD_FILE:-/run/secrets/database-owner-password}"`
\set node_password `cat "${NODE_PASSWORD_FILE:-/run/secrets/database-node-password}"`

-- The server's log need not have the passwords.
SET log_statement = 'none';
SET log_min_error_statement = 'panic';
SELECT length(:'owner_password') = 0 OR length(:'node_password') = 0 AS no_password \gset
\if :no_password
    DO $$ BEGIN RAISE 'the file of a password is empty or cannot be read'; END $$;
\endif

SELECT format('CREATE ROLE %I', name) FROM (VALUES ('autotune'), ('autotune_node')) AS wanted (name)
WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = name) \gexec
ALTER ROLE autotune LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOREPLICATION NOBYPASSRLS PASSWORD :'owner_password';
ALTER ROLE autotune_node LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOREPLICATION NOBYPASSRLS PASSWORD :'node_password';

SELECT 'CREATE DATABASE autotune' WHERE NOT EXISTS (SELECT FROM pg_database WHERE datname = 'autotune') \gexec
ALTER DATABASE autotune OWNER TO autotune;
REVOKE ALL ON DATABASE autotune FROM PUBLIC;
GRANT CONNECT ON DATABASE autotune TO autotune_node;
\connect autotune
ALTER SCHEMA public OWNER TO autotune;
REVOKE ALL ON SCHEMA public FROM PUBLIC;
