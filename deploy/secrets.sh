#!/bin/sh
# Makes the passwords of a fleet, and the URLs that hold them, each in a file of its own:
#   sh deploy/secrets.sh [FOLDER]          deploy/secrets by default, where compose looks; files that are there stay
# Hosts are those that compose gives; name others by DATABASE, BROKER (as the control plane reaches them),
# NODE_DATABASE, NODE_BROKER (as nodes reach them), each HOST:PORT, and add TLS by
# DATABASE_OPTIONS='?sslmode=verify-full' and BROKER_SCHEME=rediss.
set -eu

folder=${1:-deploy/secrets}
database=${DATABASE:-postgres:5432} broker=${BROKER:-redis:6379}
node_database=${NODE_DATABASE:-127.0.0.1:5432} node_broker=${NODE_BROKER:-127.0.0.1:6379}
options=${DATABASE_OPTIONS:-} scheme=${BROKER_SCHEME:-redis}

# Nobody else gets into the folder. The files can be read by all, as the users inside of containers have to.
mkdir -p "$folder"
chmod 0700 "$folder"
cd "$folder"
umask 022

put() { # FILE CONTENT
    [ -e "$1" ] || printf '%s\n' "$2" >"$1"
}

for name in database-superuser database-owner database-node broker broker-node; do
    put "$name-password" "$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')"
done
put database-url "postgresql://autotune:$(cat database-owner-password)@$database/autotune$options"
put broker-url "$scheme://autotune:$(cat broker-password)@$broker/0"
put node-database-url "postgresql://autotune_node:$(cat database-node-password)@$node_database/autotune$options"
put node-broker-url "$scheme://autotune_node:$(cat broker-node-password)@$node_broker/0"
echo "in $folder:" *
